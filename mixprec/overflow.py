"""Which parameters' gradients overflowed: a report, a log and a picture."""

from __future__ import annotations

import logging
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from os import PathLike
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

from ._mesh import local
from ._rows import elements, named_params, rich_table

if TYPE_CHECKING:
    from rich.table import Table

    from .grad_scaler import GradScaler

__all__ = ["OverflowLog", "OverflowReport", "OverflowRow"]


@dataclass
class Records:
    """What a scaler keeps of an optimizer.

    Attributes:
        number: of the optimizer, in the order of their first checks.
        tables: of each device: a header, then a row for each parameter, OverflowRecord in
            csrc/arithmetic.h. Groups that are added bring more rows.
    """

    number: int
    tables: dict[torch.device, Tensor] = field(default_factory=dict)
    _group_sizes: list[int] = field(default_factory=list)

    def fit(self, optimizer: Optimizer) -> dict[torch.device, Tensor]:
        """The tables; new ones if a group has changed, for rows go by a parameter's place."""
        sizes = [len(group["params"]) for group in optimizer.param_groups]
        if sizes[: len(self._group_sizes)] != self._group_sizes:
            self.tables.clear()
        self._group_sizes = sizes
        return self.tables


class OverflowRow(NamedTuple):
    """A parameter whose gradient held inf or NaN.

    Attributes:
        name: as given to the optimizer by ``model.named_parameters()``, else its place.
        shape: its shape; of a DTensor, of what this process has, and so are the counts.
        dtype: its gradient's; the parameter's own where the gradient is gone.
        inf: how many elements were inf or -inf.
        nan: how many were NaN.
        largest: the largest magnitude among the others.
        steps: in how many steps so far it held inf or NaN; None where these are not recorded.
        last_step: the number of the last of them, to which ``inf``, ``nan`` and ``largest`` belong;
            the optimizer's first step under the scaler is 1.
    """

    name: str
    shape: torch.Size
    dtype: torch.dtype
    inf: int
    nan: int
    largest: float
    steps: int | None = None
    last_step: int | None = None

    def __str__(self) -> str:
        text = (
            f"{self.name} ({list(self.shape)}, {self.dtype}): {self.inf} inf, {self.nan} NaN "
            f"of {self.shape.numel()}, largest finite {self.largest:.3g}"
        )
        if self.steps is None:
            return text
        return f"{text}, in step {self.last_step}; so far in {self.steps} steps"


@dataclass(frozen=True)
class OverflowReport:
    """What :meth:`mixprec.GradScaler.report_overflow` returns; ``str()`` has a line a row."""

    rows: list[OverflowRow]

    def __str__(self) -> str:
        return "\n".join(map(str, self.rows)) or "no gradient holds inf or NaN"

    def table(self) -> Table:
        """The rows as a ``rich.table.Table``."""
        return rich_table("Gradients that held inf or NaN", OverflowRow._fields, self.rows)


def overflow_report(records: Mapping[Optimizer, Records], is_recorded: bool) -> OverflowReport:
    """Of the records, or of the gradients that there are now."""
    rows = []
    for optimizer, kept in list(records.items()):
        tables = {device: table.tolist() for device, table in kept.tables.items()}
        for row, (name, param) in enumerate(_names(optimizer, kept), start=1):
            if is_recorded:
                counts = _recorded(tables.get(param.device, []), row)
            else:
                counts = _counted(param.grad)
            if counts:
                dtype = (param if param.grad is None else param.grad).dtype
                rows.append(OverflowRow(name, local(param).shape, dtype, *counts))
    return OverflowReport(rows)


def _names(optimizer: Optimizer, records: Records) -> Iterator[tuple[str, Tensor]]:
    suffix = f" of optimizer {records.number}" if records.number else ""
    for name, param in named_params(optimizer):
        yield name + suffix, param


def _recorded(table: list[list[int]], row: int) -> tuple[Any, ...] | None:
    if row >= len(table) or table[row][0] == 0:
        return None
    steps, last_step, inf, nan, largest_bits = table[row][:5]
    (largest,) = struct.unpack("d", struct.pack("q", largest_bits))
    return inf, nan, largest, steps, last_step


def _counted(grad: Tensor | None) -> tuple[Any, ...] | None:
    if grad is None:
        return None
    values = elements(grad.detach())
    finite = values.isfinite()
    if bool(finite.all()):
        return None
    largest = torch.where(finite, values, 0).abs().amax()
    return int(values.isinf().sum()), int(values.isnan().sum()), float(largest)


class OverflowLog:
    """Logs which gradients overflowed, every ``every`` steps; no sync in the steps between.

    Args:
        scaler: a :class:`mixprec.GradScaler` with ``record_overflow=True``.
        every: look at the scaler's records, which syncs, each time after so many steps.
        logger: of the standard library; default: ``logging.getLogger("mixprec")``.

    Attributes:
        looks: of each look the number of steps so far, and for each parameter that overflowed
            since the look before: in how many steps.

    Example::

        scaler = mixprec.GradScaler(record_overflow=True)
        log = mixprec.OverflowLog(scaler)
        for x, y in data:
            train_step(x, y)  # scaler.step and scaler.update; may be graphed
            log.step()
        log.plot("overflow.png")
    """

    def __init__(
        self, scaler: GradScaler, every: int = 100, logger: logging.Logger | None = None
    ) -> None:
        _check_records(scaler)
        if every < 1:
            raise ValueError(f"every must be at least 1, got {every}")
        self.scaler, self.every = scaler, every
        self.logger = logger or logging.getLogger("mixprec")
        self.looks: list[tuple[int, dict[str, int]]] = []
        self._steps = 0
        self._seen: dict[str, int] = {}

    def step(self) -> None:
        """To be called after each ``scaler.update``; warns, at a look, of each that overflowed."""
        self._steps += 1
        if self._steps % self.every:
            return
        _check_records(self.scaler)
        counts = {}
        for row in self.scaler.report_overflow().rows:
            assert row.steps is not None
            seen = self._seen.get(row.name, 0)
            if new := row.steps - (seen if seen <= row.steps else 0):  # fewer: a new table
                counts[row.name], self._seen[row.name] = new, row.steps
                self.logger.warning("%s (%d since the last look)", row, new)
        self.looks.append((self._steps, counts))

    def plot(self, path: str | PathLike[str]) -> None:
        """Draws parameters by steps: in how many steps between two looks each overflowed."""
        from matplotlib.figure import Figure

        records = list(self.scaler._records.items())
        names = [name for optimizer, kept in records for name, _ in _names(optimizer, kept)]
        names = [name for name in names if name in self._seen]
        figure = Figure(figsize=(9, 1.5 + 0.2 * len(names)), layout="constrained")
        axes = figure.subplots()
        axes.set(xlabel="step", title=f"steps with inf or NaN, of {self.every}")
        if names:
            counts = [[look.get(name, 0) for _, look in self.looks] for name in names]
            edges = [0, *(step for step, _ in self.looks)]
            mesh = axes.pcolormesh(edges, range(len(names) + 1), counts, cmap="Reds", vmin=0)
            axes.set_yticks([i + 0.5 for i in range(len(names))], names, fontsize=7)
            axes.invert_yaxis()
            figure.colorbar(mesh)
        figure.savefig(path, dpi=150)


def _check_records(scaler: GradScaler) -> None:
    if not scaler.record_overflow:
        raise ValueError(
            "OverflowLog needs a scaler that keeps records: GradScaler(record_overflow=True)"
        )
