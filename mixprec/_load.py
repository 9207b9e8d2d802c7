"""Refuses, in one readable error, a torch that the compiled extension cannot run with.

Imported before mixprec._C, which would fail there with an undefined symbol, or crash later.
"""

from pathlib import Path

import torch

try:
    from mixprec import _build
except ImportError:
    _folder = Path(__file__).parent
    raise ImportError(
        f"{_folder} is mixprec's source folder, without the compiled extension. Install it by "
        f"`pip install .` in {_folder.parent}, and start Python in another folder, or with -P "
        "(and tests by `pytest`, not `python -m pytest`)"
    ) from None


def _abi(torch_version: str, cuda: str | None) -> tuple[list[str], str | None]:
    """What has to be equal: torch's minor version, and CUDA's major version or its absence."""
    return torch_version.split(".")[:2], cuda and cuda.split(".")[0]


if _abi(_build.TORCH, _build.CUDA) != _abi(torch.__version__, torch.version.cuda):
    raise ImportError(
        f"mixprec was built for torch {_build.TORCH} (CUDA: {_build.CUDA}), but this is torch "
        f"{torch.__version__} (CUDA: {torch.version.cuda}). Build it for this one, in mixprec's "
        "source folder: pip install --force-reinstall --no-deps --no-cache-dir ."
    )
