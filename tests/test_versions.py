"""Autograd hears of every tensor that is written: a stale graph raises."""

import pytest
import torch
from helpers import DTYPES, on_devices

import mixprec


@on_devices
@pytest.mark.parametrize("dtype", DTYPES)
def test_versions_of_written_tensors(device, dtype):
    param = torch.nn.Parameter(torch.ones(5, dtype=dtype, device=device))
    optimizer = mixprec.SGD([param], lr=0.1, momentum=0.9)
    param.grad = torch.ones_like(param)
    optimizer.step()
    tensors = [param, *optimizer.state[param].values()]
    before = [tensor._version for tensor in tensors]
    optimizer.step()
    assert all(t._version > v for t, v in zip(tensors, before, strict=True))
    assert param.grad._version == 0


@on_devices
def test_backward_through_a_stale_graph_raises(device):
    weight = torch.nn.Parameter(torch.ones(3, device=device))
    optimizer = mixprec.SGD([weight], lr=0.1)
    loss = weight.square().sum()
    weight.grad = torch.ones_like(weight)
    optimizer.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@on_devices
@pytest.mark.parametrize("layout", ["dense", "every second"])
def test_version_of_unscaled_gradients(device, layout):
    param = torch.nn.Parameter(torch.ones(4, device=device))
    param.grad = torch.ones(8, device=device)[::2] if layout == "every second" else param.clone()
    scaler = mixprec.GradScaler(device)
    scaler.scale(torch.zeros((), device=device))
    before = param.grad._version
    scaler.unscale_(mixprec.SGD([param], lr=0.1))
    assert param.grad._version > before
    assert param.grad.eq(2.0**-16).all()


@on_devices
def test_versions_of_scale_and_counters(device):
    param = torch.nn.Parameter(torch.ones(4, device=device))
    param.grad = torch.ones_like(param)
    optimizer, scaler = mixprec.SGD([param], lr=0.1), mixprec.GradScaler(device)
    loss = torch.ones((), device=device, requires_grad=True)
    scaled = scaler.scale(loss)
    scaler.step(optimizer)
    scaler.update()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        scaled.backward()  # would multiply by the new scale
