"""The bits of torch's own plain CPU kernels, which round multiplications and additions apart."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).parent


@pytest.mark.parametrize("capability", ["default", "avx2"])
def test_bits_at_lower_cpu_capability(capability):
    """Tests of rules again, in a process whose torch uses that instruction set."""
    chosen = (
        "every_hyperparameter or float64 or rounds_as or norm_against or unscale_writes"
        " or any_weight or between_any"
    )
    names = ("sgd", "remainders", "clip", "grad_scaler")
    files = [str(TESTS / f"test_{name}.py") for name in names]
    options = ["-q", "-p", "no:cacheprovider", "-k", f"cpu and ({chosen})"]
    done = subprocess.run(
        [sys.executable, "-P", "-m", "pytest", *options, *files],
        env={**os.environ, "ATEN_CPU_CAPABILITY": capability},
        cwd=TESTS.parent,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
