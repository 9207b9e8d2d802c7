"""Trainings killed at random moments, many while they write a checkpoint, lose nothing."""

import subprocess
import sys
from pathlib import Path

import pytest
from benchmark_runs import assert_same_training, overflow_at_label_2, resnet_cifar, use_tiny_model
from kills import KILLS, OPTIONS


def test_killed_trainings_end_with_the_same_bits(tmp_path):
    with pytest.MonkeyPatch.context() as patch:
        use_tiny_model(patch)
        overflow_at_label_2(patch)
        undisturbed = tmp_path / "undisturbed"
        assert resnet_cifar.main([*OPTIONS.split(), "--out", str(undisturbed)]) == 0
    folder = Path(__file__).parent
    done = subprocess.run(
        [sys.executable, folder / "kills.py", tmp_path / "out"],
        capture_output=True,
        text=True,
        timeout=600,
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith(f"{KILLS} killed\n")
    assert_same_training(tmp_path / "out", undisturbed)
