"""Batches copied to the GPU while the one before is in use."""

import functools
from collections.abc import Iterable, Iterator
from typing import Generic, TypeVar

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

from .autocast import default_device_type

Batch = TypeVar("Batch")


class prefetch(Generic[Batch]):
    """Iterates over ``loader`` with every batch on ``device``, one batch ahead on CUDA.

    A copy that the training loop starts (``x.to("cuda")``) waits in the loop's stream behind all
    the work queued before it, and out of pageable memory it blocks the host too. Here the next
    batch is copied from pinned memory on a stream of its own, while the GPU computes with the
    current one, and nothing waits on the host. Memory for one more batch is the price.

    A batch is a tensor, or any nesting of tuples, lists, dicts and namedtuples; what is not a
    tensor passes through. Batches come in the loader's order; an error in the loader is raised
    where its batch would have come. ``len()`` is the loader's.

    Args:
        loader: any iterable of batches, such as a ``DataLoader``. With ``pin_memory=True`` its
            batches are copied as they are; others are first pinned here, which costs a host copy.
            It must not write to a batch that it has given out: the copy may still be reading it.
        device: default: ``"cuda"`` where there is one, else ``"cpu"``. On any device other than
            CUDA the batches are moved by ``.to(device)``, none ahead.

    Each batch is ready on the stream that is current where the loop asks for it. As with any
    tensor, a further stream has to wait for that one first.

    Example::

        loader = DataLoader(data, batch_size=256, num_workers=8, pin_memory=True)
        for x, y in mixprec.prefetch(loader):
            train_step(x, y)
    """

    def __init__(
        self, loader: Iterable[Batch], device: torch.device | str | int | None = None
    ) -> None:
        self.loader = loader
        self.device = torch.device(default_device_type() if device is None else device)

    def __len__(self) -> int:
        return len(self.loader)  # type: ignore[arg-type]  # Python's error is the right one

    def __iter__(self) -> Iterator[Batch]:
        if self.device.type != "cuda":
            return (_moved(batch, self.device) for batch in self.loader)
        index = self.device.index
        return self._one_ahead(torch.cuda.current_device() if index is None else index)

    def _one_ahead(self, device: int) -> Iterator[Batch]:
        copies = self._copies(_copy_stream(device))
        ahead = next(copies, None)
        failure: Exception | None = None
        while ahead is not None:
            batch, copied = ahead
            try:
                ahead = next(copies, None)
            except Exception as error:  # belongs to the next batch: the loop gets this one first
                ahead, failure = None, error
            current = torch.cuda.current_stream(device)
            current.wait_event(copied)
            # The memory is the copy stream's. Without this, what the loop drops could be
            # overwritten by the next copy while its kernels still read it.
            for leaf in tree_leaves(batch):
                if isinstance(leaf, Tensor):
                    leaf.record_stream(current)
            yield batch
        if failure is not None:
            try:
                raise failure
            finally:
                del failure  # its traceback holds this frame, and with it the loader's workers

    def _copies(self, stream: torch.cuda.Stream) -> Iterator[tuple[Batch, torch.cuda.Event]]:
        """Batches whose copies have been started, each with the event after its last one."""
        for batch in self.loader:
            with torch.cuda.stream(stream):
                copy = _moved(batch, stream.device)
            yield copy, stream.record_event()


def _moved(batch: Batch, device: torch.device) -> Batch:
    def move(tensor: Tensor) -> Tensor:
        if device.type == "cuda" and tensor.device.type == "cpu":
            tensor = tensor.pin_memory()  # itself, if it is pinned
        return tensor.to(device, non_blocking=device.type == "cuda")

    moved: Batch = tree_map_only(Tensor, move, batch)
    return moved


@functools.cache
def _copy_stream(device: int) -> torch.cuda.Stream:
    """One a device: the allocator keeps memory by stream, and a new one would start with none."""
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
