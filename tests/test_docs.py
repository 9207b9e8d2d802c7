"""README's Python blocks run, on whatever device there is."""

import re
from pathlib import Path

import pytest
from helpers import run_python

ROOT = Path(__file__).parents[1]
BLOCKS = re.findall(r"^```python\n(.*?)^```", (ROOT / "README.md").read_text(), re.M | re.S)
NONE = pytest.param(None, marks=pytest.mark.skip(reason="there is none"))


@pytest.mark.parametrize("number", range(len(BLOCKS)) if BLOCKS else [NONE])
def test_readme_block(number, tmp_path):
    """On its own, in a process of its own: a reader copies one block."""
    run_python("-c", BLOCKS[number], folder=tmp_path)
