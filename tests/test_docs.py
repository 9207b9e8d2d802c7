"""Every example runs, on whatever device there is; the pages of docs/ name tests that exist."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[1]
PAGES = sorted((ROOT / "docs").glob("*.md"))
BLOCKS = [
    pytest.param(block, id=f"{page.name}-{number}")
    for page in (ROOT / "README.md", *PAGES)
    for number, block in enumerate(
        re.findall(r"^```python\n(.*?)^```", page.read_text(), re.M | re.S)
    )
]
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
NONE = pytest.param(None, marks=pytest.mark.skip(reason="there is none"))


@pytest.mark.parametrize("block", BLOCKS)
def test_block(block, tmp_path):
    """On its own, in a process of its own: a reader copies one block."""
    for package in re.findall(r"^(?:import|from) (\w+)", block, re.M):
        pytest.importorskip(package)
    run([sys.executable, "-c", block], tmp_path)


@pytest.mark.parametrize("path", EXAMPLES or [NONE], ids=lambda path: path and path.name)
def test_example(path, tmp_path):
    run([sys.executable, str(path)], tmp_path)


def run(command, folder):
    environment = {**os.environ, "OMP_NUM_THREADS": str(min(torch.get_num_threads(), 4))}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_page_names_tests_that_exist(page):
    text = page.read_text()
    for file, name in [*re.findall(r"`(test_\w+\.py)::(\w+)", text), *names_in_columns(text)]:
        assert f"def {name}(" in (ROOT / "tests" / file).read_text(), (file, name)


def names_in_columns(text):
    """(file, test) for the cells of tables whose heads name a file for each column."""
    for table in re.findall(r"^\|.*`test_\w+\.py`.*\n(?:\|.*\n)+", text, re.M):
        rows = [line.split("|")[2:-1] for line in table.splitlines()]
        for head, *cells in zip(*rows, strict=True):
            for name in re.findall(r"`(test_\w+)`", " ".join(cells)):
                yield re.findall(r"test_\w+\.py", head)[0], name
