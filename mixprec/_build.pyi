# _build.py is written by setup.py: the torch that mixprec was compiled for.
TORCH: str
CUDA: str | None
