"""PyTorch Lightning's mixed precision over mixprec.GradScaler, with half weights and clipping."""

from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.plugins import precision as plugins
from torch import nn
from torch.optim import Optimizer

from .autocast import default_device_type
from .grad_scaler import GradScaler
from .half_weights import half_weights as store_half_weights

__all__ = ["MixedPrecision"]


class MixedPrecision(plugins.MixedPrecision):
    """Lightning's plugin of this name, with :class:`mixprec.GradScaler`.

    ``gradient_clip_val`` works with :class:`mixprec.SGD` and with torch's fused optimizers, which
    Lightning's own plugin refuses. Checkpoints of that one load. The hook
    ``on_before_optimizer_step`` sees their gradients still scaled.

    Args:
        precision: ``"16-mixed"``, or ``"bf16-mixed"``, which takes no scaler.
        device: of autocast, ``"cuda"`` or ``"cpu"``; default: ``"cuda"`` where there is one.
        scaler: default: ``mixprec.GradScaler(device)``.
        half_weights: call :func:`mixprec.half_weights` on the module before its optimizers are
            made; with :class:`mixprec.SGD`.

    Raises:
        TypeError: ``scaler`` is of another class.

    Example::

        trainer = lightning.Trainer(plugins=mixprec.lightning.MixedPrecision("16-mixed"))
    """

    def __init__(
        self,
        precision: str = "16-mixed",
        device: str | None = None,
        scaler: GradScaler | None = None,
        *,
        half_weights: bool = False,
    ) -> None:
        device = device or default_device_type()
        if not (scaler is None or isinstance(scaler, GradScaler)):
            raise TypeError(f"scaler must be a mixprec.GradScaler, got {type(scaler)}")
        if scaler is None and precision == "16-mixed":
            scaler = GradScaler(device)
        super().__init__(precision, device, scaler)
        # For bf16 a disabled one, which clips.
        self.scaler: GradScaler = scaler or GradScaler(device, enabled=False)
        self.half_weights = half_weights

    def convert_module(self, module: nn.Module) -> nn.Module:
        """Lightning calls this after it has loaded a checkpoint, before it makes the optimizers."""
        if self.half_weights:
            store_half_weights(module, self.autocast_context_manager().fast_dtype)
        return module

    def optimizer_step(
        self,
        optimizer: Optimizer,
        model: pl.LightningModule,
        closure: Callable[[], Any],
        **kwargs: Any,
    ) -> Any:
        """As in Lightning, but nothing is clipped where ``training_step`` returned None."""
        result = closure()
        if result is None and model.automatic_optimization:
            return None
        return super().optimizer_step(optimizer, model, lambda: result, **kwargs)

    def clip_gradients(
        self,
        optimizer: Optimizer,
        clip_val: float = 0.0,
        gradient_clip_algorithm: str = "norm",
    ) -> None:
        """Clips gradients: norms in the step itself, values in place.

        Raises:
            ValueError: ``"value"`` with float16 gradients.
        """
        if isinstance(optimizer, LightningOptimizer):  # in manual optimization
            optimizer = optimizer.optimizer
        if not getattr(optimizer, "_step_supports_amp_scaling", False):
            super().clip_gradients(optimizer, clip_val, gradient_clip_algorithm)
        elif clip_val > 0 and gradient_clip_algorithm == "norm":
            self.scaler.clip_grad_norm_(optimizer, clip_val)
        elif clip_val > 0:
            self.scaler.unscale_(optimizer)
            self.clip_grad_by_value(optimizer, clip_val)
