"""Each of examples/*.py runs from any folder, on whatever device there is, and learns.

Skipped: those whose docstring says to start them with torchrun, and those that import a package
which is not there.
"""

import ast
import importlib.util
import re
from pathlib import Path

import pytest
from helpers import run_python

EXAMPLES = sorted((Path(__file__).parents[1] / "examples").glob("*.py"))


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_example(path, tmp_path):
    source = path.read_text()
    if "torchrun" in ast.get_docstring(ast.parse(source)):
        pytest.skip("needs torchrun")
    for package in re.findall(r"^(?:import|from) (\w+)", source, re.M):
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"needs {package}")
    printed = run_python(path, folder=tmp_path)
    values = [float(value) for value in re.findall(r"(?:loss|distance) ([\d.]+|nan|inf)", printed)]
    first, *_, last = values
    assert last < 0.8 * first, printed  # batches without any training differ by less
