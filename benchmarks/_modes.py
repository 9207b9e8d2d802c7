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


def torch_setup(model: nn.Module, config: Config, mixed: bool) -> Setup:
    optimizer = torch.optim.SGD(model.parameters(), **config.sgd_options)
    scaler = torch.amp.GradScaler(config.device_type, enabled=mixed)

    def autocast() -> torch.autocast:
        return torch.autocast(config.device_type, config.half_dtype, enabled=mixed)

    def clip() -> None:
        if config.clip_norm is not None:
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), config.clip_norm)

    return Setup(model, optimizer, scaler, autocast, clip)


def fp32(model: nn.Module, config: Config) -> Setup:
    return torch_setup(model, config, mixed=False)


def amp(model: nn.Module, config: Config) -> Setup:
    return torch_setup(model, config, mixed=True)


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

    return Setup(model, optimizer, scaler, autocast, clip)


@dataclass(frozen=True)
class Mode:
    make: Callable[[nn.Module, Config], Setup]
    summary: str
    channels_last_on_cuda: bool = False


MODES = {
    "fp32": Mode(fp32, "no mixed precision"),
    "amp": Mode(amp, "torch.autocast + torch.amp.GradScaler + torch.optim.SGD, eager"),
    "mixprec": Mode(
        mixprec,
        "half_weights, mixprec.SGD and mixprec.GradScaler, channels_last on CUDA",
        channels_last_on_cuda=True,
    ),
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
    setup.forward = torch.compile(setup.model) if config.compile else setup.model
    return setup
