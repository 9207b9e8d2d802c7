"""Compiles mixprec._C against the torch of the environment that mixprec is being installed into."""

import os
import re
import shutil
import subprocess
import sys
from glob import glob
from importlib.machinery import PathFinder
from pathlib import Path

from setuptools import setup

MIN_TORCH = "2.6"


def output_of(*command):
    return subprocess.check_output(command, text=True, stderr=subprocess.STDOUT)


def import_torch():
    """Returns the torch of the environment being installed into, or None where it has none.

    Build isolation hides it by environment variables. A child that ignores them (-E) has its whole
    sys.path, .pth files and user site-packages included; setuptools still comes from the build's.
    """

    def holds_torch(path):  # a folder that an uninstall left behind has no origin
        return getattr(PathFinder.find_spec("torch", path), "origin", None)

    code = "import sys; print(*sys.path[1:], sep='\\n')"
    target_path = output_of(sys.executable, "-E", "-c", code).splitlines()
    sys.path += target_path if holds_torch(target_path) else []
    if not holds_torch(sys.path):
        return None
    import torch

    if torch.__version__ < MIN_TORCH:  # a TorchVersion, which compares as a version
        sys.exit(f"mixprec: needs torch >= {MIN_TORCH}, and this is torch {torch.__version__}")
    return torch


def find_nvcc(torch):
    """Returns the nvcc to use, or None, and sets CUDA_HOME. A GPU need not be there."""
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    nvcc = f"{home}/bin/nvcc" if home else shutil.which("nvcc") or "/usr/local/cuda/bin/nvcc"
    if not (want := torch.version.cuda) or not os.path.exists(nvcc):
        return None
    have = re.search(r"release (.*),", output_of(nvcc, "--version"))[1]
    if have.split(".")[0] != want.split(".")[0]:
        sys.exit(
            f"mixprec: torch {torch.__version__} is built with CUDA {want}, {nvcc} is CUDA {have}: "
            f"set CUDA_HOME to a CUDA {want} toolkit, or install a torch built with CUDA {have}"
        )
    if not home:
        # torch would take the folder above nvcc's, wrong where the nvcc on PATH is a wrapper script
        top = re.search(r"TOP=(.*)", output_of(nvcc, "--dryrun", "x.cu"))[1]
        os.environ["CUDA_HOME"] = os.path.realpath(top)
    return nvcc


def default_architectures(torch, nvcc):
    """Returns what torch's binaries and nvcc both know, 7.0 to 12.0, and PTX for later GPUs."""
    lists = torch._C._cuda_getArchFlags(), output_of(nvcc, "--list-gpu-code")
    known = set.intersection(*({int(n) for n in re.findall(r"sm_(\d+)\b", s)} for s in lists))
    return ";".join(f"{n // 10}.{n % 10}" for n in sorted(known) if 70 <= n <= 120) + "+PTX"


def shared_libstdcxx():
    """Returns the linker's arguments for torch's own C++ library.

    A compiler without libstdc++.so links libstdc++.a: a second copy beside the one that torch
    loaded, and the two crash over each other's locales when an error message is formatted.
    """
    found = output_of(*os.environ["CXX"].split(), "-print-file-name=libstdc++.so").strip()
    return [] if os.path.isabs(found) else ["-l:libstdc++.so.6"]


def setup_with(torch):
    nvcc = find_nvcc(torch)
    from torch.utils import cpp_extension  # reads CUDA_HOME

    # Results are specified to the bit, each fma written out: no compiler may contract more of them.
    # Without traps the compiler may compute both sides of a select, which vectorises; same results.
    host_flags = ["-Wall", "-fvisibility=hidden", "-ffp-contract=off", "-fno-trapping-math"]
    # -g0: Python's own flags can hold -g. at::parallel_for is OpenMP in a header; linking a runtime
    # for it could load a second one beside torch's.
    flags = {"cxx": ["-O3", "-DNDEBUG", "-g0", "-fopenmp", *host_flags]}
    sources = glob("csrc/python/*.cpp") + glob("csrc/cpu/*.cpp")
    backends = f"CPU alone ({'no nvcc found' if torch.version.cuda else 'torch has no CUDA'})"
    if nvcc:
        if not os.environ.get("TORCH_CUDA_ARCH_LIST"):
            os.environ["TORCH_CUDA_ARCH_LIST"] = default_architectures(torch, nvcc)
        flags["nvcc"] = ["-O3", "-DNDEBUG", "-fmad=false", "-Xcompiler=" + ",".join(host_flags)]
        sources += glob("csrc/cuda/*.cu")
        backends = f"CPU, CUDA ({nvcc}, {os.environ['TORCH_CUDA_ARCH_LIST']})"

    class BuildExtension(cpp_extension.BuildExtension):
        def run(self):
            if not shutil.which(os.environ.setdefault("CXX", "c++").split()[0]):
                sys.exit(f"mixprec: no C++ compiler {os.environ['CXX']}: install g++, or set CXX")
            print(f"mixprec: torch {torch.__version__}, backends: {backends}", file=sys.stderr)
            self.extensions[0].extra_link_args += shared_libstdcxx()
            super().run()
            # what `import mixprec` compares with the torch it meets, and `doctor` with the GPU
            built_with = f"TORCH = {str(torch.__version__)!r}\nCUDA = {torch.version.cuda!r}\n"
            architectures = os.environ["TORCH_CUDA_ARCH_LIST"] if nvcc else None
            built_with += f"ARCHITECTURES = {architectures!r}\n"
            Path(self.get_ext_fullpath("mixprec._C")).with_name("_build.py").write_text(built_with)

    extension = (cpp_extension.CUDAExtension if nvcc else cpp_extension.CppExtension)(
        name="mixprec._C",
        sources=sorted(sources),
        include_dirs=[os.path.abspath("csrc")],
        define_macros=[("WITH_CUDA", None)] if nvcc else [],
        depends=glob("csrc/**/*.h", recursive=True) + glob("csrc/**/*.cuh", recursive=True),
        extra_compile_args=flags,
    )
    setup(
        ext_modules=[extension],
        cmdclass={"build_ext": BuildExtension},
        install_requires=[f"torch=={'.'.join(torch.__version__.split('.')[:2])}.*"],
        # a build folder for each torch: objects compiled for another one are never reused
        options={"build": {"build_base": f"build/{torch.__version__}-{'cuda' if nvcc else 'cpu'}"}},
    )


if torch := import_torch():
    setup_with(torch)
elif {"egg_info", "sdist"} & set(sys.argv):
    setup(setup_requires=[f"torch>={MIN_TORCH}"])  # pip installs it for the build, and calls again
else:
    sys.exit("mixprec: no torch to build with; without build isolation, install it first")
