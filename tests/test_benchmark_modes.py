"""benchmarks/resnet_cifar.py: the further modes, and --augment."""

import pytest
import torch
from benchmark_runs import TINY, results, use_tiny_model

import _batches  # isort: skip  on sys.path since benchmark_runs
import _data  # isort: skip
import _train  # isort: skip
import resnet_cifar  # isort: skip

AUGMENTED = [*TINY.split(), "--augment"]


def losses(folder):
    return {run["mode"]: run["losses"] for run in results(folder)["runs"]}


def test_every_mode(tmp_path, monkeypatch):
    use_tiny_model(monkeypatch)
    modes = ("fp32", "amp", "mixprec", "amp-best", "bf16")
    options = ["--modes", *modes, "--dtype", "fp16", "--out", str(tmp_path / "out")]
    assert resnet_cifar.main([*AUGMENTED, *options]) == 0
    found = losses(tmp_path / "out")
    assert list(found) == list(modes)
    assert found["mixprec"] == found["amp"]
    assert found["amp-best"] == pytest.approx(found["amp"], rel=1e-3)
    assert found["bf16"] != found["amp"]
    for run in results(tmp_path / "out")["runs"]:
        assert run["final_scale"] == (1 if run["mode"] in ("fp32", "bf16") else 65536)


def test_augmented_run_resumes(tmp_path, monkeypatch):
    use_tiny_model(monkeypatch)
    options = [*AUGMENTED, "--modes", "mixprec", "--out"]
    assert resnet_cifar.main([*options, str(tmp_path / "whole")]) == 0

    evaluate = _train.Training.evaluate
    with monkeypatch.context() as patch:
        # As a Ctrl-C in the first epoch's evaluation.
        patch.setattr(_train.Training, "evaluate", lambda *_: False)
        assert resnet_cifar.main([*options, str(tmp_path / "out")]) == 130
    assert _train.Training.evaluate is evaluate
    assert resnet_cifar.main(["--resume", str(tmp_path / "out")]) == 0
    assert losses(tmp_path / "out") == losses(tmp_path / "whole")

    plain = [*TINY.split(), "--modes", "mixprec", "--out", str(tmp_path / "plain")]
    assert resnet_cifar.main(plain) == 0
    assert losses(tmp_path / "plain") != losses(tmp_path / "whole")


def test_augmentation_by_both_loaders():
    """Each image moved and mirrored as its line of `shifts` says, against a loop over pixels."""
    device = torch.device("cpu")
    split = _data.synthetic(None).load("train", torch.arange(20))
    images = torch.from_numpy(split.images)
    generator = torch.Generator().manual_seed(0)
    shifts = torch.randint(-4, 5, (20, 3), generator=generator)
    shifts[:, 2] %= 2
    order = torch.randperm(20, generator=generator)
    on_device = _batches.DeviceBatches(split, device, resnet_cifar.Console())
    by_loader = _batches.LoaderBatches(split, device, workers=0)
    batches = (b(order, 7, torch.contiguous_format, shifts) for b in (on_device, by_loader))
    xs, loaded = (torch.cat([x for x, _ in one]) for one in batches)
    torch.testing.assert_close(loaded, xs)

    mean, std = (torch.tensor(v).view(3, 1, 1) for v in (_batches.MEAN, _batches.STD))
    for x, index in zip(xs, order.tolist(), strict=True):
        down, right, mirrored = shifts[index].tolist()
        expected = torch.zeros(32, 32, 3)
        for row in range(32):
            for column in range(32):
                source = 31 - column if mirrored else column
                if 0 <= row - down < 32 and 0 <= source - right < 32:
                    expected[row, column] = images[index, row - down, source - right]
        torch.testing.assert_close(x, (expected.permute(2, 0, 1) / 255 - mean) / std)
