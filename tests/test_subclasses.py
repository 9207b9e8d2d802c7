"""Tensor subclasses that hide their memory are refused, not read."""

import pytest
import torch
from helpers import on_devices

import mixprec


class WithoutMemory(torch.Tensor):
    """A wrapper as DTensor is: no storage of its own."""

    @staticmethod
    def __new__(cls, inner):
        return torch.Tensor._make_wrapper_subclass(
            cls, inner.shape, dtype=inner.dtype, device=inner.device
        )

    def __init__(self, inner):
        self.inner = inner

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        args = [arg.inner if isinstance(arg, WithoutMemory) else arg for arg in args]
        return WithoutMemory(func(*args, **(kwargs or {})))


@on_devices
def test_tensor_without_memory(device):
    for param in (
        torch.nn.Parameter(WithoutMemory(torch.ones(3, device=device))),
        torch.nn.Parameter(torch.ones(3, device=device)),
    ):
        param.grad = WithoutMemory(torch.ones(3, device=device))
        with pytest.raises(RuntimeError, match="subclass without memory"):
            mixprec.SGD([param], lr=0.1).step()
