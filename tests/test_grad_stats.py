"""mixprec.grad_stats against numpy's float16, and its table and picture."""

import math

import numpy as np
import pytest
import torch
from helpers import DTYPES, needs_cuda, on_devices
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import mixprec

INF, NAN = float("inf"), float("nan")
EDGES = [
    value * factor
    for value in (2.0**-25, 2.0**-24, 2.0**-14, 65504.0)
    for factor in (1 - 2**-20, 1.0, 1 + 2**-20, -1.0)
] + [0.0, -0.0, 1.0, 2.0**-149, 1e30]


def scaled(device, scale=1024.0):
    scaler = mixprec.GradScaler(device, init_scale=scale)
    scaler.scale(torch.zeros((), device=device))
    return scaler


def optimizer_of(grads):
    params = [(f"p{i}", nn.Parameter(torch.zeros_like(grad))) for i, grad in enumerate(grads)]
    for (_, param), grad in zip(params, grads, strict=True):
        param.grad = grad
    return mixprec.SGD(params, lr=0.1)


@on_devices
@given(
    values=st.lists(
        st.one_of(st.sampled_from(EDGES), st.floats(-70000, 70000, width=32)),
        min_size=1,
        max_size=40,
    ),
    dtype=st.sampled_from(DTYPES),
    transposed=st.booleans(),
)
def test_equals_numpy(device, values, dtype, transposed):
    grad = torch.tensor([values, values[::-1]]).to(device, dtype)
    grad = grad.T if transposed else grad
    (row,) = mixprec.grad_stats(optimizer_of([grad]), scaled(device)).rows
    exact = np.abs(grad.double().cpu().numpy())
    with np.errstate(over="ignore"):
        as_fp16 = exact.astype(np.float16)
    flushed = (exact > 0) & (as_fp16 == 0)
    assert row.flushed == flushed.mean()
    assert row.zero == (exact == 0).mean()
    assert row.subnormal == ((exact > 0) & (exact < np.finfo(np.float16).tiny)).mean()
    assert row.largest == exact.max()
    if 0 < row.largest < INF:
        assert math.isclose(2.0**row.headroom * row.largest, 65504.0, rel_tol=1e-12)
    assert (row.headroom >= 0) == (row.largest <= 65504)
    assert (row.name, row.shape, row.dtype) == ("p0", grad.shape, dtype)


@on_devices
def test_special_gradients(device):
    grads = [torch.tensor(v, device=device) for v in ([0.0], [1.0, INF], [1.0, NAN], [65504.0])]
    optimizer = optimizer_of([*grads, torch.zeros(0, 3, device=device)])
    optimizer.add_param_group({"params": [("none", nn.Parameter(torch.ones(2, device=device)))]})
    rows = mixprec.grad_stats(optimizer, scaled(device)).rows
    assert [row.name for row in rows] == ["p0", "p1", "p2", "p3"]
    assert [row.headroom for row in rows[:2]] == [INF, -INF]
    assert math.isnan(rows[2].headroom)
    assert rows[3].headroom == 0
    optimizer.zero_grad()
    assert mixprec.grad_stats(optimizer, scaled(device)).rows == []


def test_sparse_gradient():
    model = nn.Embedding(10, 2, sparse=True)
    scaler = scaled("cpu", 1.0)
    scaler.scale(model(torch.tensor([3, 3])).mul(2.0**-26).sum()).backward()
    (row,) = mixprec.grad_stats(model, scaler).rows
    assert (row.name, row.largest, row.flushed) == ("weight", 2.0**-25, 1.0)


@on_devices
def test_names_the_layer_that_underflows(device, tmp_path):
    model = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2)).to(device)
    scaler = mixprec.GradScaler(device, init_scale=256.0)
    loss = model[1](model[0](torch.ones(1, 4, device=device)).detach()).sum()
    loss = loss + model[0].weight.sum() * 2.0**-40 + model[0].bias.sum()
    scaler.scale(loss).backward()
    for source in (model, mixprec.SGD(model.named_parameters(), lr=0.1)):
        stats = mixprec.grad_stats(source, scaler)
        assert stats.scale == 256.0
        assert [row.name for row in stats.rows if row.flushed > 0] == ["0.weight"]
        assert stats.rows[0].flushed == stats.rows[0].subnormal == 1.0
        assert stats.rows[0].largest == 2.0**-32
    pytest.importorskip("rich")
    assert stats.table().row_count == 4
    pytest.importorskip("matplotlib")
    for each in (stats, mixprec.grad_stats(nn.ReLU(), scaler)):
        each.plot(tmp_path / "stats.png")
        assert (tmp_path / "stats.png").stat().st_size > 0


@on_devices
@pytest.mark.parametrize("enabled", [True, False])
def test_after_the_step_it_is_refused(device, enabled):
    optimizer = optimizer_of([torch.ones(3, device=device)])
    model = nn.ParameterList(optimizer.param_groups[0]["params"])
    scaler = mixprec.GradScaler(device, enabled=enabled)
    scaler.scale(torch.zeros((), device=device))
    scaler.clip_grad_norm_(optimizer, 1.0)  # leaves them scaled
    assert mixprec.grad_stats(model, scaler).rows[0].largest == 1.0
    scaler.step(optimizer)
    for source in (optimizer, model):
        if enabled:
            with pytest.raises(RuntimeError, match="between backward"):
                mixprec.grad_stats(source, scaler)
        else:
            assert mixprec.grad_stats(source, scaler).scale == 1.0
    other = optimizer_of([torch.ones(3, device=device)])
    assert mixprec.grad_stats(other, scaler).rows
    scaler.update()
    assert mixprec.grad_stats(model, scaler).rows


@needs_cuda
def test_one_transfer_whatever_the_number_of_gradients():
    optimizer, scaler = optimizer_of([torch.ones(8, device="cuda")] * 20), scaled("cuda")
    mixprec.grad_stats(optimizer, scaler)
    torch.cuda.synchronize()
    with torch.profiler.profile() as profile:
        mixprec.grad_stats(optimizer, scaler)
    copies = [event.name for event in profile.events() if "Memcpy DtoH" in event.name]
    assert len(copies) <= 2, copies  # the rows and the scale
