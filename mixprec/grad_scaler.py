"""Dynamic loss scaling without a host sync: torch.amp.GradScaler's rule, one launch each.

The rule is torch's (https://pytorch.org/docs/stable/amp.html#gradient-scaling), after Micikevicius
et al., "Mixed Precision Training", 2018; hysteresis is Megatron-LM's. It is in csrc/arithmetic.h.
"""

import inspect
import itertools
import math
import weakref
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.amp.grad_scaler import OptState
from torch.optim import Optimizer

from . import _C
from ._mesh import reduced
from .autocast import default_device_type
from .overflow import OverflowReport, Records, overflow_report
from .sgd import SGD

__all__ = ["GradScaler"]


class GradScaler(torch.amp.GradScaler):
    """:class:`torch.amp.GradScaler` at the cost of one read of the gradients, and no sync.

    A drop-in subclass: same arguments, methods, errors and ``state_dict``, loadable both ways. With
    :class:`mixprec.SGD`, and with torch's optimizers given ``fused=True``, nothing here syncs with
    the GPU; with torch's other optimizers ``step`` syncs once, as in torch.

    A step is skipped if a gradient is inf or NaN before *or after* unscaling. (torch looks at the
    scaled value alone, and at a scale below 1 can write inf into the weights.)

    Args:
        device: ``"cuda"`` or ``"cpu"``; default: ``"cuda"`` where there is one, else ``"cpu"``.
        init_scale, growth_factor, backoff_factor, growth_interval, enabled: as in torch.
        min_scale: the scale never falls below; default: the smallest normal fp32 number, so that it
            cannot collapse to 0, which torch's can.
        max_scale: the scale never grows beyond; default: no limit but fp32's.
        hysteresis: back off at the ``hysteresis``-th overflow since the scale last grew, and at
            each one after it (Megatron-LM's rule); default 1, torch's rule.
        process_group: a ``torch.distributed`` group whose members skip a step together, when one of
            them overflows; for models that are sharded otherwise than by ``fully_shard``, whose
            DTensors tell by themselves. DDP needs none: its replicas have equal gradients.
        record_overflow: keep on the device, for :meth:`report_overflow` and
            :class:`mixprec.OverflowLog`, which gradients held inf or NaN. One more launch a step,
            which reads the gradients only where the step is skipped.

    Example::

        scaler = mixprec.GradScaler()
        for x, y in data:
            optimizer.zero_grad()
            with mixprec.autocast():
                loss = F.cross_entropy(model(x), y)
            scaler.scale(loss).backward()
            scaler.clip_grad_norm_(optimizer, 1.0)
            scaler.step(optimizer)
            scaler.update()
    """

    record_overflow = False  # of a scaler pickled before there was the choice

    def __init__(
        self,
        device: str | None = None,
        init_scale: float = 2.0**16,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
        enabled: bool = True,
        *,
        min_scale: float = 2.0**-126,  # the smallest normal fp32 number: 0 would never recover
        max_scale: float = math.inf,
        hysteresis: int = 1,
        process_group: Any = None,
        record_overflow: bool = False,
    ) -> None:
        super().__init__(
            device or default_device_type(),
            init_scale,
            growth_factor,
            backoff_factor,
            growth_interval,
            enabled,
        )
        if self._enabled:
            _check_scale("init_scale", init_scale)
            if not 0 < min_scale <= init_scale <= max_scale:
                raise ValueError(
                    f"0 < min_scale <= init_scale <= max_scale must hold, got {min_scale}, "
                    f"{init_scale}, {max_scale}"
                )
            if hysteresis < 1:
                raise ValueError(f"hysteresis must be at least 1, got {hysteresis}")
        self._min_scale = min_scale
        self._max_scale = max_scale
        self._hysteresis = hysteresis
        self._process_group = process_group
        self.record_overflow = record_overflow
        # steps skipped, last step skipped, hysteresis left: ScaleHistory in csrc/arithmetic.h, on
        # the device from the first scale() on
        self._init_history = [0, 0, hysteresis]
        self._history: Tensor | None = None
        self._init_caches()

    def _init_caches(self) -> None:
        """What an iteration leaves behind for itself; not part of the scaler's state."""
        self._workspaces: dict[torch.device, Tensor] = {}  # of _C.check
        self._clips: dict[int, _Clip] = {}  # by id(optimizer), from clip_grad_norm_ to step
        # Of each optimizer checked, for report_overflow; without tables where not record_overflow.
        self._records: weakref.WeakKeyDictionary[Optimizer, Records] = weakref.WeakKeyDictionary()
        self._optimizer_numbers = itertools.count()

    def _lazy_init_scale_growth_tracker(self, dev: torch.device) -> None:
        try:
            super()._lazy_init_scale_growth_tracker(dev)
            self._history = torch.empty(3, dtype=torch.int32, device=dev)
            self._fill_history()
        except BaseException:  # out of memory, say: all three or none
            self._scale = self._growth_tracker = self._history = None
            raise

    def _fill_history(self) -> None:
        if self._history is not None:
            for i, value in enumerate(self._init_history):
                self._history[i].fill_(value)  # not torch.tensor(): its copy to the GPU syncs

    def _check(
        self, optimizer: Optimizer, *, unscale: bool = False, norm_type: float | None = None
    ) -> tuple[dict[torch.device, Tensor], Tensor | None]:
        """Reads the gradients once: found_inf by device, and their norm if there is a norm_type."""
        is_scaled = self._enabled and self._stage(optimizer) is OptState.READY
        scale = self._scale if is_scaled else None
        if optimizer not in self._records:
            self._records[optimizer] = Records(next(self._optimizer_numbers))
        records = self._records[optimizer].fit(optimizer)
        results = _C.check(
            optimizer.param_groups,
            scale,
            unscale,
            norm_type,
            self._workspaces,
            records if self.record_overflow and not self._was_checked(optimizer) else None,
        )
        if any(dtensor is not None for *_, dtensor in results):
            results = [reduced(results, norm_type)]
        found_infs = {found_inf.device: found_inf for found_inf, *_ in results}
        if self._process_group is not None:
            # Each member takes part once, also one whose parameters have no gradient.
            found_inf = self._combined(found_infs)
            torch.distributed.all_reduce(
                found_inf, torch.distributed.ReduceOp.MAX, group=self._process_group
            )
            found_infs = {found_inf.device: found_inf}
        if self._enabled:
            self._per_optimizer_states[id(optimizer)]["found_inf_per_device"] = found_infs
        if norm_type is None:
            return found_infs, None
        norms = [norm for _, norm, _ in results if norm is not None]
        if len(norms) == 1:
            return found_infs, norms[0]
        device = norms[0].device if norms else torch.device("cpu")
        stacked = [norm.to(device, non_blocking=True) for norm in norms] or [torch.zeros(())]
        return found_infs, torch.linalg.vector_norm(torch.stack(stacked), norm_type)

    def _combined(self, found_infs: dict[torch.device, Tensor]) -> Tensor:
        """One found_inf for all devices, 0 or 1 (torch's fused kernels test for 1)."""
        return _any(list(found_infs.values()) or [torch.zeros((), device=self._device)])

    def _was_checked(self, optimizer: Optimizer) -> bool:
        """Since the last update: a record counts steps, which may check more than once."""
        if not self._enabled:
            return id(optimizer) in self._clips
        return bool(self._per_optimizer_states[id(optimizer)]["found_inf_per_device"])

    def _stage(self, optimizer: Optimizer) -> OptState:
        stage: OptState = self._per_optimizer_states[id(optimizer)]["stage"]
        return stage

    def _check_inf_per_device(self, optimizer: Optimizer) -> dict[str, Any]:
        self._check_scale_growth_tracker("_check_inf_per_device")
        return self._check(optimizer)[0]  # type: ignore[return-value]  # torch's annotation is off

    def unscale_(self, optimizer: Optimizer) -> None:
        """Divides the optimizer's gradients by the scale, in place, as in torch.

        Raises:
            ValueError: a gradient is float16: small values would be lost.
            RuntimeError: called twice since the last ``update``, or after ``step``.
        """
        if not self._enabled:
            return
        self._check_scale_growth_tracker("unscale_")
        if self._stage(optimizer) is OptState.UNSCALED:
            raise RuntimeError(
                "unscale_() has already been called on this optimizer since the last update()."
            )
        if self._stage(optimizer) is OptState.STEPPED:
            raise RuntimeError("unscale_() is being called after step().")
        self._check(optimizer, unscale=True)
        self._per_optimizer_states[id(optimizer)]["stage"] = OptState.UNSCALED

    def clip_grad_norm_(
        self, optimizer: Optimizer, max_norm: float, norm_type: float = 2.0
    ) -> Tensor:
        """Clips the norm of the optimizer's unscaled gradients, as ``clip_grad_norm_`` in torch.

        Replaces ``scaler.unscale_(optimizer)`` and ``torch.nn.utils.clip_grad_norm_(...)``. With
        :class:`mixprec.SGD` the norm comes out of the check for inf and NaN and the coefficient
        goes into the step: no further pass, gradients are not changed, and fp16 ones neither
        overflow nor lose bits. With other optimizers it does what those two calls do. Also works
        when the scaler is disabled.

        Args:
            optimizer: the one that :meth:`step` is called with next.
            max_norm: gradients are multiplied by ``min(1, max_norm / (norm + 1e-6))``.
            norm_type: 2.0 or ``inf``; with other optimizers any.

        Returns:
            The norm before clipping, a () float32 tensor on the gradients' device. If it is not
            finite, the step is skipped (disabled scaler: with :class:`mixprec.SGD`).

        Raises:
            RuntimeError: called after ``step``.
            ValueError: ``max_norm`` is negative or NaN, which would write NaN or turn gradients
                round; another ``norm_type``.
        """
        if not max_norm >= 0:
            raise ValueError(f"max_norm must be at least 0, got {max_norm}")
        if self._enabled:
            self._check_scale_growth_tracker("clip_grad_norm_")
            if self._stage(optimizer) is OptState.STEPPED:
                raise RuntimeError("clip_grad_norm_() is being called after step().")
        if not isinstance(optimizer, SGD):
            if self._enabled and self._stage(optimizer) is OptState.READY:
                self.unscale_(optimizer)
            params = [param for group in optimizer.param_groups for param in group["params"]]
            return torch.nn.utils.clip_grad_norm_(params, max_norm, norm_type)
        found_infs, norm = self._check(optimizer, norm_type=float(norm_type))
        assert norm is not None
        self._clips[id(optimizer)] = _Clip(norm, float(max_norm), self._combined(found_infs))
        return norm

    def step(self, optimizer: Optimizer, *args: Any, **kwargs: Any) -> float | None:
        """Unscales the gradients and steps the optimizer, unless a gradient is inf or NaN.

        With :class:`mixprec.SGD` and torch's fused optimizers the decision is made on the device;
        others are asked for after a sync, as in torch.

        Returns:
            What ``optimizer.step(*args, **kwargs)`` returns.

        Raises:
            RuntimeError: called twice since the last ``update``; a closure was passed.
            AssertionError: no gradients, or no ``scale`` before, as in torch.
        """
        clip = self._clips.get(id(optimizer))
        if not self._enabled:
            if clip is None:
                return super().step(optimizer, *args, **kwargs)
            result = self._step_on_device(optimizer, None, clip.found_inf, clip, args, kwargs)
            self._clips.pop(id(optimizer), None)
            return result
        if not _skips_on_device(optimizer):
            return super().step(optimizer, *args, **kwargs)

        if any(arg is not None for arg in args) or "closure" in kwargs:
            raise RuntimeError("Closure use is not currently supported if GradScaler is enabled.")
        scale, _ = self._check_scale_growth_tracker("step")
        state = self._per_optimizer_states[id(optimizer)]
        if state["stage"] is OptState.STEPPED:
            raise RuntimeError("step() has already been called since the last update().")
        if state["stage"] is OptState.READY and clip is None:
            self._check(optimizer)
        if not state["found_inf_per_device"] and isinstance(optimizer, SGD):
            raise AssertionError("No inf checks were recorded for this optimizer.")

        # A scale that the user put on the optimizer counts too, as in torch.
        grad_scale = getattr(optimizer, "grad_scale", None)
        if state["stage"] is OptState.READY:
            grad_scale = scale if grad_scale is None else scale * grad_scale
        found_inf = self._combined(state["found_inf_per_device"])
        result = self._step_on_device(optimizer, grad_scale, found_inf, clip, args, kwargs)
        self._clips.pop(id(optimizer), None)  # not before: a step that failed may be called again
        state["stage"] = OptState.STEPPED
        return result

    @staticmethod
    def _step_on_device(
        optimizer: Any,
        grad_scale: Tensor | None,
        found_inf: Tensor,
        clip: "_Clip | None",
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> float | None:
        optimizer.grad_scale = grad_scale
        optimizer.found_inf = found_inf
        optimizer.grad_clip = clip
        try:
            result: float | None = optimizer.step(*args, **kwargs)
            return result
        finally:
            del optimizer.grad_scale, optimizer.found_inf, optimizer.grad_clip

    def update(self, new_scale: float | Tensor | None = None) -> None:
        """Updates the scale after the steps of an iteration, on the device.

        Args:
            new_scale: set the scale to this value instead, as in torch.
        """
        self._clips.clear()
        if not self._enabled or new_scale is not None:
            if self._enabled and isinstance(new_scale, float):
                _check_scale("new_scale", new_scale)
            return super().update(new_scale)
        scale, growth_tracker = self._check_scale_growth_tracker("update")
        assert self._history is not None
        found_infs = [
            found_inf
            for state in self._per_optimizer_states.values()
            for found_inf in state["found_inf_per_device"].values()
        ]
        if not found_infs:
            raise AssertionError("No inf checks were recorded prior to update.")
        _C.update_scale(
            scale,
            growth_tracker,
            self._history,
            _any(found_infs),
            self._growth_factor,
            self._backoff_factor,
            self._growth_interval,
            self._min_scale,
            self._max_scale,
            self._hysteresis,
        )
        self._per_optimizer_states.clear()
        return None

    @property
    def steps_skipped(self) -> int:
        """How many calls of ``update`` found inf or NaN. Reading it syncs."""
        return self._read_history()[0]

    @property
    def last_step_skipped(self) -> bool:
        """Whether the last ``update`` found inf or NaN. Reading it syncs."""
        return bool(self._read_history()[1])

    def _read_history(self) -> list[int]:
        return self._init_history if self._history is None else self._history.tolist()

    def report_overflow(self) -> OverflowReport:
        """Names the gradients that held inf or NaN, in a line each (``print`` it). Syncs.

        With ``record_overflow``: in all steps so far, by what was recorded then. Without: those
        that hold inf or NaN now; for the iteration after whose ``update``
        :attr:`last_step_skipped` is true, before ``zero_grad``.

        Covers every optimizer that this scaler has checked. Parameters have names if the optimizer
        was given ``model.named_parameters()``. Backward runs from the last layer to the first, and
        what overflows spreads: of those listed for one step, the last are where it began.
        """
        return overflow_report(self._records, self.record_overflow)

    def state_dict(self) -> dict[str, Any]:
        """torch's five entries, and ours, which torch's scaler ignores. Syncs."""
        if not self._enabled:
            return {}
        return {
            **super().state_dict(),
            "min_scale": self._min_scale,
            "max_scale": self._max_scale,
            "hysteresis": self._hysteresis,
            "_history": list(self._read_history()),
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads the state of this class's or of torch's scaler."""
        super().load_state_dict(state_dict)
        if not self._enabled:
            return
        self._min_scale = state_dict.get("min_scale", self._min_scale)
        self._max_scale = state_dict.get("max_scale", self._max_scale)
        self._hysteresis = state_dict.get("hysteresis", self._hysteresis)
        self._init_history = list(state_dict.get("_history", [0, 0, self._hysteresis]))
        self._fill_history()

    def __getstate__(self) -> dict[str, Any]:
        state = super().__getstate__()
        state["_init_history"] = list(self._read_history())
        for name in ("_history", "_workspaces", "_clips", "_records", "_optimizer_numbers"):
            del state[name]
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._history = None
        self._init_caches()


class _Clip(NamedTuple):
    norm: Tensor  # () float32
    max_norm: float
    found_inf: Tensor  # () float32


def _check_scale(name: str, scale: float) -> None:
    if not 0 < scale < math.inf:
        raise ValueError(f"{name} must be positive and finite, got {scale}")


def _any(found_infs: list[Tensor]) -> Tensor:
    if len(found_infs) == 1:
        return found_infs[0]
    device = found_infs[0].device
    return torch.stack([found_inf.to(device, non_blocking=True) for found_inf in found_infs]).amax()


def _skips_on_device(optimizer: Optimizer) -> bool:
    """Whether step() reads grad_scale and found_inf off the optimizer, as torch's fused ones."""
    if isinstance(optimizer, SGD):
        return True
    return (
        getattr(optimizer, "_step_supports_amp_scaling", False)
        and "grad_scaler" not in inspect.signature(optimizer.step).parameters  # the protocol before
    )
