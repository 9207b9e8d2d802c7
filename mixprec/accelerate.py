"""Hugging Face Accelerate, and what is built on it: a scaler by which it sees skipped steps.

Recipes for both are in docs/trainers.md.
"""

from typing import Any

from torch import Tensor

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

    @staticmethod
    def _step_on_device(
        optimizer: Any, grad_scale: Tensor | None, found_inf: Tensor, *rest: Any
    ) -> float | None:
        if found_inf.item():
            return None
        return grad_scaler.GradScaler._step_on_device(optimizer, grad_scale, found_inf, *rest)
