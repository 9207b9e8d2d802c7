# _build.py is written by setup.py: the torch that mixprec was compiled for.
TORCH: str
CUDA: str | None
ARCHITECTURES: str | None  # TORCH_CUDA_ARCH_LIST; None: no CUDA backend
