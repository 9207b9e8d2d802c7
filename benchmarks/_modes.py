"""The modes of resnet_cifar.py: each a function that makes its parts, and a row in MODES."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torchvision
from torch import nn
from torch.nn import functional as F

if TYPE_CHECKING:
    from _config import Config


@dataclass
class Setup:
    """A mode made ready. `clip` unscales and clips the gradients in the mode's own way."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    scaler: torch.amp.GradScaler
    autocast: Callable[[], contextlib.AbstractContextManager]
    clip: Callable[[], Any]
    forward: Callable[[torch.Tensor], Any] | None = None  # the model, compiled if asked for
    step: Callable[..., torch.Tensor] | None = None  # train_step, in a graph if the mode has one
    memory_format: torch.memory_format = torch.contiguous_format

    def train_step(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """Returns the loss and the scale after the step, as one tensor."""
        self.optimizer.zero_grad()
        with self.autocast():
            loss = F.cross_entropy(logits(self.forward(x)), y)
        self.scaler.scale(loss).backward()
        self.clip()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        return torch.stack((loss.detach(), self.scaler.scale(torch.ones_like(loss))))


def logits(output: Any) -> torch.Tensor:
    """Inception and GoogLeNet return their auxiliary heads too while training."""
    return output if torch.is_tensor(output) else output.logits


def torch_setup(
    model: nn.Module,
    config: Config,
    dtype: torch.dtype | None,
    scaled: bool = True,
    fused: bool | None = None,
) -> Setup:
    optimizer = torch.optim.SGD(model.parameters(), **config.sgd_options, fused=fused)
    scaler = torch.amp.GradScaler(config.device_type, enabled=scaled)

    def autocast() -> torch.autocast:
        return torch.autocast(config.device_type, dtype, enabled=dtype is not None)

    def clip() -> None:
        if config.clip_norm is not None:
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), config.clip_norm)

    return Setup(model, optimizer, scaler, autocast, clip)


def fp32(model: nn.Module, config: Config) -> Setup:
    return torch_setup(model, config, None, scaled=False)


def amp(model: nn.Module, config: Config) -> Setup:
    return torch_setup(model, config, config.half_dtype)


def bf16(model: nn.Module, config: Config) -> Setup:
    return torch_setup(model, config, torch.bfloat16, scaled=False)


def amp_best(model: nn.Module, config: Config) -> Setup:
    setup = torch_setup(model, config, config.half_dtype, fused=True)
    if config.device_type == "cuda":
        setup.step = CapturedStep(setup.train_step)
    return setup


def mixprec(model: nn.Module, config: Config) -> Setup:
    import mixprec

    model = mixprec.half_weights(model, config.half_dtype)
    optimizer = mixprec.SGD(model.parameters(), **config.sgd_options)
    scaler = mixprec.GradScaler(config.device_type)

    def autocast() -> torch.autocast:
        return mixprec.autocast(config.device_type, config.half_dtype)

    def clip() -> None:
        if config.clip_norm is not None:
            scaler.clip_grad_norm_(optimizer, config.clip_norm)

    setup = Setup(model, optimizer, scaler, autocast, clip)
    setup.step = mixprec.graphed(setup.train_step, enabled=config.graph)
    return setup


class CapturedStep:
    """A step as one CUDA graph, by hand, as torch's documentation describes it."""

    WARM_UP = 3

    def __init__(self, step: Callable[..., torch.Tensor]):
        self.step, self.calls = step, 0
        self.stream = torch.cuda.Stream()

    def __call__(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        if self.calls <= self.WARM_UP:
            self.stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self.stream):
                result = self.step(x, y)
            torch.cuda.current_stream().wait_stream(self.stream)
            return result
        if self.calls == self.WARM_UP + 1:
            self.inputs = [x.clone(), y.clone()]
            self.graph = torch.cuda.CUDAGraph()
            # thread_local: a DataLoader's own thread pins memory whenever it likes.
            with torch.cuda.graph(
                self.graph, stream=self.stream, capture_error_mode="thread_local"
            ):
                self.result = self.step(*self.inputs)
        for static, given in zip(self.inputs, (x, y), strict=True):
            static.copy_(given)
        self.graph.replay()
        return self.result.clone()


@dataclass(frozen=True)
class Mode:
    make: Callable[[nn.Module, Config], Setup]
    summary: str
    channels_last_on_cuda: bool = False
    compile_on_cuda: bool = False
    is_default: bool = True


MODES = {
    "fp32": Mode(fp32, "no mixed precision"),
    "amp": Mode(amp, "torch.autocast + torch.amp.GradScaler + torch.optim.SGD, eager"),
    "mixprec": Mode(
        mixprec,
        "half_weights, mixprec.SGD, mixprec.GradScaler; on CUDA channels_last and mixprec.graphed",
        channels_last_on_cuda=True,
    ),
    "amp-best": Mode(
        amp_best,
        "the fastest of torch alone: amp with fused SGD and, on CUDA, channels_last, torch.compile "
        "and the whole step captured by hand in a CUDA graph",
        channels_last_on_cuda=True,
        compile_on_cuda=True,
        is_default=False,
    ),
    "bf16": Mode(bf16, "torch.autocast in bfloat16 without a scaler, eager", is_default=False),
}


def build(mode: str, seed: int, num_classes: int, config: Config) -> Setup:
    """The same seed gives every mode the same initial weights and random state."""
    torch.manual_seed(seed)
    model = torchvision.models.get_model(config.model, weights=None, num_classes=num_classes)
    channels_last = config.channels_last
    if channels_last is None:
        channels_last = config.device_type == "cuda" and MODES[mode].channels_last_on_cuda
    memory_format = torch.channels_last if channels_last else torch.contiguous_format
    setup = MODES[mode].make(model.to(config.device, memory_format=memory_format).train(), config)
    setup.memory_format = memory_format
    on_cuda = config.device_type == "cuda"
    compiled = config.compile or (on_cuda and MODES[mode].compile_on_cuda)
    setup.forward = torch.compile(setup.model) if compiled else setup.model
    setup.step = setup.step or setup.train_step
    return setup
