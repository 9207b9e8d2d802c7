"""benchmarks/resnet_cifar.py: its modes, and what it records and reports of them."""

import gc
import subprocess
import sys

import pytest
import torch
from benchmark_runs import (
    BENCHMARKS,
    SMALL,
    TINY,
    Tiny,
    _config,
    _graph,
    _modes,
    overflow_at_label_2,
    results,
    weights,
)
from helpers import needs_cuda, poisoned_memory


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
    code, _, _ = run(TINY, "--out out --seeds 0 1 --clip-norm 0.5 --modes all")
    assert code == 0
    content = results(tmp_path / "out")
    records = {(one["mode"], one["seed"]): one for one in content["runs"]}
    assert len(records) == 10
    for seed in (0, 1):
        losses = {mode: records[mode, seed]["losses"] for mode in _modes.MODES}
        fp32, amp = losses["fp32"], losses["amp"]
        assert len(fp32) == 8 and min(fp32) > 0
        assert amp == losses["mixprec"]  # mixprec computes torch's bits
        assert amp != fp32 and amp == pytest.approx(fp32, rel=0.05)
        for mode in ("bf16", "amp-best"):  # the same, but for the order of the step's roundings
            assert losses[mode] == pytest.approx(amp, rel=1e-3)
    assert records["fp32", 0]["losses"] != records["fp32", 1]["losses"]
    assert all(row["accuracy"]["deviation"] is not None for row in content["summary"])
    assert (tmp_path / "out/results.png").read_bytes().startswith(b"\x89PNG")


def test_learning_rate_falls_along_a_cosine(run, tiny_model, monkeypatch):
    train_step, rates = _modes.Setup.train_step, []

    def recording(setup, x, y):
        rates.append(float(setup.optimizer.param_groups[0]["lr"]))
        return train_step(setup, x, y)

    monkeypatch.setattr(_modes.Setup, "train_step", recording)
    assert run(TINY, "--modes amp amp-best mixprec --lr 0.02 --out out")[0] == 0
    assert rates == pytest.approx((4 * [0.02] + 4 * [0.01]) * 3)


def test_skipped_steps_and_clipping(run, tiny_model, tmp_path, monkeypatch):
    overflow_at_label_2(monkeypatch)
    options = "--modes amp amp-best mixprec --clip-norm 1e-30 --momentum 0 --out out"
    assert run(TINY, options)[0] == 0
    for row in results(tmp_path / "out")["summary"]:
        assert row["steps_skipped"] == [2] and row["final_scale"] == [16384], row
    # Clipped to nothing, the weights are the initial ones.
    torch.manual_seed(0)
    initial = Tiny(10).state_dict()["0.weight"]
    for trained in weights(tmp_path / "out").values():
        assert torch.equal(trained["0.weight"], initial.to(trained["0.weight"].dtype))


def test_amp_best_survives_a_skipped_first_step(tiny_model):
    """torch's fused SGD takes unwritten memory for momentum there; _modes.py gives it zeros."""
    config = _config.Config(device="cpu", dtype="bf16")
    x, y = torch.rand(8, 3, 32, 32), torch.arange(8)
    trained = []
    for mode in ("amp", "amp-best"):
        setup = _modes.build(mode, 0, 10, config)
        with poisoned_memory():
            setup.scaler.scale(torch.zeros(()))
            for param in setup.model.parameters():
                param.grad = torch.full_like(param, torch.inf)
            setup.scaler.step(setup.optimizer)
            setup.scaler.update()
            for _ in range(2):
                setup.train_step(x, y)
        trained.append(setup.model[0].weight)
    torch.testing.assert_close(trained[1], trained[0], rtol=1e-3, atol=1e-5)


@needs_cuda
def test_hand_captured_steps_are_the_eager_ones(tiny_model, monkeypatch):
    """Every call is one step, the capturing one too."""
    monkeypatch.setattr(torch.backends.cudnn, "deterministic", True)
    config = _config.Config(device="cuda", dtype="fp16")
    trained = []
    for capture in (lambda step: step, _graph.HandCaptured):
        torch.manual_seed(0)
        setup = _modes.MODES["amp-best"].make(Tiny(10).cuda(), config)
        setup.forward, losses = setup.model, torch.zeros(8, device="cuda")
        place = torch.zeros(1, dtype=torch.int64, device="cuda")

        def step(x, y, setup=setup, losses=losses, place=place):
            losses.index_copy_(0, place, setup.train_step(x, y).view(1))
            place.add_(1)

        step = capture(step)
        generator = torch.Generator().manual_seed(0)
        for _ in range(8):
            x = torch.rand(8, 3, 32, 32, generator=generator).cuda()
            step(x, torch.randint(10, (8,), generator=generator).cuda())
        trained.append([losses, *setup.model.state_dict().values()])
    assert all(map(torch.equal, *trained))


@pytest.mark.parametrize("option, enabled", [("", True), ("--no-graph", False)])
def test_mixprec_is_graphed_unless_told(run, tiny_model, monkeypatch, option, enabled):
    asked = []

    def graphed(step, *, enabled):
        asked.append(enabled)
        return step

    monkeypatch.setattr("mixprec.graphed", graphed)
    code, out, _ = run(TINY, "--epochs 1 --modes amp mixprec", option)
    assert code == 0 and asked == [enabled]
    assert ("mixprec without graph" in out) is not enabled


@pytest.mark.parametrize("loader", ["device", "torch"])
def test_torch_modes_run_without_mixprec(run, tiny_model, monkeypatch, loader):
    monkeypatch.setitem(sys.modules, "mixprec", None)  # an ImportError
    options = f"{TINY} --epochs 1 --loader {loader}"
    assert run(options, "--modes fp32 bf16 amp amp-best")[0] == 0
    code, _, err = run(options)
    assert code == 2 and "--modes fp32 amp" in err


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


@needs_cuda
@pytest.mark.parametrize("mode", ["amp", "mixprec"])
def test_gpu_out_of_memory(run, tiny_model, mode):
    """The images fit, 12 MiB each for training and test; the first batch of them, 48, does not."""
    options = f"{SMALL} --device cuda --modes {mode} --train-limit 4096 --batch-size 4096"
    gc.collect()
    torch._C._cuda_clearCublasWorkspaces()  # as the benchmark does, or the batch finds their place
    torch.cuda.empty_cache()
    limit = torch.cuda.memory_reserved() + 44 * 2**20
    total = torch.cuda.get_device_properties("cuda").total_memory
    torch.cuda.set_per_process_memory_fraction(limit / total)
    try:
        code, _, err = run(options)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    assert code == 2 and err.count("\n") == 1
    assert f"out of memory in {mode} at batch size 4096" in err and "--batch-size 2048" in err
