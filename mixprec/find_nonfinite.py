"""Which module of a model is the first to compute inf or NaN."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import keystr, tree_flatten_with_path, tree_leaves

from ._rows import elements

__all__ = ["NonFinite", "find_nonfinite"]


class NonFinite(NamedTuple):
    """Where inf or NaN came up first; ``str()`` is the message.

    Attributes:
        name: the module's, as in ``model.named_modules()``; "" is the model itself.
        message: name, class, what holds inf or NaN, and which of its parameters and buffers did
            before.
    """

    name: str
    message: str

    def __str__(self) -> str:
        return self.message


def find_nonfinite(model: nn.Module, *inputs: Any, **kwargs: Any) -> NonFinite | None:
    """Runs ``model(*inputs, **kwargs)`` and names the innermost module that computes inf or NaN.

    It is the first in the order of execution: all that came into it was finite. What a module
    computes between its submodules, and hands to one of them, counts as its own. Tensors are found
    in nested lists, tuples, dicts and dataclasses.

    Runs under the caller's autocast and gradient mode, with the model in the mode that it is in.
    Buffers, such as BatchNorm's running statistics, are as before afterwards; random numbers are
    drawn. Syncs at each module. Of a compiled model, pass what was compiled: compiled code may
    leave out the hooks that look.

    Returns:
        None if everything is finite. A model whose own input is not finite is named itself.

    Raises:
        Exception: what the model raises, unless it came upon inf or NaN before.

    Example::

        with mixprec.autocast():
            print(mixprec.find_nonfinite(model, x))
    """
    search = _Search({module: name for name, module in model.named_modules()})
    with ExitStack() as stack:
        stack.callback(_Buffers(search.names).restore)
        for module in search.names:
            before = module.register_forward_pre_hook(search.before, with_kwargs=True)
            stack.callback(before.remove)
            after = module.register_forward_hook(search.after, always_call=True)
            stack.callback(after.remove)
        try:
            model(*inputs, **kwargs)
        except Exception:
            if search.found is None:
                raise
    return search.found


class _Search:
    def __init__(self, names: dict[nn.Module, str]) -> None:
        self.names = names
        self.running: list[nn.Module] = []  # from the model to the innermost
        self.found: NonFinite | None = None

    def before(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        if self.found is None:
            bad = _nonfinite("input", args, _is_bad) or _nonfinite("input", kwargs, _is_bad)
            if bad and self.running:
                self.find(self.running[-1], f"what it hands to {self.text(module)} as {bad}")
            elif bad:
                self.find(module, f"its own {bad}")
        self.running.append(module)

    def after(self, module: nn.Module, args: Any, output: Any) -> None:
        self.running.pop()
        if self.found is None and (bad := _nonfinite("output", output)):
            self.find(module, f"its {bad}, and its input is finite")

    def find(self, module: nn.Module, what: str) -> None:
        own = [*module.named_parameters(), *module.named_buffers()]
        already = [text for name, tensor in own if (text := _nonfinite(name, tensor))]
        also = f"; already before: {', '.join(already)}" if already else ""
        self.found = NonFinite(self.names[module], f"{self.text(module)}: {what}{also}")

    def text(self, module: nn.Module) -> str:
        return f"{self.names[module] or 'the model'} ({type(module).__name__})"


def _is_bad(tensor: Tensor) -> Tensor:
    """Of an input: attention masks hold -inf."""
    return tensor.isnan() | (tensor == torch.inf)


def _nonfinite(
    name: str, tree: Any, is_bad: Callable[[Tensor], Tensor] = lambda t: ~t.isfinite()
) -> str | None:
    """The first tensor in it that is not finite, in words."""
    for where, tensor in _tensors(name, tree):
        if bool(is_bad(tensor).any()):
            inf, nan = int(tensor.isinf().sum()), int(tensor.isnan().sum())
            return f"{where} holds {inf} inf, {nan} NaN of {tensor.numel()} ({tensor.dtype})"
    return None


def _tensors(name: str, tree: Any) -> Iterator[tuple[str, Tensor]]:
    try:
        leaves = [(keystr(path), leaf) for path, leaf in tree_flatten_with_path(tree)[0]]
    except ValueError:  # a class that was registered without the names of its parts
        leaves = [(f"[{i}]", leaf) for i, leaf in enumerate(tree_leaves(tree))]
    for path, leaf in leaves:
        where = name + path
        if isinstance(leaf, Tensor):
            if leaf.is_floating_point() or leaf.is_complex():
                yield where, elements(leaf)
        elif dataclasses.is_dataclass(leaf) and not isinstance(leaf, type):
            for field in dataclasses.fields(leaf):
                yield from _tensors(f"{where}.{field.name}", getattr(leaf, field.name))


class _Buffers:
    """A model's buffers, to be put back as they are now."""

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self.saved = [
            (module._buffers, name, buffer, None if buffer is None else buffer.detach().clone())
            for module in modules
            for name, buffer in module._buffers.items()
        ]

    def restore(self) -> None:
        for buffers, name, buffer, values in self.saved:
            buffers[name] = buffer
            # batch_norm writes without a new version.
            if values is not None and buffer is not None and not torch.equal(buffer, values):
                with torch.no_grad():
                    buffer.copy_(values)
