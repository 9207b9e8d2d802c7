"""Every example runs: Python blocks of README and scaling.md, and examples/*.py."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[1]
BLOCKS, SCALING_BLOCKS = (
    re.findall(r"^```python\n(.*?)^```", (ROOT / page).read_text(), re.M | re.S)
    for page in ("README.md", "docs/scaling.md")
)
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
NONE = pytest.param(None, marks=pytest.mark.skip(reason="there is none"))


@pytest.mark.parametrize("number", range(len(BLOCKS)) if BLOCKS else [NONE])
def test_readme_block(number, tmp_path):
    """On its own, in a process of its own: a reader copies one block."""
    run([sys.executable, "-c", BLOCKS[number]], tmp_path)


@pytest.mark.parametrize("path", EXAMPLES or [NONE], ids=lambda path: path and path.name)
def test_example(path, tmp_path):
    run([sys.executable, str(path)], tmp_path)


@pytest.mark.parametrize("number", range(len(SCALING_BLOCKS)))
def test_scaling_block(number, tmp_path):
    """In two processes; with GPUs, in one for each."""
    if not torch.distributed.is_available():
        pytest.skip("this torch has no distributed package")
    (tmp_path / "train.py").write_text(SCALING_BLOCKS[number])
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]
    processes = str(torch.cuda.device_count() or 2)
    run([sys.executable, *launcher, processes, "train.py"], tmp_path)


def run(command, folder):
    environment = {**os.environ, "OMP_NUM_THREADS": str(min(torch.get_num_threads(), 4))}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
