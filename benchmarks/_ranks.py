"""torchrun's processes; without torchrun there is one, for which all this does nothing."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import distributed as dist
from torch import nn

ASK_EVERY = 16  # steps, whether somebody wants to stop


def start() -> None:
    """One process a GPU, by LOCAL_RANK; messages between the hosts go through gloo."""
    if dist.is_available() and dist.is_torchelastic_launched() and not is_on():
        on_cuda = local_rank() < torch.cuda.device_count()
        if on_cuda:
            torch.cuda.set_device(local_rank())
        dist.init_process_group("cpu:gloo,cuda:nccl" if on_cuda else "gloo")


def leave(code: int) -> None:
    """After a failure without a word to the others, which torchrun ends."""
    if is_on():
        if code in (0, 130):
            dist.destroy_process_group()
        sys.stdout.flush()
        os._exit(code)  # a thread of gloo may abort at the interpreter's end
    sys.exit(code)


def is_on() -> bool:
    return dist.is_available() and dist.is_initialized()


def rank() -> int:
    return dist.get_rank() if is_on() else 0


def local_rank() -> int:
    by_torchrun = dist.is_available() and dist.is_torchelastic_launched()
    return int(os.environ["LOCAL_RANK"]) if by_torchrun else 0


def world_size() -> int:
    return dist.get_world_size() if is_on() else 1


def from_rank_0(value: Any) -> Any:
    if not is_on():
        return value
    values = [value]
    dist.broadcast_object_list(values, 0)
    return values[0]


def one_after_the_first(function: Callable[[], Any]) -> Any:
    """On each machine one process goes first: it may download what the others find."""
    if is_on() and local_rank() > 0:
        dist.barrier()
    result = function()
    if is_on() and local_rank() == 0:
        dist.barrier()
    return result


def replicated(model: Any) -> Any:
    """On a side stream, for a CUDA graph of the step."""
    if not is_on():
        return model
    on_cuda = next(model.parameters()).is_cuda
    side = torch.cuda.stream(torch.cuda.Stream()) if on_cuda else contextlib.nullcontext()
    if on_cuda:
        torch.cuda.synchronize()
    with side:
        model = nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)
    if on_cuda:
        torch.cuda.synchronize()
    return model


def share(items: torch.Tensor, batch_size: int) -> torch.Tensor:
    """This rank's part of each batch, of items that are whole batches of all ranks."""
    if not is_on():
        return items
    return items.unflatten(-1, (-1, world_size(), batch_size))[..., rank(), :].flatten(-2)


def equal_buffers(model: nn.Module) -> None:
    """BatchNorm's statistics, which differ between ranks after a step: the first one's count."""
    if is_on():
        for buffer in model.buffers():
            dist.broadcast(buffer, 0)


def summed(tensor: torch.Tensor) -> torch.Tensor:
    """In place."""
    if is_on():
        dist.all_reduce(tensor)
    return tensor


def any_stops(requested: bool, step: int = 0) -> bool:
    """All ranks stop after one step; asking waits for the others, so not at every step."""
    if not is_on():
        return requested
    if step % ASK_EVERY:
        return False
    flag = torch.tensor(requested, dtype=torch.int32)
    dist.all_reduce(flag, dist.ReduceOp.MAX)
    return bool(flag)
