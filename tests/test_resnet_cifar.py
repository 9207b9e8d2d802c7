"""benchmarks/resnet_cifar.py: modes, data, interruption and resuming, errors."""

import hashlib
import io
import json
import os
import pickle
import signal
import subprocess
import sys
import tarfile
import time
from pathlib import Path

import pytest
import torch
from torch import nn

for package in ("torchvision", "rich", "matplotlib"):
    pytest.importorskip(package)

import numpy as np  # noqa: E402
from PIL import Image  # noqa: E402
from torchvision import transforms  # noqa: E402
from torchvision.datasets import CIFAR10, ImageFolder  # noqa: E402

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))
import _batches  # noqa: E402
import _config  # noqa: E402
import _data  # noqa: E402
import _modes  # noqa: E402
import _train  # noqa: E402
import resnet_cifar  # noqa: E402

TINY = [
    "--device",
    "cpu",
    "--data",
    "synthetic",
    "--train-limit",
    "32",
    "--batch-size",
    "8",
    "--epochs",
    "2",
]


class Tiny(nn.Sequential):
    """Fast, and with what a resumed run can get wrong: batch norm, dropout, convolution."""

    def __init__(self, num_classes: int):
        super().__init__(
            nn.Conv2d(3, 16, 5, stride=4),
            nn.BatchNorm2d(16),
            nn.ReLU(),
            nn.Dropout(0.1),
            nn.Flatten(),
            nn.Linear(16 * 49, num_classes),
        )


def use_tiny_model(patch):
    patch.setattr(
        "torchvision.models.get_model", lambda name, weights, num_classes: Tiny(num_classes)
    )


def overflow_at_label_2(patch):
    """NaN gradients of a finite loss where a batch starts with class 2: TINY's steps 1 and 7."""
    cross_entropy = _modes.F.cross_entropy

    def overflowing(x, y):
        loss = cross_entropy(x, y)
        return loss + (x.sum() * 0).sqrt() if y[0] == 2 else loss  # sqrt'(0) is inf

    patch.setattr(_modes.F, "cross_entropy", overflowing)


@pytest.fixture
def tiny_model(monkeypatch):
    use_tiny_model(monkeypatch)


@pytest.fixture
def run(capsys, tmp_path, monkeypatch):
    """Run the script with options; its exit code, stdout and stderr."""
    monkeypatch.chdir(tmp_path)  # where it looks for ./data and makes ./runs

    def call(*options):
        code = resnet_cifar.main([str(option) for option in options])
        return code, *capsys.readouterr()

    return call


def results(out):
    return json.loads((out / "results.json").read_text())


def weights(out):
    return {path.name: torch.load(path, weights_only=True) for path in out.glob("weights-*.pt")}


def assert_same_training(out, reference):
    ours, theirs = weights(out), weights(reference)
    assert ours.keys() == theirs.keys() and ours
    for name in ours:
        assert ours[name].keys() == theirs[name].keys()
        assert all(torch.equal(ours[name][key], theirs[name][key]) for key in ours[name]), name
    for one, other in zip(results(out)["runs"], results(reference)["runs"], strict=True):
        for key in ("mode", "seed", "losses", "scales", "accuracies", "steps_skipped"):
            assert one[key] == other[key], key


def write_folder(root, sizes=((12, 12),), classes=("ant", "bee")):
    """An ImageFolder tree of random images, lossless, so that pixels can be compared."""
    generator = np.random.default_rng(0)
    for split, count in (("train", 6), ("test", 3)):
        for name in classes:
            (root / split / name).mkdir(parents=True)
            for index in range(count):
                width, height = sizes[index % len(sizes)]
                pixels = generator.integers(0, 256, (height, width, 3), dtype=np.uint8)
                Image.fromarray(pixels).save(root / split / name / f"{index}.png")
    return root


def test_script_compares_every_mode(tmp_path):
    """The real model and a real process; everything else here runs in this one."""
    command = [
        sys.executable,
        BENCHMARKS / "resnet_cifar.py",
        *TINY,
        "--model",
        "squeezenet1_1",
        "--train-limit",
        "8",
        "--batch-size",
        "4",
        "--epochs",
        "1",
        "--out",
        "out",
    ]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr and "\x1b" not in done.stdout
    content = results(tmp_path / "out")
    assert any(
        {"fp32", "amp", "mixprec"} < set(line.split()) for line in done.stdout.splitlines()
    )  # the table's head
    assert "squeezenet1_1, synthetic data" in done.stdout and torch.__version__ in done.stdout
    assert [row["mode"] for row in content["summary"]] == ["fp32", "amp", "mixprec"]
    assert (
        content["data"]["name"] == "synthetic data"
        and content["environment"]["torch"] == torch.__version__
    )


def test_modes_see_the_same_weights_and_batches(run, tiny_model, tmp_path):
    code, _, _ = run(*TINY, "--out", "out", "--seeds", 0, 1, "--clip-norm", 0.5)
    assert code == 0
    content = results(tmp_path / "out")
    records = {(one["mode"], one["seed"]): one for one in content["runs"]}
    assert len(records) == 6
    for seed in (0, 1):
        fp32, amp, mixprec = (records[mode, seed]["losses"] for mode in ("fp32", "amp", "mixprec"))
        assert len(fp32) == 8 and min(fp32) > 0
        assert amp == mixprec  # mixprec computes torch's bits
        assert amp != fp32 and amp == pytest.approx(fp32, rel=0.05)
    assert records["fp32", 0]["losses"] != records["fp32", 1]["losses"]
    assert all(row["accuracy"]["deviation"] is not None for row in content["summary"])
    assert (tmp_path / "out/results.png").read_bytes().startswith(b"\x89PNG")


def test_skipped_steps_and_clipping(run, tiny_model, tmp_path, monkeypatch):
    overflow_at_label_2(monkeypatch)
    options = ["--modes", "amp", "mixprec", "--clip-norm", 1e-30, "--momentum", 0, "--out", "out"]
    assert run(*TINY, *options)[0] == 0
    for row in results(tmp_path / "out")["summary"]:
        assert row["steps_skipped"] == [2] and row["final_scale"] == [16384], row
    # Clipped to nothing, the weights are the initial ones.
    torch.manual_seed(0)
    initial = Tiny(10).state_dict()["0.weight"]
    for trained in weights(tmp_path / "out").values():
        assert torch.equal(trained["0.weight"], initial.to(trained["0.weight"].dtype))


def test_synthetic_is_deterministic_and_learnable(run, tiny_model, tmp_path):
    first, second = (_data.synthetic(None).load("train", torch.arange(64)) for _ in range(2))
    assert np.array_equal(first.images, second.images)
    assert not np.array_equal(
        first.images, _data.synthetic(None).load("test", torch.arange(64)).images
    )
    options = ["--train-limit", 1000, "--epochs", 3, "--modes", "fp32", "--lr", 0.02]
    run(*TINY, *options, "--out", "out")
    accuracy = results(tmp_path / "out")["summary"][0]["accuracy"]["mean"]
    assert accuracy > 40  # chance is 10

    # It is the accuracy of the weights that were saved, in evaluation mode, on all test images.
    model = Tiny(10).eval()
    model.load_state_dict(weights(tmp_path / "out")["weights-fp32-seed0.pt"])
    test = _data.synthetic(None).load("test", _batches.pick(10_000, 1000))
    batches = _batches.DeviceBatches(test, torch.device("cpu"), resnet_cifar.Console())
    ((x, y),) = batches(torch.arange(1000), 1000, torch.contiguous_format)
    assert accuracy == pytest.approx(
        100 * (model(x).argmax(1) == y).float().mean().item(), abs=0.15
    )


def test_limited_data_has_all_classes():
    assert _batches.pick(50_000, 100).div(5000, rounding_mode="floor").unique().numel() == 10


def test_tensorboard(run, tiny_model, tmp_path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    run(*TINY, "--out", "out", "--modes", "amp", "--tensorboard")
    events = EventAccumulator(str(tmp_path / "out/tensorboard/amp-seed0"))
    events.Reload()
    record = results(tmp_path / "out")["runs"][0]
    assert [event.value for event in events.Scalars("loss")] == record["losses"]
    assert [event.value for event in events.Scalars("test accuracy")] == pytest.approx(
        record["accuracies"]
    )


@pytest.mark.parametrize("workers", [None, 0, 2])
def test_image_folder(tmp_path, workers):
    root = write_folder(tmp_path / "tree")
    config = _config.Config(
        data=str(root),
        device="cpu",
        batch_size=4,
        workers=workers or 0,
        loader="device" if workers is None else "torch",
    )
    console = resnet_cifar.Console(file=io.StringIO())
    source = _data.open_source(config, console)
    assert source.num_classes == 2 and str(root) in source.name
    order = torch.tensor([7, 0, 11, 3, 4])
    for split, picked in (("train", order), ("test", order[order < 6])):
        batches = _batches.load_splits(source, config, console)[split]
        transform = transforms.Compose(
            [transforms.ToTensor(), transforms.Normalize(_batches.MEAN, _batches.STD)]
        )
        expected = ImageFolder(root / split, transform)
        x, y = zip(*batches(picked, 4, torch.channels_last), strict=True)
        assert x[0].is_contiguous(memory_format=torch.channels_last)
        assert torch.cat(y).tolist() == [expected[i][1] for i in picked]
        torch.testing.assert_close(
            torch.cat(x), torch.stack([expected[i][0] for i in picked]), rtol=1e-5, atol=1e-5
        )


def test_image_folder_run(run, tiny_model, tmp_path):
    write_folder(tmp_path / "tree")
    code, out, err = run(
        "--device",
        "cpu",
        "--data",
        "tree",
        "--image-size",
        32,
        "--batch-size",
        2,
        "--epochs",
        1,
        "--modes",
        "fp32",
        "--train-limit",
        8,
        "--out",
        "out",
    )
    assert code == 0, err
    data = results(tmp_path / "out")["data"]
    assert (
        data["name"] == f"ImageFolder {tmp_path / 'tree'}"
        and data["classes"] == 2
        and data["train"] == 8
    )
    assert data["name"] in " ".join(out.split()) and data["test"] == 6


def fake_cifar10(folder, monkeypatch):
    """An archive like CIFAR-10's, 20 images a file, where torchvision is told to expect it."""

    def add(archive, name, content):
        data = pickle.dumps(content)
        entry = tarfile.TarInfo(f"{CIFAR10.base_folder}/{name}")
        entry.size = len(data)
        archive.addfile(entry, io.BytesIO(data))
        return hashlib.md5(data).hexdigest()

    generator, path = np.random.default_rng(0), folder / "archive.tar.gz"
    with tarfile.open(path, "w:gz") as archive:
        for attribute in ("train_list", "test_list"):
            monkeypatch.setattr(
                CIFAR10,
                attribute,
                [
                    [
                        name,
                        add(
                            archive,
                            name,
                            {
                                "data": generator.integers(0, 256, (20, 3072), dtype=np.uint8),
                                "labels": generator.integers(0, 10, 20).tolist(),
                            },
                        ),
                    ]
                    for name, _ in getattr(CIFAR10, attribute)
                ],
            )
        md5 = add(archive, "batches.meta", {"label_names": list("abcdefghij")})
        monkeypatch.setattr(CIFAR10, "meta", {**CIFAR10.meta, "md5": md5})
    monkeypatch.setattr(CIFAR10, "url", path.as_uri())
    monkeypatch.setattr(CIFAR10, "tgz_md5", hashlib.md5(path.read_bytes()).hexdigest())


def test_cifar10_is_downloaded_once(run, tiny_model, tmp_path, monkeypatch):
    fake_cifar10(tmp_path, monkeypatch)
    options = [
        "--device",
        "cpu",
        "--batch-size",
        50,
        "--epochs",
        1,
        "--modes",
        "fp32",
        "--train-limit",
        0,
    ]
    assert run(*options, "--out", "out")[0] == 0
    assert (
        results(tmp_path / "out")["data"]["name"] == "CIFAR-10"
        and results(tmp_path / "out")["data"]["train"] == 100
    )
    monkeypatch.setattr(CIFAR10, "url", "file:///nowhere")
    assert run(*options, "--out", "again", "--data", "cifar10")[0] == 0


@pytest.mark.parametrize("answer", ["hangs", "fails", "lies"])
def test_download_is_given_up(run, tiny_model, tmp_path, monkeypatch, answer):
    fake_cifar10(tmp_path, monkeypatch)
    monkeypatch.setattr(_data, "STALL_SECONDS", 0.3)
    if answer == "hangs":
        monkeypatch.setattr("urllib.request.urlopen", lambda *args, **options: time.sleep(60))
    elif answer == "fails":
        monkeypatch.setattr(CIFAR10, "url", "file:///nowhere")
    else:
        monkeypatch.setattr(CIFAR10, "tgz_md5", "0" * 32)
    options = TINY[:2] + TINY[4:] + ["--modes", "fp32"]
    code, out, _ = run(*options, "--out", "out")
    assert (
        code == 0
        and "synthetic data" in out
        and results(tmp_path / "out")["data"]["name"] == "synthetic data"
    )
    code, _, err = run(*options, "--out", "strict", "--data", "cifar10")
    assert code == 2 and "could not be downloaded" in err and err.count("\n") == 1


RESUMED = [*TINY, "--modes", "amp", "mixprec"]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    out = tmp_path_factory.mktemp("undisturbed") / "out"
    with pytest.MonkeyPatch.context() as patch:
        use_tiny_model(patch)
        overflow_at_label_2(patch)
        assert resnet_cifar.main([*RESUMED, "--out", str(out)]) == 0
    return out


def interrupt_at_call(monkeypatch, owner, name, number):
    """Ctrl-C inside the `number`-th call of a method."""
    original, calls = getattr(owner, name), []

    def wrapper(*args, **options):
        calls.append(1)
        if len(calls) == number:
            signal.raise_signal(signal.SIGINT)
        return original(*args, **options)

    monkeypatch.setattr(owner, name, wrapper)


# 4 steps an epoch, 2 epochs, amp first.
@pytest.mark.parametrize(
    "owner, name, number",
    [
        (_modes.Setup, "train_step", 2),  # inside the first epoch
        (_modes.Setup, "train_step", 4),  # its last step
        (_train.Training, "evaluate", 1),  # its evaluation
        (_train.Training, "state_dict", 1),  # while its checkpoint is made
        (_modes.Setup, "train_step", 15),  # in the second mode's second epoch
        (resnet_cifar, "write_files", 1),  # when all is done
        (resnet_cifar, "load_splits", 1),  # before the first step
    ],
)
def test_interrupted_and_resumed_is_undisturbed(
    run, tiny_model, tmp_path, monkeypatch, undisturbed, owner, name, number
):
    overflow_at_label_2(monkeypatch)
    with monkeypatch.context() as patch:
        interrupt_at_call(patch, owner, name, number)
        code, _, err = run(*RESUMED, "--out", "out")
    if name == "write_files":
        assert code == 0
    else:
        assert code == 130 and err.count("\n") == 1 and err.rstrip().endswith("--resume out")
        assert run("--resume", "out")[0] == 0
    assert_same_training(tmp_path / "out", undisturbed)


def test_killed_run_resumes_from_its_last_epoch(
    run, tiny_model, tmp_path, monkeypatch, undisturbed
):
    """A kill is not announced: here an exception in the second epoch, past the handler."""
    overflow_at_label_2(monkeypatch)
    original, calls = _modes.Setup.train_step, []

    def killed_at_6(*args):
        calls.append(1)
        if len(calls) == 6:
            raise SystemExit
        return original(*args)

    with monkeypatch.context() as patch:
        patch.setattr(_modes.Setup, "train_step", killed_at_6)
        with pytest.raises(SystemExit):
            run(*RESUMED, "--out", "out")
    assert run("--resume", "out")[0] == 0
    assert_same_training(tmp_path / "out", undisturbed)


def test_failed_save_leaves_the_last_one(tmp_path):
    _train.save_atomically(tmp_path / "file.pt", [1])
    with pytest.raises(AttributeError):
        _train.save_atomically(tmp_path / "file.pt", [2, lambda: 0])  # cannot be pickled
    assert torch.load(tmp_path / "file.pt", weights_only=True) == [1]


def test_sigint_from_outside(tmp_path):
    command = [
        sys.executable,
        BENCHMARKS / "resnet_cifar.py",
        *TINY,
        "--model",
        "squeezenet1_1",
        "--modes",
        "fp32",
        "--epochs",
        "30",
        "--out",
        "out",
        "--loader",
        "torch",
    ]
    process = subprocess.Popen(
        command,
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert "epoch 1/30" in process.stdout.readline()
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does: the DataLoader's workers get it too
    _, err = process.communicate()
    assert process.returncode == 130 and err.count("\n") == 1 and "--resume out" in err
    state = torch.load(tmp_path / "out/checkpoint.pt", weights_only=True)["unfinished"]
    assert 4 <= state["step"] < 120 and state["losses"][: state["step"]].min() > 0


def test_second_interrupt_kills():
    with _train.StopFlag() as stop:
        signal.raise_signal(signal.SIGINT)
        assert stop.requested and signal.getsignal(signal.SIGINT) is signal.SIG_DFL
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


@pytest.mark.parametrize(
    "options, message",
    [
        (["--modes", "fp23"], "invalid choice: 'fp23'"),
        (["--model", "resnet81"], "did you mean resnet1"),
        (["--device", "toaster"], "expected cpu, cuda or cuda:N"),
        (["--device", "cuda:99"], "CUDA devices"),
        (["--lr", "-1"], "--lr"),
        (["--epochs", "0"], "--epochs"),
        (["--batch-size", "33"], "more than the 32 training images"),
        (["--batch-size", "1", "--model", "resnet18"], "--batch-size"),
        (["--model", "alexnet"], "--image-size"),
        (["--data", "nowhere"], "there is no folder"),
        (["--data", "empty"], "empty/train"),
        (["--data", "mixed"], "--image-size"),
        (["--data", "broken"], "not a readable image"),
        (["--data", "broken", "--loader", "torch", "--image-size", "32"], "not a readable image"),
        (["--resume", "nowhere"], "there is no checkpoint.pt"),
        (["--nonsense"], "--nonsense"),
    ],
)
def test_errors_are_one_line(run, tmp_path, options, message):
    (tmp_path / "empty/train").mkdir(parents=True)
    (tmp_path / "empty/test").mkdir()
    write_folder(tmp_path / "mixed", sizes=((12, 12), (13, 12)))
    for path in write_folder(tmp_path / "broken", sizes=((32, 32),)).glob("train/*/3.png"):
        path.write_bytes(b"no image")
    start = [] if "--resume" in options else [*TINY, "--modes", "fp32", "--model", "squeezenet1_1"]
    if "--data" in options:
        start += ["--batch-size", "2", "--train-limit", "0"]
    code, _, err = run(*start, *options)
    assert code == 2 and message in err and err.count("\n") == 1 and "Traceback" not in err


def test_resume_refuses_another_run(run, tiny_model, undisturbed):
    code, _, err = run("--resume", undisturbed, "--lr", "0.5", "--epochs", "2")
    assert code == 2 and "leave out --lr," in err and err.count("\n") == 1
    code, _, err = run(*TINY, "--out", undisturbed)
    assert code == 2 and "holds a run already" in err
    (undisturbed.parent / "checkpoint.pt").write_bytes(b"no checkpoint")
    code, _, err = run("--resume", undisturbed.parent)
    assert code == 2 and "is damaged" in err and err.count("\n") == 1


@pytest.mark.parametrize("mode", ["fp32", "amp", "mixprec"])
def test_nan_loss_stops(run, tiny_model, mode):
    code, _, err = run(*TINY, "--modes", mode, "--lr", "1e30")
    assert code == 2 and err.count("\n") == 1
    for word in (mode, "step ", "loss ", "scale ", "--lr (it is 1e+30)"):
        assert word in err


@pytest.mark.parametrize("mode", ["amp", "mixprec"])
def test_collapsed_scale_stops(run, tiny_model, monkeypatch, mode):
    cross_entropy = _modes.F.cross_entropy
    monkeypatch.setattr(
        _modes.F, "cross_entropy", lambda x, y: cross_entropy(x, y) + (x.sum() * 0).sqrt()
    )
    code, _, err = run(*TINY, "--modes", mode, "--train-limit", 160)
    assert code == 2 and "step 17 " in err and "scale 0.5" in err  # 2^16 halved 17 times


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory"),
        RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to ..."),
    ],
)
def test_out_of_memory_says_what_helps(run, tiny_model, monkeypatch, error):
    def fail(*args):
        raise error

    monkeypatch.setattr(_modes.Setup, "train_step", fail)
    code, _, err = run(*TINY, "--modes", "amp")
    assert (
        code == 2
        and "amp at batch size 8" in err
        and "--batch-size 4" in err
        and err.count("\n") == 1
    )


def test_cpu_size_is_fitted_and_said(run, tiny_model, tmp_path, monkeypatch):
    monkeypatch.setattr(resnet_cifar, "CPU_SECONDS", 0)
    code, out, _ = run(
        "--device", "cpu", "--data", "synthetic", "--modes", "fp32", "amp", "--out", "out"
    )
    assert code == 0 and "No GPU: cut down to 2 epochs of 32 training images" in out
    assert results(tmp_path / "out")["config"]["dtype"] == "bf16"


def test_help_explains_every_option(capsys):
    with pytest.raises(SystemExit):
        resnet_cifar.main(["--help"])
    text = capsys.readouterr().out
    for action in _config.build_parser()._actions:
        assert action.option_strings[-1] in text and action.help
