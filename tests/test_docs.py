"""Every example runs: README's Python blocks, and examples/*.py, on whatever device there is."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[1]
BLOCKS = re.findall(r"^```python\n(.*?)^```", (ROOT / "README.md").read_text(), re.M | re.S)
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
NONE = pytest.param(None, marks=pytest.mark.skip(reason="there is none"))


@pytest.mark.parametrize("number", range(len(BLOCKS)) if BLOCKS else [NONE])
def test_readme_block(number, tmp_path):
    """On its own, in a process of its own: a reader copies one block."""
    run([sys.executable, "-c", BLOCKS[number]], tmp_path)


@pytest.mark.parametrize("path", EXAMPLES or [NONE], ids=lambda path: path and path.name)
def test_example(path, tmp_path):
    run([sys.executable, str(path)], tmp_path)


def run(command, folder):
    environment = {**os.environ, "OMP_NUM_THREADS": str(min(torch.get_num_threads(), 4))}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
