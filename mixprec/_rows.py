"""What reports about an optimizer's parameters share: names, and rows as a table."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from ._mesh import local

if TYPE_CHECKING:
    from rich.table import Table


def named_params(optimizer: Optimizer) -> Iterator[tuple[str, Tensor]]:
    for g, group in enumerate(optimizer.param_groups):
        names = group.get("param_names")
        for i, param in enumerate(group["params"]):
            yield names[i] if names else f"parameter {i} of group {g}", param


def elements(grad: Tensor) -> Tensor:
    grad = local(grad)
    return grad.coalesce().values() if grad.is_sparse else grad


def rich_table(title: str, fields: Sequence[str], rows: Iterable[Sequence[Any]]) -> Table:
    from rich.table import Table

    table = Table(title=title)
    for i, field in enumerate(fields):
        table.add_column(field.replace("_", " "), justify="right" if i else "left")
    for row in rows:
        table.add_row(*map(_text, row))
    return table


def _text(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.3g}"
    if value is None:
        return ""
    return str(list(value)) if isinstance(value, torch.Size) else str(value)
