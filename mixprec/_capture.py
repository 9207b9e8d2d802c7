"""One CUDA graph capture, and torch's state after one that fails."""

import contextlib
import linecache
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from . import _C
from ._found import is_fused
from .sgd import SGD


class SGDStore:
    """Brings hyperparameters, which change on the host, to where a replay's step reads them."""

    def __init__(self, optimizer: SGD) -> None:
        self.optimizer = optimizer
        self.on_device = _C.DeviceHyperparameters(optimizer.param_groups)
        optimizer.device_hyperparameters = self.on_device  # for the capture's step

    def store(self) -> None:
        self.on_device.store(self.optimizer.param_groups)

    def end_capture(self) -> None:
        self.optimizer.device_hyperparameters = None


class FusedStore:
    """The same for torch's fused optimizers, which read a learning rate that is a GPU tensor."""

    def __init__(self, optimizer: Optimizer, device: torch.device) -> None:
        self.optimizer = optimizer
        self.values = [group["lr"] for group in optimizer.param_groups]
        self.tensors = [torch.full((), float(lr), device=device) for lr in self.values]
        for group, tensor in zip(optimizer.param_groups, self.tensors, strict=True):
            group["lr"] = tensor

    def store(self) -> None:
        for i, group in enumerate(self.optimizer.param_groups):
            if group["lr"] is not self.values[i] or isinstance(group["lr"], Tensor):
                self.values[i] = group["lr"]
                self.tensors[i].fill_(group["lr"])

    def end_capture(self) -> None:
        for group, value in zip(self.optimizer.param_groups, self.values, strict=True):
            group["lr"] = value


Store = SGDStore | FusedStore


def store_of(optimizer: Optimizer, device: torch.device) -> Store | None:
    """Other optimizers keep the values of the capture: those are part of a call's signature."""
    if isinstance(optimizer, SGD):
        return SGDStore(optimizer)
    return FusedStore(optimizer, device) if is_fused(optimizer) else None


_CAN_EDIT = hasattr(torch.cuda.CUDAGraph, "instantiate")  # torch 2.8 and later


def new_graph() -> torch.cuda.CUDAGraph:
    return torch.cuda.CUDAGraph(keep_graph=True) if _CAN_EDIT else torch.cuda.CUDAGraph()


@contextlib.contextmanager
def capturing(graph: torch.cuda.CUDAGraph, pool: Any, device: torch.device) -> Iterator[None]:
    # With autocast around the call, casts of weights live on: one made before must not be in the
    # graph, nor one of the graph's be used outside.
    torch.clear_autocast_cache()
    # thread_local: other threads (a DataLoader's pinning) may call what a capture may not.
    graph.capture_begin(pool=pool, capture_error_mode="thread_local")
    try:
        yield
    except BaseException:
        _abandon(graph, pool, device)
        raise
    else:
        try:
            graph.capture_end()
        except BaseException:
            _repair(pool, device)
            raise
        if _CAN_EDIT:
            _C.replace_memsets(graph.raw_cuda_graph())
            graph.instantiate()
    finally:
        torch.clear_autocast_cache()


def _abandon(graph: torch.cuda.CUDAGraph, pool: Any, device: torch.device) -> None:
    try:
        graph.capture_end()
    except RuntimeError:
        _repair(pool, device)
    else:
        graph.reset()


def _repair(pool: Any, device: torch.device) -> None:
    """After a capture that CUDA gave up, torch still has allocator and generator in it."""
    old_name = "_cuda_endAllocateCurrentStreamToPool"  # torch 2.6's
    end = getattr(torch._C, old_name, None) or torch._C._cuda_endAllocateToPool
    with contextlib.suppress(RuntimeError):  # some versions of torch have ended it
        end(device.index, pool)
    torch._C._cuda_releasePool(device.index, pool)
    graph = torch.cuda.CUDAGraph()  # one that succeeds sets the generator right
    graph.capture_begin(capture_error_mode="thread_local")
    with contextlib.suppress(torch.OutOfMemoryError):
        torch.zeros((1,), device=device)
    graph.capture_end()


def scaler_state(scaler: torch.amp.GradScaler) -> dict[str, Any]:
    """What one iteration leaves in a scaler on the host."""
    states = scaler._per_optimizer_states.copy()
    for key, value in states.items():
        states[key] = dict(value)
    state = {"_per_optimizer_states": states}
    if "_clips" in vars(scaler):
        state["_clips"] = dict(vars(scaler)["_clips"])
    return state


class OptimizerState:
    """Which tensors an optimizer's state holds: a capture must not leave others in it."""

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer = optimizer
        self.before = {param: dict(values) for param, values in optimizer.state.items()}

    def is_kept(self) -> bool:
        now = self.optimizer.state
        return now.keys() == self.before.keys() and all(
            len(values) == len(now[param])
            and all(now[param].get(name) is value for name, value in values.items())
            for param, values in self.before.items()
        )

    def restore(self) -> None:
        state = self.optimizer.state
        for param in list(state):
            if param not in self.before:
                del state[param]
            else:
                state[param].clear()
                state[param].update(self.before[param])


def explained(error: Exception, function: Callable[..., Any]) -> Exception:
    """The error of a capture with the user's line and the remedy; others as they are."""
    text = str(error)
    if not isinstance(error, RuntimeError) or "captur" not in text.lower():
        return error
    code = getattr(getattr(function, "__func__", function), "__code__", None)
    line, in_scaler, trace = None, False, error.__traceback__
    while trace is not None:
        if trace.tb_frame.f_code is code:
            line = trace.tb_lineno
        in_scaler |= trace.tb_frame.f_code.co_name == "_maybe_opt_step"  # of torch's GradScaler
        trace = trace.tb_next
    where, source = repr(function), "the function"
    if code is not None:
        where = f"{code.co_filename}, line {line or code.co_firstlineno}"
        source = linecache.getline(code.co_filename, line or code.co_firstlineno).strip()
    remedy = (
        "give the optimizer fused=True, or use mixprec.SGD: others ask the host whether to step"
        if in_scaler
        else "leave out what brings values to the host (.item(), .cpu(), bool(tensor), print) or "
        "copies unpinned memory; return the tensor, and read it outside"
    )
    return RuntimeError(
        f"{where}: a CUDA graph cannot hold `{source}`: {remedy}. Or switch the graph off: "
        "mixprec.graphed(enabled=False). Weights and states are as before. "
        f"({text.splitlines()[0]})"
    )
