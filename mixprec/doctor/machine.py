"""What this machine has, and what mixprec was built for."""

import contextlib
import importlib
import platform
import subprocess
import warnings
from typing import Any

import torch

_SINCE = {"float16": (7, 0), "bfloat16": (8, 0), "TF32": (8, 0), "float8": (8, 9)}


def describe() -> dict[str, Any]:
    """The GPU (None: torch has none), driver, CPU and versions."""
    with warnings.catch_warnings(record=True) as problems:  # an old driver is one
        has_gpu = torch.cuda.is_available()
    gpu, problem = None, "; ".join(str(p.message) for p in problems) or None
    if has_gpu:
        try:
            gpu, problem = _gpu(), None
        except RuntimeError as error:  # it is another process's alone, or full
            problem = str(error)
    smi = _nvidia_smi()
    return {
        "gpu": gpu,
        "gpu_count": torch.cuda.device_count() if has_gpu else 0,
        "gpu_problem": problem,
        "gpu_of_driver": smi[0] if smi else None,
        "driver": smi[1] if smi else None,
        "cuda": torch.version.cuda,
        "torch": str(torch.__version__),
        "python": platform.python_version(),
        "cpu": torch.backends.cpu.get_cpu_capability(),
        "threads": torch.get_num_threads(),
    }


def describe_build() -> dict[str, Any]:
    """What setup.py wrote and compiled, and why it cannot be imported (None: it can)."""
    build: dict[str, Any] = {"backends": [], "error": None}
    try:
        importlib.import_module("mixprec._load")  # first, as in mixprec/__init__.py
        extension = importlib.import_module("mixprec._C")
        build["backends"] = ["CPU", "CUDA"] if hasattr(extension, "Copies") else ["CPU"]
    except ImportError as error:
        build["error"] = str(error)
    with contextlib.suppress(ImportError):  # the error above says that there is none
        written = importlib.import_module("mixprec._build")
        build |= {"torch": written.TORCH, "cuda": written.CUDA}
        build["architectures"] = getattr(written, "ARCHITECTURES", None)
    return build


def _gpu() -> dict[str, Any]:
    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    capability = properties.major, properties.minor
    free, total = torch.cuda.mem_get_info()
    return {
        "name": properties.name,
        "capability": f"{properties.major}.{properties.minor}",
        "tensor_cores": tensor_cores(properties.name, capability),
        "memory_gib": round(total / 2**30, 1),
        "free_gib": round(free / 2**30, 1),
    }


def tensor_cores(name: str, capability: tuple[int, int]) -> list[str]:
    """The dtypes that a GPU multiplies on tensor cores."""
    if "GTX 16" in name:  # 7.5 without them
        return []
    return [dtype for dtype, since in _SINCE.items() if capability >= since]


def _nvidia_smi() -> tuple[str, str] | None:
    """Name of the first GPU and the driver's version, where nvidia-smi is there and works."""
    command = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=20)
    except (OSError, subprocess.SubprocessError):
        return None
    name, _, driver = done.stdout.partition("\n")[0].rpartition(", ")
    return (name, driver) if name else None
