"""benchmarks/optimizer_step.py: one run gives every recipe, its bytes and its files."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

for package in ("torchvision", "rich", "matplotlib"):
    pytest.importorskip(package)

SCRIPT = Path(__file__).parents[1] / "benchmarks" / "optimizer_step.py"
BYTES = {  # a parameter of ResNet-18, of whose 11,181,642 all but 9,600 are in Linear and Conv
    "torch foreach": 24,
    "torch fused": 24,
    "mixprec fp32": 24,
    "mixprec half_weights": 24,
    "mixprec all half": 24,
    "mixprec compact masters": 20,
    "torch fused half": 12,
}


def run(*arguments):
    command = [sys.executable, "-P", str(SCRIPT), "--device", "cpu", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True)


def test_one_run(tmp_path):
    few = ("--rounds", 1, "--repeats", 1, "--threads", "1,2", "--clip", 1.0)
    done = run("--models", "resnet18", *few, "--out", tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    results = json.loads((tmp_path / "results.json").read_text())["results"]
    assert [row["recipe"] for row in results] == [*BYTES] * 2  # one thread, and two
    for row in results:
        assert row["recipe"] in done.stdout
        assert row["floor_bytes"] == row["parameters"] * BYTES[row["recipe"]]
        assert row["time_over_floor"] * row["floor_s"] == pytest.approx(row["time_s"])
        assert row["clip_adds"] == pytest.approx(row["clipped"]["wall_s"] / row["time_s"] - 1)
    state = {row["recipe"]: row["state_bytes"] for row in results}
    parameters = results[0]["parameters"]
    assert state["torch fused"] == state["mixprec fp32"] == 4 * parameters
    assert state["mixprec half_weights"] == 8 * parameters - 4 * 9600  # norms have no master
    assert state["mixprec all half"] == 8 * parameters
    assert state["mixprec compact masters"] == 6 * parameters
    assert state["torch fused half"] == 2 * parameters
    assert (tmp_path / "results.png").read_bytes().startswith(b"\x89PNG")


def test_unknown_names():
    for option in ("--models", "--recipes"):
        done = run(option, "nothing")
        assert done.returncode == 2
        assert "unknown: nothing; known:" in done.stderr
