"""benchmarks/resnet_cifar.py: its modes, and what it records and reports of them."""

import subprocess
import sys

import pytest
import torch
from benchmark_runs import BENCHMARKS, TINY, Tiny, _modes, overflow_at_label_2, results, weights


def test_script_compares_every_mode(tmp_path):
    """The real model and a real process; everything else here runs in this one."""
    options = f"{TINY} --model squeezenet1_1 --train-limit 8 --batch-size 4 --epochs 1 --out out"
    command = [sys.executable, BENCHMARKS / "resnet_cifar.py", *options.split()]
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
    code, _, _ = run(TINY, "--out out --seeds 0 1 --clip-norm 0.5")
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
    options = "--modes amp mixprec --clip-norm 1e-30 --momentum 0 --out out"
    assert run(TINY, options)[0] == 0
    for row in results(tmp_path / "out")["summary"]:
        assert row["steps_skipped"] == [2] and row["final_scale"] == [16384], row
    # Clipped to nothing, the weights are the initial ones.
    torch.manual_seed(0)
    initial = Tiny(10).state_dict()["0.weight"]
    for trained in weights(tmp_path / "out").values():
        assert torch.equal(trained["0.weight"], initial.to(trained["0.weight"].dtype))


def test_tensorboard(run, tiny_model, tmp_path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    run(TINY, "--out out --modes amp --tensorboard")
    events = EventAccumulator(str(tmp_path / "out/tensorboard/amp-seed0"))
    events.Reload()
    record = results(tmp_path / "out")["runs"][0]
    assert [event.value for event in events.Scalars("loss")] == record["losses"]
    assert [event.value for event in events.Scalars("test accuracy")] == pytest.approx(
        record["accuracies"]
    )


@pytest.mark.parametrize("mode", ["fp32", "amp", "mixprec"])
def test_nan_loss_stops(run, tiny_model, mode):
    code, _, err = run(TINY, "--modes", mode, "--lr 1e30")
    assert code == 2 and err.count("\n") == 1
    for word in (mode, "step ", "loss ", "scale ", "--lr (it is 1e+30)"):
        assert word in err


@pytest.mark.parametrize("mode", ["amp", "mixprec"])
def test_collapsed_scale_stops(run, tiny_model, monkeypatch, mode):
    cross_entropy = _modes.F.cross_entropy
    monkeypatch.setattr(
        _modes.F, "cross_entropy", lambda x, y: cross_entropy(x, y) + (x.sum() * 0).sqrt()
    )
    code, _, err = run(TINY, "--modes", mode, "--train-limit 160")
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
    code, _, err = run(TINY, "--modes amp")
    assert code == 2 and err.count("\n") == 1
    assert "amp at batch size 8" in err and "--batch-size 4" in err
