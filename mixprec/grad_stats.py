"""How a loss scale fits: how much of each gradient fp16 loses, and how far it is from overflow."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from os import PathLike
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor, nn
from torch.amp.grad_scaler import OptState
from torch.optim import Optimizer

from ._mesh import local
from ._rows import elements, named_params, rich_table

if TYPE_CHECKING:
    from rich.table import Table

__all__ = ["GradStats", "GradStatsRow", "grad_stats"]

_LARGEST = 65504.0  # of fp16
_SMALLEST_NORMAL = 2.0**-14
_FLUSHED = 2.0**-25  # half of fp16's smallest number: to nearest even, 0


class GradStatsRow(NamedTuple):
    """One parameter's scaled gradient g. Shares are of its elements, from 0 to 1.

    Attributes:
        name: as in ``named_parameters()``, else the parameter's place in the optimizer.
        shape: its shape; of a DTensor, of what this process has, and so are the shares.
        dtype: its dtype.
        zero: share with g = 0.
        subnormal: share with 0 < abs(g) < 2^-14: fp16 has fewer bits, or none, for these.
        flushed: the part of ``subnormal`` with abs(g) <= 2^-25, which fp16 rounds to 0.
        largest: the largest magnitude; inf or NaN where there is one.
        headroom: how many doublings of the scale it is below 65504: log2(65504 / largest).
    """

    name: str
    shape: torch.Size
    dtype: torch.dtype
    zero: float
    subnormal: float
    flushed: float
    largest: float
    headroom: float


@dataclass(frozen=True)
class GradStats:
    """What :func:`mixprec.grad_stats` returns: a row for each gradient, and the loss scale."""

    rows: list[GradStatsRow]
    scale: float

    def table(self) -> Table:
        """The rows as a ``rich.table.Table``."""
        title = f"Gradients at loss scale {self.scale:g}"
        return rich_table(title, GradStatsRow._fields, self.rows)

    def plot(self, path: str | PathLike[str]) -> None:
        """Draws the shares, and the largest magnitudes beside fp16's limits."""
        from matplotlib.figure import Figure

        names = [row.name for row in self.rows]
        figure = Figure(figsize=(11, 1.5 + 0.2 * len(names)), layout="constrained")
        shares, largest = figure.subplots(1, 2, sharey=True)
        for field, color in (("subnormal", "C1"), ("flushed", "C3")):  # flushed in front
            values = [getattr(row, field) for row in self.rows]
            shares.barh(range(len(names)), values, color=color, label=field)
        zeros = [row.zero for row in self.rows]
        subnormal = [row.subnormal for row in self.rows]
        shares.barh(range(len(names)), zeros, left=subnormal, color="0.8", label="zero")
        shares.set(xlim=(0, 1), xlabel="share of the elements")
        shares.set_yticks(range(len(names)), names, fontsize=7)
        shares.invert_yaxis()
        shares.legend(fontsize=7)
        shares.margins(y=0)
        largest.margins(y=0)
        shown = [row.largest if 0 < row.largest < math.inf else math.nan for row in self.rows]
        largest.plot(shown, range(len(names)), "o")
        for limit in (_FLUSHED, _SMALLEST_NORMAL, _LARGEST):
            largest.axvline(limit, color="black", linewidth=0.8)
        largest.set_xscale("log", base=2)
        largest.set(xlabel="largest magnitude, scaled (lines: 2^-25, 2^-14, 65504)")
        figure.suptitle(f"gradients at loss scale {self.scale:g}")
        figure.savefig(path, dpi=150)


def grad_stats(source: Optimizer | nn.Module, scaler: torch.amp.GradScaler) -> GradStats:
    """Measures the scaled gradients against fp16's range. Syncs once.

    To be called between ``backward`` and ``unscale_`` or ``step``, while gradients are scaled.

    Args:
        source: an optimizer or a model. Parameters without a gradient, or without elements, have
            no row.
        scaler: the one that scaled the loss, torch's or mixprec's.

    Raises:
        RuntimeError: ``unscale_`` or ``step`` has been called since the last ``update``, with this
            optimizer; given a model, with any.

    Example::

        scaler.scale(loss).backward()
        rich.print(mixprec.grad_stats(model, scaler).table())
    """
    states = getattr(scaler, "_per_optimizer_states", {})  # a disabled scaler has none
    named: Iterable[tuple[str, Tensor]]
    if isinstance(source, Optimizer):
        named, seen = named_params(source), {id(source)} & set(states)
    else:
        named, seen = source.named_parameters(), set(states)
    if any(states[key]["stage"] is not OptState.READY for key in seen):
        raise RuntimeError(
            "grad_stats() looks at scaled gradients: call it between backward() and unscale_() or "
            "step()"
        )
    grads = [
        (name, local(param).shape, elements(param.grad.detach()))
        for name, param in named
        if param.grad is not None
    ]
    grads = [entry for entry in grads if entry[2].numel() > 0]
    if not grads:
        return GradStats([], scaler.get_scale())
    device = grads[0][2].device
    measured = torch.stack([_measured(grad).to(device, non_blocking=True) for _, _, grad in grads])
    rows = []
    for (name, shape, grad), values in zip(grads, measured.tolist(), strict=True):
        zero, subnormal, flushed, largest = values
        headroom = math.log2(_LARGEST) - math.log2(largest) if largest != 0 else math.inf
        n = grad.numel()
        shares = zero / n, (subnormal - zero) / n, (flushed - zero) / n
        rows.append(GradStatsRow(name, shape, grad.dtype, *shares, largest, headroom))
    return GradStats(rows, scaler.get_scale())


def _measured(grad: Tensor) -> Tensor:
    """(4,) float64: elements that are 0, below 2^-14, up to 2^-25; and the largest magnitude."""
    magnitude = grad.abs()
    limits = magnitude == 0, magnitude < _SMALLEST_NORMAL, magnitude <= _FLUSHED
    counts = [limit.sum().double() for limit in limits]
    return torch.stack([*counts, magnitude.amax().double()])
