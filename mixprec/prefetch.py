"""Batches on the GPU before they are asked for."""

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

from .autocast import default_device_type

__all__ = ["prefetch"]


class prefetch:
    """Iterates over a loader's batches, the next one being copied while one is in use.

    The copy runs on a stream of its own, from pinned memory, beside the work on the batch before;
    the stream that is current when a batch is taken waits for its copy, the host does not.

    Args:
        loader: a ``DataLoader`` or any iterable of batches: tensors in nested tuples, lists, dicts
            and named tuples; what is not a tensor is passed through. Pin there
            (``pin_memory=True``), in its own thread; other tensors are pinned here.
        device: where to; default: the current CUDA device, or ``"cpu"`` where there is none.

    Returns:
        An iterable of the batches, with the loader's length. An error of the loader is raised in
        the place of its batch.

    Example::

        for x, y in mixprec.prefetch(loader):
            loss = train_step(x, y)
    """

    def __init__(self, loader: Iterable[Any], device: torch.device | str | None = None) -> None:
        self.loader = loader
        self.device = torch.device(device or default_device_type())

    def __len__(self) -> int:
        return len(self.loader)  # type: ignore[arg-type]

    def __iter__(self) -> Iterator[Any]:
        if self.device.type != "cuda":
            for batch in self.loader:
                yield tree_map_only(Tensor, lambda t: t.to(self.device), batch)
            return
        stream = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]

        def copied(tensor: Tensor) -> Tensor:
            if tensor.device.type == "cpu" and not tensor.is_pinned():
                tensor = tensor.pin_memory()
            return tensor.to(self.device, non_blocking=True)

        batches, error = iter(self.loader), None
        waiting: list[tuple[Any, torch.cuda.Event]] = []
        while True:
            try:
                batch = next(batches)
                with torch.cuda.stream(stream):
                    waiting.append((tree_map_only(Tensor, copied, batch), stream.record_event()))
            except StopIteration:
                break
            except Exception as raised:  # the batch before comes first
                error = raised
                break
            if len(waiting) > 1:
                yield self.taken(*waiting.pop(0))
        for batch, event in waiting:
            yield self.taken(batch, event)
        if error is not None:
            raise error

    def taken(self, batch: Any, event: torch.cuda.Event) -> Any:
        current = torch.cuda.current_stream(self.device)
        current.wait_event(event)
        for leaf in tree_leaves(batch):
            if isinstance(leaf, Tensor):
                leaf.record_stream(current)  # else freed memory is copied into while still in use
        return batch
