"""benchmarks/resnet_cifar.py under torchrun."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from benchmark_runs import TINY, assert_same_training, results

import _ranks  # isort: skip  # found by benchmark_runs


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_two_processes_with_an_interruption(tmp_path, device):
    """One rank is told to stop: both do, after the same step, and go on with the same bits."""
    if device == "cuda" and torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    script = Path(__file__).with_name("benchmark_ranks.py")
    command = [*launcher, "--nproc-per-node", "2", script, device]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert {"rank 0: [0, 130, 0]", "rank 1: [0, 130, 0]"} < set(done.stdout.splitlines())
    assert "torchrun --nproc-per-node 2" in done.stderr and "--resume stopped" in done.stderr
    assert done.stdout.count("images/s of all processes") == 2  # of two whole runs: rank 0's tables
    assert "batch 8 in each of 2 processes (16 in all)" in done.stdout
    found = re.findall(r"mixprec: epoch (\d)/2", done.stdout)
    assert found == ["1", "2", "1", "2"]
    if device == "cpu":  # a GPU's sums may come in another order
        assert_same_training(tmp_path / "stopped", tmp_path / "whole")
    for run in results(tmp_path / "whole")["runs"]:
        assert len(run["losses"]) == 2 * 320 // 16 and run["accuracies"][-1] > 20


def test_resume_with_other_processes(run, tiny_model, monkeypatch):
    run(TINY, "--modes amp --out out")
    monkeypatch.setattr(_ranks, "world_size", lambda: 2)
    code, _, err = run("--resume out")
    assert code == 2 and "has 1 processes, not 2: python" in err


def test_shares_of_a_batch(monkeypatch):
    order = torch.randperm(24).repeat(3, 1)
    assert torch.equal(_ranks.share(order, 4), order)
    monkeypatch.setattr(_ranks, "is_on", lambda: True)
    monkeypatch.setattr(_ranks, "world_size", lambda: 3)
    shares = []
    for rank in range(3):
        monkeypatch.setattr(_ranks, "rank", lambda rank=rank: rank)
        shares.append(_ranks.share(order, 4))
    for step in range(2):
        ours = torch.cat([share[:, 4 * step : 4 * step + 4] for share in shares], dim=1)
        assert torch.equal(ours, order[:, 12 * step : 12 * step + 12])
