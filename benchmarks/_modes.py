"""The modes of resnet_cifar.py: each a function that makes its parts, and a row in MODES."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torchvision
from _graph import HandCaptured, Step
from torch import nn
from torch.nn import functional as F

if TYPE_CHECKING:
    from _config import Config


@dataclass
class Setup:
    """A mode made ready.

    `clip` unscales and clips the gradients, and `capture` makes a CUDA graph of a step, each in the
    mode's own way.
    """

    model: nn.Module
    optimizer: torch.optim.Optimizer
    scaler: torch.amp.GradScaler
    autocast: Callable[[], contextlib.AbstractContextManager]
    clip: Callable[[], Any]
    capture: Callable[[Step], Step] = lambda step: step
    forward: Callable[[torch.Tensor], Any] | None = None  # the model, compiled if asked for
    memory_format: torch.memory_format = torch.contiguous_format

    def train_step(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        self.optimizer.zero_grad()
        with self.autocast():
            loss = F.cross_entropy(logits(self.forward(x)), y)
        self.scaler.scale(loss).backward()
        self.clip()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        return loss.detach()


def logits(output: Any) -> torch.Tensor:
    """Inception and GoogLeNet return their auxiliary heads too while training."""
    return output if torch.is_tensor(output) else output.logits


def torch_setup(
    model: nn.Module, config: Config, dtype: torch.dtype | None, scaled: bool, fused: bool = False
) -> Setup:
    """The parts that torch has; `dtype` is autocast's, None for none."""
    # Not fused=False: that would also turn off foreach, torch's default.
    optimizer = torch.optim.SGD(model.parameters(), fused=fused or None, **config.sgd_options)
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


def bf16(model: nn.Module, config: Config) -> Setup:
    return torch_setup(model, config, torch.bfloat16, scaled=False)


def amp(model: nn.Module, config: Config) -> Setup:
    return torch_setup(model, config, config.half_dtype, scaled=True)


def amp_best(model: nn.Module, config: Config) -> Setup:
    setup = torch_setup(model, config, config.half_dtype, scaled=True, fused=True)
    for group in setup.optimizer.param_groups:  # on the device, where the graph reads it anew
        group["lr"] = torch.tensor(group["lr"], device=config.device)
    if config.momentum:
        # torch's fused SGD reads momentum that nobody wrote if the first step is skipped.
        for param in model.parameters():
            setup.optimizer.state[param]["momentum_buffer"] = torch.zeros_like(param)
    if config.device_type == "cuda":
        setup.capture = HandCaptured
    return setup


def mixprec(model: nn.Module, config: Config) -> Setup:
    import mixprec

    model = mixprec.half_weights(model, config.half_dtype)
    optimizer = mixprec.SGD(model.parameters(), store_param_remainders=True, **config.sgd_options)
    scaler = mixprec.GradScaler(config.device_type)

    def autocast() -> torch.autocast:
        return mixprec.autocast(config.device_type, config.half_dtype)

    def clip() -> None:
        if config.clip_norm is not None:
            scaler.clip_grad_norm_(optimizer, config.clip_norm)

    def capture(step: Step) -> Step:
        return mixprec.graphed(step, enabled=config.graph)

    return Setup(model, optimizer, scaler, autocast, clip, capture)


@dataclass(frozen=True)
class Mode:
    make: Callable[[nn.Module, Config], Setup]
    summary: str
    channels_last_on_cuda: bool = False
    compile_on_cuda: bool = False


MODES = {
    "fp32": Mode(fp32, "no mixed precision"),
    "bf16": Mode(bf16, "torch.autocast in bfloat16 + torch.optim.SGD, no scaler, eager"),
    "amp": Mode(amp, "torch.autocast + torch.amp.GradScaler + torch.optim.SGD, eager"),
    "amp-best": Mode(
        amp_best,
        "amp with all that plain torch has: SGD(fused=True), and on CUDA channels_last, "
        "torch.compile and a CUDA graph of the whole step captured by hand",
        channels_last_on_cuda=True,
        compile_on_cuda=True,
    ),
    "mixprec": Mode(
        mixprec,
        "half_weights, mixprec.SGD with remainders for masters and mixprec.GradScaler; on CUDA "
        "channels_last and graphed",
        channels_last_on_cuda=True,
    ),
}
DEFAULT_MODES = ("fp32", "amp", "mixprec")


def build(mode: str, seed: int, num_classes: int, config: Config) -> Setup:
    """The same seed gives every mode the same initial weights and random state."""
    torch.manual_seed(seed)
    model = torchvision.models.get_model(config.model, weights=None, num_classes=num_classes)
    on_cuda = config.device_type == "cuda"
    channels_last = config.channels_last
    if channels_last is None:
        channels_last = on_cuda and MODES[mode].channels_last_on_cuda
    memory_format = torch.channels_last if channels_last else torch.contiguous_format
    setup = MODES[mode].make(model.to(config.device, memory_format=memory_format).train(), config)
    setup.memory_format = memory_format
    setup.forward = setup.model
    if config.compile or (on_cuda and MODES[mode].compile_on_cuda):
        torch.compiler.reset()  # nothing that another mode compiled
        setup.forward = torch.compile(setup.model)
    return setup
