"""What a graphed function refers to, found by looking through its closure, globals and owner."""

import contextlib
import functools
import itertools
import types
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from .sgd import SGD


class Found:
    """Modules, optimizers, scalers and tensors that a function reaches, and where it finds them."""

    def __init__(self, roots: Iterable[Any]) -> None:
        self.watched: list[tuple[Any, ...]] = []  # for _C.fingerprint
        self.optimizers: list[Optimizer] = []
        self.scalers: list[torch.amp.GradScaler] = []
        self.ddps: list[nn.parallel.DistributedDataParallel] = []
        self._tensors: dict[int, Tensor] = {}
        self._seen: set[int] = set()
        self._in_modules: set[int] = set()
        for root in roots:
            self.visit(root)
        # Of parameters in groups _C.fingerprint looks at the identity alone: most are a module's.
        alone = [
            param
            for optimizer in self.optimizers
            for group in optimizer.param_groups
            for param in group["params"]
            if id(param) not in self._in_modules
        ]
        self.watched.append((alone,))
        self.tensors = [t for t in self._tensors.values() if not t.is_inference()]
        self.device = next((t.device for t in self.tensors if t.is_cuda), None)

    @property
    def params(self) -> list[Tensor]:
        """Tensors that may have a gradient."""
        return [t for t in self.tensors if t.is_leaf and (t.requires_grad or t.grad is not None)]

    def refusal(self) -> str | None:
        """Why no graph can hold what it found."""
        if any(hasattr(tensor, "device_mesh") for tensor in self.tensors):
            return "fully_shard makes and frees its weights within a step"
        for ddp in self.ddps:
            backend = ddp.process_group._get_backend(torch.device("cuda")).name()
            if "nccl" not in backend:
                return f"its DistributedDataParallel communicates by {backend}; a graph needs NCCL"
        return None

    def visit(self, found: Any) -> None:
        if id(found) in self._seen:
            return
        self._seen.add(id(found))
        if isinstance(found, Tensor):
            self._tensors[id(found)] = found
        elif isinstance(found, nn.Module):
            for module in found.modules():
                self.visit_module(module)
        elif isinstance(found, Optimizer):
            self.visit_optimizer(found)
        elif isinstance(found, torch.amp.GradScaler):
            self.scalers.append(found)
            self.watched.append((vars(found), _SCALER_NAMES))
            self.visit_all(v for v in vars(found).values() if isinstance(v, Tensor))
        elif isinstance(found, (list, tuple)):
            self.visit_all(found)
        elif isinstance(found, dict):
            self.visit_all(found.values())
        elif isinstance(found, types.MethodType):
            self.visit_all((found.__func__, found.__self__))
        elif isinstance(found, functools.partial):
            self.visit_all((found.func, found.args, found.keywords))
        elif isinstance(found, types.FunctionType):
            self.visit_function(found)
        elif hasattr(found, "__wrapped__"):  # a decorated function, a graphed one too
            self.visit(found.__wrapped__)
        elif _is_of_user(found):
            self.visit_attributes(vars(found))

    def visit_all(self, items: Any) -> None:
        for item in items:
            if is_interesting(item):
                self.visit(item)

    def visit_function(self, function: types.FunctionType) -> None:
        if function.__module__ is None or function.__module__.split(".")[0] in _NOT_USERS:
            original = getattr(function, "_torchdynamo_orig_callable", None)  # torch.compile's
            if original is not None:
                self.visit(original)
            return
        names = tuple(
            name
            for name in dict.fromkeys(_names(function.__code__))
            if isinstance(function.__globals__.get(name, types), _SCALARS)
            or is_interesting(function.__globals__.get(name))
        )
        self.watched.append((function.__globals__, names))
        self.visit_all(function.__globals__[name] for name in names)
        for cell in function.__closure__ or ():
            self.watched.append((cell,))
            with contextlib.suppress(ValueError):  # not filled yet
                self.visit_all((cell.cell_contents,))
        self.visit_all(function.__defaults__ or ())
        self.visit_all((function.__kwdefaults__ or {}).values())
        self.visit_all(vars(function).values())

    def visit_module(self, module: nn.Module) -> None:
        self._seen.add(id(module))
        if isinstance(module, nn.parallel.DistributedDataParallel):
            self.ddps.append(module)
        self.watched.append((vars(module), ("training",)))
        for tensors_or_modules in (module._parameters, module._buffers, module._modules):
            self.watched.append((tensors_or_modules,))
        self._in_modules.update(map(id, module._parameters.values()))
        self.visit_all(module._parameters.values())
        self.visit_all(module._buffers.values())
        self.visit_attributes(vars(module))

    def visit_attributes(self, attributes: dict[str, Any]) -> None:
        names = tuple(
            name
            for name, value in attributes.items()
            if name not in _MODULES_OWN and is_interesting(value)
        )
        if names:
            self.watched.append((attributes, names))
            self.visit_all(attributes[name] for name in names)

    def visit_optimizer(self, optimizer: Optimizer) -> None:
        self.optimizers.append(optimizer)
        self.watched.append((vars(optimizer), ("state", "store_param_remainders")))
        names: tuple[Any, ...]
        if isinstance(optimizer, SGD):  # all else is on the device
            names = ("params", "nesterov", "maximize", ("momentum",))
        else:
            on_device = {"lr"} if is_fused(optimizer) else set()
            names = tuple(sorted(set().union(*optimizer.param_groups) - on_device))
        self.watched.append((vars(optimizer), "param_groups", names))
        for group in optimizer.param_groups:
            self.visit_all(group["params"])
        self.visit_all(optimizer.state.values())


_SCALARS = (bool, int, float, str)
_LEADING = (
    Tensor,
    nn.Module,
    Optimizer,
    torch.amp.GradScaler,
    types.FunctionType,
    types.MethodType,
    functools.partial,
)
_NOT_USERS = {"torch", "torchvision", "mixprec", "builtins", "numpy"}
_MODULES_OWN = frozenset(vars(nn.Module()))
_SCALER_NAMES = (
    "_scale",
    "_growth_tracker",
    "_history",
    "_enabled",
    "_growth_factor",
    "_backoff_factor",
    "_growth_interval",
    "_min_scale",
    "_max_scale",
    "_hysteresis",
    "record_overflow",
)


def _names(code: types.CodeType) -> Iterator[str]:
    """Names that a function, and the functions inside it, look up in its globals."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _names(constant)


def _is_of_user(value: Any) -> bool:
    kind = type(value)
    return (
        hasattr(value, "__dict__")
        and not isinstance(value, (type, types.ModuleType, types.BuiltinFunctionType))
        and kind.__module__.split(".")[0] not in _NOT_USERS
    )


def is_interesting(value: Any, depth: int = 0) -> bool:
    """Whether it may lead to a tensor. Of a container, its first items tell."""
    if isinstance(value, (list, tuple, dict)):
        items = value.values() if isinstance(value, dict) else value
        first = itertools.islice(items, 16)
        return depth < 4 and any(is_interesting(item, depth + 1) for item in first)
    return isinstance(value, _LEADING) or hasattr(value, "__wrapped__") or _is_of_user(value)


def is_fused(optimizer: Optimizer) -> bool:
    return all(group.get("fused") for group in optimizer.param_groups)
