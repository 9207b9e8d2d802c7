"""Hugging Face Accelerate, and what is built on it: a scaler by which it sees skipped steps.

Recipes for both are in docs/trainers.md.
"""

from typing import Any

from accelerate.optimizer import AcceleratedOptimizer
from torch import Tensor
from torch.optim import Optimizer

from . import grad_scaler

__all__ = ["GradScaler"]


class GradScaler(grad_scaler.GradScaler):
    """:class:`mixprec.GradScaler` that does not call the optimizer's ``step`` to skip it.

    Accelerate tells by that call whether a step was skipped, and holds prepared schedulers back.
    Knowing it on the host takes one sync a step, as ``torch.amp.GradScaler`` takes.

    Example::

        accelerator = accelerate.Accelerator(mixed_precision="fp16")
        accelerator.scaler = mixprec.accelerate.GradScaler()  # before prepare
        model, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)
    """

    def unscale_(self, optimizer: Optimizer) -> None:
        super().unscale_(_inner(optimizer))

    def clip_grad_norm_(
        self, optimizer: Optimizer, max_norm: float, norm_type: float = 2.0
    ) -> Tensor:
        return super().clip_grad_norm_(_inner(optimizer), max_norm, norm_type)

    @staticmethod
    def _step_on_device(
        optimizer: Any, grad_scale: Tensor | None, found_inf: Tensor, *rest: Any
    ) -> float | None:
        if found_inf.item():
            return None
        return grad_scaler.GradScaler._step_on_device(optimizer, grad_scale, found_inf, *rest)


def _inner(optimizer: Optimizer) -> Optimizer:
    """What a prepared optimizer calls step with: a scaler tells optimizers apart."""
    return optimizer.optimizer if isinstance(optimizer, AcceleratedOptimizer) else optimizer
