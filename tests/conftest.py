"""Set-up of the whole suite: helper modules, markers, the hypothesis profile."""

import itertools
import os
import signal
import sys
from pathlib import Path

import hypothesis
import pytest

# `python -m pytest` puts the checkout on sys.path, whose mixprec/ has no compiled module.
root = Path(__file__).parents[1]
sys.path[:] = [entry for entry in sys.path if Path(entry or ".").resolve() != root]

# --import-mode=importlib puts nothing on sys.path; spawned processes get it from here too.
sys.path.insert(0, str(Path(__file__).parent))

# What cuBLAS needs for the same bits on every run; read when it is loaded.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

# A CPU thread that waits for the others sleeps. Where processes share the cores, spinning made
# bf16 convolutions up to 15 times slower. Read when torch is loaded.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

# A shell's background jobs ignore Ctrl-C, and so would what the tests start.
signal.signal(signal.SIGINT, signal.default_int_handler)

# The same examples on every run; what fails prints how to repeat it.
hypothesis.settings.register_profile(
    "mixprec", deadline=None, derandomize=True, max_examples=60, print_blob=True
)
hypothesis.settings.load_profile("mixprec")


def pytest_configure(config):
    config.addinivalue_line("markers", "large: needs several GiB of memory")


@pytest.fixture(scope="module")
def poisoned():
    """Fresh memory holds garbage: what an op does not write shows."""
    from helpers import poisoned_memory

    with poisoned_memory():
        yield


@pytest.fixture
def tiny_model(monkeypatch):
    """Benchmarks build benchmark_runs.Tiny, whatever --model says."""
    from benchmark_runs import use_tiny_model

    use_tiny_model(monkeypatch)


@pytest.fixture
def run(capsys, tmp_path, monkeypatch):
    """Run benchmarks/resnet_cifar.py with options, of which strings are split into words.

    It returns exit code, stdout and stderr.
    """
    import resnet_cifar

    monkeypatch.chdir(tmp_path)  # where it looks for ./data and makes ./runs

    def call(*options):
        words = [option.split() if isinstance(option, str) else [option] for option in options]
        code = resnet_cifar.main([str(word) for word in itertools.chain(*words)])
        return code, *capsys.readouterr()

    return call


@pytest.fixture(scope="session", params=["cpu", "cuda"])
def processes(request, tmp_path_factory):
    """`processes(2, "job")` is what that job of the distributed tests returned on each rank."""
    import torch
    from workers import Processes

    if not torch.distributed.is_available():
        pytest.skip("this torch has no distributed package")
    if request.param == "cuda" and not torch.cuda.is_available():
        pytest.skip("needs a CUDA GPU")
    return Processes(tmp_path_factory.mktemp(f"processes-{request.param}"), request.param)
