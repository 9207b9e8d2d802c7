"""A training step in one CUDA graph by hand, as torch's notes on CUDA graphs do it."""

from __future__ import annotations

from collections.abc import Callable

import _ranks
import torch

Step = Callable[[torch.Tensor, torch.Tensor], None]


class HandCaptured:
    """`step`, captured after a warm-up; every call is a real step. Inputs have one shape."""

    def __init__(self, step: Step):
        self.step = step
        # State is made, code compiled, cuDNN's algorithms found; DDP times its first ten.
        self.warm_up = 11 if _ranks.is_on() else 3
        self.stream = torch.cuda.Stream()
        self.graph: torch.cuda.CUDAGraph | None = None

    def __call__(self, x: torch.Tensor, y: torch.Tensor) -> None:
        if self.warm_up:
            self.warm_up -= 1
            self.stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self.stream):
                self.step(x, y)
            torch.cuda.current_stream().wait_stream(self.stream)
            return
        if self.graph is None:
            self.x, self.y = x.clone(), y.clone()
            self.graph = torch.cuda.CUDAGraph()
            # "thread_local", since a DataLoader's own thread pins memory whenever it likes.
            with torch.cuda.graph(self.graph, capture_error_mode="thread_local"):
                self.step(self.x, self.y)
        else:
            self.x.copy_(x)
            self.y.copy_(y)
        self.graph.replay()  # a capture alone computes nothing
