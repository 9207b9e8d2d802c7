"""benchmarks/resnet_cifar.py: options, defaults, and errors in one line."""

import pytest
from benchmark_runs import TINY, _config, resnet_cifar, results, write_folder


@pytest.mark.parametrize(
    "options, message",
    [
        ("--modes fp23", "invalid choice: 'fp23'"),
        ("--model resnet81", "did you mean resnet1"),
        ("--device toaster", "expected cpu, cuda or cuda:N"),
        ("--device cuda:99", "CUDA devices"),
        ("--lr -1", "--lr"),
        ("--epochs 0", "--epochs"),
        ("--batch-size 33", "more than the 32 training images"),
        ("--batch-size 1 --model resnet18", "--batch-size"),
        ("--model alexnet", "--image-size"),
        ("--data nowhere", "there is no folder"),
        ("--data empty", "empty/train"),
        ("--data mixed", "--image-size"),
        ("--data broken", "not a readable image"),
        ("--data broken --loader torch --image-size 32", "not a readable image"),
        ("--resume nowhere", "there is no checkpoint.pt"),
        ("--nonsense", "--nonsense"),
    ],
)
def test_errors_are_one_line(run, tmp_path, options, message):
    (tmp_path / "empty/train").mkdir(parents=True)
    (tmp_path / "empty/test").mkdir()
    write_folder(tmp_path / "mixed", sizes=((12, 12), (13, 12)))
    for path in write_folder(tmp_path / "broken", sizes=((32, 32),)).glob("train/*/3.png"):
        path.write_bytes(b"no image")
    start = "" if "--resume" in options else f"{TINY} --modes fp32 --model squeezenet1_1"
    if "--data" in options:
        start += " --batch-size 2 --train-limit 0"
    code, _, err = run(start, options)
    assert code == 2 and message in err and err.count("\n") == 1 and "Traceback" not in err


@pytest.mark.parametrize(
    "given, modes",
    [
        ("", ["fp32", "amp", "mixprec"]),
        ("--modes all", ["fp32", "bf16", "amp", "amp-best", "mixprec"]),
        ("--modes mixprec amp-best mixprec", ["mixprec", "amp-best"]),
    ],
)
def test_modes(given, modes):
    config = _config.Config(**vars(_config.build_parser().parse_args(given.split())))
    _config.resolve_device_defaults(config)
    assert config.modes == modes


def test_cpu_size_is_fitted_and_said(run, tiny_model, tmp_path, monkeypatch):
    monkeypatch.setattr(resnet_cifar, "CPU_SECONDS", 0)
    code, out, _ = run("--device cpu --data synthetic --modes fp32 amp --out out")
    assert code == 0 and "No GPU: cut down to 2 epochs of 32 training images" in out
    assert results(tmp_path / "out")["config"]["dtype"] == "bf16"


def test_help_explains_every_option(capsys):
    with pytest.raises(SystemExit):
        resnet_cifar.main(["--help"])
    text = capsys.readouterr().out
    for action in _config.build_parser()._actions:
        assert action.option_strings[-1] in text and action.help
