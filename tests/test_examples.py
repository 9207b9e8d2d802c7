"""Each of examples/*.py runs from any folder, on whatever device there is, and learns.

Those whose docstring says so are started by torchrun. Those that import a package which is not
there are skipped.
"""

import ast
import importlib.util
import re
from pathlib import Path

import pytest
import torch
from helpers import run_python

EXAMPLES = sorted((Path(__file__).parents[1] / "examples").glob("*.py"))


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_example(path, tmp_path):
    source = path.read_text()
    for package in re.findall(r"^(?:import|from) (\w+)", source, re.M):
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"needs {package}")
    launcher = []
    if "torchrun" in ast.get_docstring(ast.parse(source)):
        if not torch.distributed.is_available():
            pytest.skip("this torch has no distributed package")
        processes = torch.cuda.device_count() or 2
        launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", processes]
    printed = run_python(*launcher, path, folder=tmp_path)
    values = [float(value) for value in re.findall(r"(?:loss|distance) ([\d.]+|nan|inf)", printed)]
    first, *_, last = values
    assert last < 0.8 * first, printed  # batches without any training differ by less
