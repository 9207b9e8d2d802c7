"""timm's trainers: its scaler, which does backward, clipping and step in one call, over ours."""

from collections.abc import Iterable
from typing import Any

import timm.utils
from torch import Tensor
from torch.optim import Optimizer

from .grad_scaler import GradScaler

__all__ = ["NativeScaler"]


class NativeScaler(timm.utils.NativeScaler):
    """``timm.utils.NativeScaler`` over :class:`mixprec.GradScaler`; checkpoints load both ways.

    Args:
        device, options: those of :class:`mixprec.GradScaler`.

    Example::

        loss_scaler = mixprec.timm.NativeScaler()
        loss_scaler(loss, optimizer, clip_grad=1.0, need_update=(i + 1) % accum_steps == 0)
    """

    def __init__(self, device: str | None = None, **options: Any) -> None:
        self._scaler = GradScaler(device, **options)

    def __call__(
        self,
        loss: Tensor,
        optimizer: Optimizer,
        clip_grad: float | None = None,
        clip_mode: str = "norm",
        parameters: Iterable[Tensor] | None = None,
        create_graph: bool = False,
        need_update: bool = True,
    ) -> None:
        """Scales the loss and goes backward; then, if ``need_update``, clips, steps and updates.

        Args:
            loss, optimizer, clip_grad, create_graph, need_update: as in timm.
            clip_mode: ``"norm"`` clips the norm of all of the optimizer's gradients, inside the
                step; ``"value"`` and ``"agc"`` unscale and clip those of ``parameters`` in place.
            parameters: for ``"value"`` and ``"agc"``.

        Raises:
            ValueError: ``"value"`` or ``"agc"`` with float16 gradients.
        """
        self._scaler.scale(loss).backward(create_graph=create_graph)  # type: ignore[no-untyped-call]
        if not need_update:
            return
        if clip_grad is not None and clip_mode == "norm":
            self._scaler.clip_grad_norm_(optimizer, clip_grad)
        elif clip_grad is not None:
            self._scaler.unscale_(optimizer)
            timm.utils.dispatch_clip_grad(parameters, clip_grad, mode=clip_mode)
        self._scaler.step(optimizer)
        self._scaler.update()
