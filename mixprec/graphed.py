"""The whole training step as one CUDA graph replay, in place of hundreds of launches."""

import functools
import gc
import threading
import types
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar, overload

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from . import _C
from ._capture import (
    OptimizerState,
    Store,
    capturing,
    explained,
    new_graph,
    scaler_state,
    store_of,
)
from ._found import Found, is_interesting

__all__ = ["graphed"]

Function = TypeVar("Function", bound=Callable[..., Any])

_WARM_UP = 3  # calls: state is made, cuDNN has chosen its algorithms, torch.compile has compiled
_WARM_UP_DDP = 11  # DistributedDataParallel times its first ten, and waits for the device to do so
_MAX_PASSED = 16  # models and the like that are passed as arguments, watched at once
_MAX_KEYS = 64  # signatures whose calls are counted
_UNSTABLE = 10  # calls in a row, each of which changed what a graph would have to hold


@overload
def graphed(function: Function, *, enabled: bool = ..., max_graphs: int = ...) -> Function: ...


@overload
def graphed(
    function: None = None, *, enabled: bool = ..., max_graphs: int = ...
) -> Callable[[Function], Function]: ...


def graphed(function: Any = None, *, enabled: bool = True, max_graphs: int = 8) -> Any:
    """Runs a training step as the replay of a CUDA graph. A decorator for a function or a method.

    The first three calls with inputs of one kind run as usual. The next captures what the function
    does on the GPU, and from then on a call copies the inputs and replays the graph. Every call is
    one real step, the capturing one too, and the results are those of the plain function, bit for
    bit; loss scale, skipped steps, learning rate and the other hyperparameters of
    :class:`mixprec.SGD`, BatchNorm statistics and random numbers go on as without it.

    A graph is kept for each combination of shapes, dtypes and layouts of the tensors passed, of
    other arguments' values, of ``train()``/``eval()``, ``requires_grad`` and of Python numbers that
    the function refers to. Past ``max_graphs`` of them, calls with further ones run as usual.
    Models, optimizers, scalers and tensors that the function reaches by its arguments, its owner
    (``self``), its closure and its globals are watched: where one was replaced, moved or loaded
    into other memory, the next call runs as usual and the one after it captures anew.

    What to know:

    - Python inside runs only in calls that are not replays: counters, prints, schedulers and
      optimizer hooks belong outside. A host sync (``loss.item()``) or an op that a graph cannot
      hold raises an error that names its line; nothing has been changed then, except that gradients
      which the function threw away are gone.
    - Tensors returned are detached copies. Tensors on the CPU are passed to the function on its
      model's GPU (:func:`mixprec.prefetch` copies them earlier); pinned ones without a sync, so
      leave them as they are until the step is done.
    - ``scaler.step`` needs an optimizer that skips on the device: :class:`mixprec.SGD`, or torch's
      with ``fused=True`` (whose learning rate may be scheduled; other hyperparameters, where they
      change, cost a graph each).
    - ``DistributedDataParallel`` needs NCCL, eleven calls before the capture, and to be made on a
      side stream: ``with torch.cuda.stream(torch.cuda.Stream()): model = DDP(model)``. With
      ``fully_shard`` the calls run as usual.
    - On a CPU, and inside another capture, it is the plain call.

    Args:
        function: the step; arguments and results may be nested tuples, lists and dicts.
        enabled: ``False`` returns the function as it is.
        max_graphs: at most this many graphs; they share one memory pool.

    Raises:
        RuntimeError: the function cannot be captured.
        TypeError: an argument that is neither a tensor nor hashable.

    Example::

        @mixprec.graphed
        def train_step(x, y):
            optimizer.zero_grad()
            with mixprec.autocast():
                loss = F.cross_entropy(model(x), y)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            return loss
    """
    if function is None:
        return functools.partial(graphed, enabled=enabled, max_graphs=max_graphs)
    if not enabled:
        return function
    return functools.update_wrapper(_Graphed(function, max_graphs), function)


class _Graphed:
    """What the decorator puts in place of a function, or of a method in its class."""

    def __init__(self, function: Callable[..., Any], max_graphs: int) -> None:
        self._function, self._max_graphs = function, max_graphs
        self._runner = _Runner(function, max_graphs)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._runner(*args, **kwargs)

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        if instance is None:
            return self
        # Kept by the instance, so that the graphs go with it.
        key = f"_graphed_{self._function.__name__}"
        runner = vars(instance).get(key)
        if runner is None:
            runner = _Runner(types.MethodType(self._function, instance), self._max_graphs)
            vars(instance)[key] = runner
        return runner


class _Runner:
    """The graphs of one function, or of one instance's method."""

    def __init__(self, function: Callable[..., Any], max_graphs: int) -> None:
        self.function, self.max_graphs = function, max_graphs
        self.found: Found | None = None
        self.addresses = 0  # of what was found, after the call before
        self.optimizers: dict[Optimizer, None] = {}  # seen stepping: the search may miss some
        self.passed: dict[int, Any] = {}  # as arguments: models and the like, by id
        self.calls: dict[Any, int] = {}
        self.graphs: dict[Any, list[_Graph]] = {}
        self.unstable = 0
        self.refusal: str | None = None  # why all calls run as usual
        self.pool: Any = None

    def __reduce__(self) -> Any:  # copies and pickles of a method's owner begin without graphs
        return type(None), ()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        on_cuda: bool = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
        if not on_cuda or torch.cuda.is_current_stream_capturing():
            return self.function(*args, **kwargs)
        leaves: list[Any]
        spec: TreeSpec | None = None
        if kwargs or {*map(type, args)} != {Tensor}:
            leaves, spec = tree_flatten((args, kwargs))
        else:
            leaves = list(args)
        if spec is not None:
            self.remember(leaves)
        found = self.found or self.search()
        device = found.device or next(
            (leaf.device for leaf in leaves if isinstance(leaf, Tensor) and leaf.is_cuda), None
        )
        if device is None:
            return self.function(*args, **kwargs)
        addresses, modes = _C.fingerprint(found.watched)
        key = (spec, modes, device, *map(_signature, leaves))
        is_stable = addresses == self.addresses
        if not is_stable:
            self.graphs.clear()
        for graph in self.graphs.get(key, ()):
            if graph.gradients.match():
                return graph.replay(leaves)
        calls = self.calls.get(key, 0)
        with torch.cuda.device(device):
            warm_up = _WARM_UP_DDP if found.ddps else _WARM_UP
            if is_stable and calls >= warm_up and self.may_capture(leaves, device):
                captured = self.capture(leaves, spec, device)
                if captured is not None:
                    self.graphs.setdefault(key, []).append(captured)
                    return captured.replay(leaves)
            if len(self.calls) > _MAX_KEYS:  # they hold the objects passed
                self.calls.clear()
            result, modes = self.call(leaves, spec, device, is_stable)
            self.calls[(spec, modes, *key[2:])] = calls + 1
            return result

    def remember(self, leaves: list[Any]) -> None:
        new = [x for x in leaves if not isinstance(x, Tensor) and is_interesting(x)]
        if any(id(x) not in self.passed for x in new):
            self.passed.update((id(x), x) for x in new)
            # Objects made anew for each call would be held for ever.
            for key in list(self.passed)[:-_MAX_PASSED]:
                del self.passed[key]
            self.found = None

    def search(self) -> Found:
        self.found = Found([self.function, *self.passed.values(), *self.optimizers])
        return self.found

    def may_capture(self, leaves: list[Any], device: torch.device) -> bool:
        assert self.found is not None
        if not self.refusal and (reason := self.found.refusal()):
            self.refuse(reason)
        if self.refusal or not all(_can_be_static(leaf, device) for leaf in leaves):
            return False
        if sum(map(len, self.graphs.values())) >= self.max_graphs:
            self.refuse(
                f"more than max_graphs={self.max_graphs} kinds of inputs, modes or gradients came; "
                "further ones",
                for_all=False,
            )
            return False
        return True

    def refuse(self, reason: str, for_all: bool = True) -> None:
        if for_all:
            self.refusal = reason
        name = getattr(self.function, "__qualname__", repr(self.function))
        warnings.warn(f"{name} runs without a graph: {reason}", RuntimeWarning, stacklevel=5)

    def call(
        self, leaves: list[Any], spec: TreeSpec | None, device: torch.device, is_stable: bool
    ) -> tuple[Any, int]:
        """The function itself, on the stream of the captures: autograd remembers streams.

        Returns its result, and the modes after it: what was made inside counts in them.
        """
        assert self.found is not None
        before = _C.fingerprint(self.found.watched)[0]
        learning_rates = self.learning_rates()
        hook = register_optimizer_step_pre_hook(
            lambda optimizer, *_: self.optimizers.setdefault(optimizer)
        )
        try:
            with _side_stream(device):
                args, kwargs = _arguments([_moved(leaf, device) for leaf in leaves], spec)
                result = self.function(*args, **kwargs)
        finally:
            hook.remove()
        known = len(learning_rates)
        if len(self.optimizers) > known or _C.fingerprint(self.found.watched)[0] != before:
            self.search()
        self.addresses, modes = _C.fingerprint(self.found.watched)
        if self.addresses != before:
            self.graphs.clear()
        self.unstable = self.unstable + 1 if self.addresses != before or not is_stable else 0
        if self.unstable == _UNSTABLE and not self.refusal:
            self.refuse(
                "what it refers to is replaced or grows at every call (a weight, a state, a list "
                "of tensors)"
            )
        if not self.refusal and learning_rates != self.learning_rates()[:known]:
            self.refuse("it changes a learning rate; step the scheduler outside, after it")
        return _detached(result), modes

    def learning_rates(self) -> list[list[Any]]:
        return [[group["lr"] for group in opt.param_groups] for opt in self.optimizers]

    def capture(
        self, leaves: list[Any], spec: TreeSpec | None, device: torch.device
    ) -> "_Graph | None":
        """A graph of what the function does; None: it has to run. Nothing is executed."""
        assert self.found is not None
        found = self.found
        if not any(self.graphs.values()):
            self.pool = torch.cuda.graph_pool_handle()  # the one before may have died with its last
        inputs = [_static(leaf, device) for leaf in leaves]
        copies = _C.Copies(inputs)
        args, kwargs = _arguments(inputs, spec)
        versions = [tensor._version for tensor in found.tensors]
        input_versions = [leaf._version for leaf in inputs if isinstance(leaf, Tensor)]
        gradients = _C.Gradients(found.params)
        random_state = torch.get_rng_state()
        scaler_states = [scaler_state(scaler) for scaler in found.scalers]
        optimizer_states = [OptimizerState(optimizer) for optimizer in found.optimizers]
        torch.cuda.synchronize(device)
        gc.collect()
        torch.cuda.empty_cache()
        graph = new_graph()
        stores: list[Store] = []
        refusal, done = None, False
        try:
            for optimizer in found.optimizers:
                if store := store_of(optimizer, device):
                    stores.append(store)
            with _side_stream(device), capturing(graph, self.pool, device):
                outputs, result_spec = tree_flatten(_detached(self.function(*args, **kwargs)))
                copies.capture(outputs)
            if input_versions != [t._version for t in inputs if isinstance(t, Tensor)]:
                refusal = "it writes to its inputs, which a graph has copies of"
            elif any(scaler._per_optimizer_states for scaler in found.scalers):
                refusal = "it leaves scaler.update() to its caller; call that inside"
            # State made in here would be made anew by every replay: a plain call has to make it.
            done = not refusal and all(state.is_kept() for state in optimizer_states)
        except Exception as error:
            better = explained(error, self.function)
            if better is error:
                raise
            raise better from error
        finally:
            for store in stores:
                store.end_capture()
            if not done:
                gradients.undo()
                for scaler, state in zip(found.scalers, scaler_states, strict=True):
                    vars(scaler).update(state)
                for optimizer_state in optimizer_states:
                    optimizer_state.restore()
                torch.set_rng_state(random_state)
        if refusal:
            self.refuse(refusal)
        if not done:
            return None
        gradients.captured(
            [
                tensor
                for tensor, version in zip(found.tensors, versions, strict=True)
                if tensor._version != version
            ]
        )
        return _Graph(graph, copies, outputs, result_spec, stores, gradients)


class _Graph:
    """One captured call."""

    def __init__(
        self,
        graph: torch.cuda.CUDAGraph,
        copies: "_C.Copies",  # only where there is CUDA
        outputs: list[Any],
        result_spec: TreeSpec,
        stores: list[Store],
        gradients: _C.Gradients,
    ) -> None:
        self.graph, self.copies, self.stores, self.gradients = graph, copies, stores, gradients
        self.outputs = outputs
        self.result_spec = None if result_spec.is_leaf() else result_spec

    def replay(self, leaves: list[Any]) -> Any:
        results = self.copies.before(leaves, self.outputs)
        for store in self.stores:
            store.store()
        self.graph.replay()
        self.copies.after(results)
        self.gradients.restore()
        return results[0] if self.result_spec is None else tree_unflatten(results, self.result_spec)


class _Streams(threading.local):
    """A side stream for each device and thread: cuBLAS keeps workspaces for each that it saw."""

    def __init__(self) -> None:
        self.by_device: dict[torch.device, torch.cuda.Stream] = {}


_streams = _Streams()


@contextmanager
def _side_stream(device: torch.device) -> Iterator[None]:
    stream = _streams.by_device.get(device)
    if stream is None:
        stream = _streams.by_device[device] = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    current = torch.cuda.current_stream(device)
    stream.wait_stream(current)
    try:
        # Backward in this thread: one of its own would have cuBLAS workspaces of its own.
        with torch.cuda.stream(stream), torch.autograd.set_multithreading_enabled(False):
            yield
    finally:
        current.wait_stream(stream)


def _signature(leaf: Any) -> Any:
    if isinstance(leaf, Tensor):
        return _C.signature(leaf)
    try:
        hash(leaf)
    except TypeError:
        raise TypeError(
            f"a graphed function takes tensors and hashable values, got a {type(leaf).__name__}; "
            "pass a tensor (torch.as_tensor), or use graphed(enabled=False)"
        ) from None
    return type(leaf), leaf


def _can_be_static(leaf: Any, device: torch.device) -> bool:
    if not isinstance(leaf, Tensor):
        return True
    return (
        type(leaf) in (Tensor, nn.Parameter)
        and leaf.layout is torch.strided
        and not leaf.requires_grad
        and leaf.device in (device, torch.device("cpu"))
    )


def _static(leaf: Any, device: torch.device) -> Any:
    return torch.empty_like(leaf, device=device) if isinstance(leaf, Tensor) else leaf


def _moved(leaf: Any, device: torch.device) -> Any:
    if isinstance(leaf, Tensor) and leaf.device.type == "cpu":
        return leaf.to(device, non_blocking=True)
    return leaf


def _arguments(leaves: list[Any], spec: TreeSpec | None) -> tuple[Any, dict[str, Any]]:
    if spec is None:
        return leaves, {}
    args, kwargs = tree_unflatten(leaves, spec)
    return args, kwargs


def _detached(result: Any) -> Any:
    if isinstance(result, Tensor):
        return result.detach()
    leaves, spec = tree_flatten(result)
    return tree_unflatten([x.detach() if isinstance(x, Tensor) else x for x in leaves], spec)
