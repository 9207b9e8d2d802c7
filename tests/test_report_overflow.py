"""Which gradients overflowed: the scaler's report, its records."""

import copy
import gc
import pickle

import numpy as np
import pytest
import torch
from gradients import param_with
from helpers import DTYPES, on_devices, random_tensor
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import mixprec

INF, NAN = float("inf"), float("nan")
LAYOUTS = {
    "contiguous": lambda grad: grad.contiguous(),
    "transposed": lambda grad: grad.mT.contiguous().mT if grad.dim() > 1 else grad,
    "strided": lambda grad: torch.stack([grad, grad], -1)[..., 0],
    "expanded": lambda grad: grad[:1].expand_as(grad) if grad.dim() else grad,
}


def iteration(scaler, optimizers, before_step=lambda scaler, optimizer: None):
    scaler.scale(torch.zeros((), device=optimizers[0].param_groups[0]["params"][0].device))
    for optimizer in optimizers:
        before_step(scaler, optimizer)
        scaler.step(optimizer)
    scaler.update()


def recorded(report):
    return {
        row.name: (row.inf, row.nan, row.largest, row.steps, row.last_step) for row in report.rows
    }


@on_devices
@pytest.mark.parametrize("record_overflow", [False, True])
def test_report(device, record_overflow):
    bad = torch.tensor([1.0, INF, NAN, -INF, -3.0], device=device)
    params = [("good", param_with(torch.ones(2, device=device))), ("bad.weight", param_with(bad))]
    optimizer = mixprec.SGD(params, lr=0.1)
    scaler = mixprec.GradScaler(device, record_overflow=record_overflow)
    assert str(scaler.report_overflow()) == "no gradient holds inf or NaN"
    iteration(scaler, [optimizer])
    report = scaler.report_overflow()
    assert "bad.weight" in str(report)
    assert "2 inf, 1 NaN of 5, largest finite 3" in str(report)
    assert "good" not in str(report)
    (row,) = report.rows
    assert row[:6] == ("bad.weight", (5,), torch.float32, 2, 1, 3.0)
    assert (row.steps, row.last_step) == ((1, 1) if record_overflow else (None, None))
    optimizer.zero_grad()
    assert len(scaler.report_overflow().rows) == record_overflow
    unnamed = mixprec.SGD([params[1][1]], lr=0.1)
    unnamed.param_groups[0]["params"][0].grad = bad
    iteration(scaler, [unnamed])
    assert "parameter 0 of group 0 of optimizer 1" in str(scaler.report_overflow())


WAYS = {
    "step": lambda scaler, optimizer: None,
    "clip": lambda scaler, optimizer: scaler.clip_grad_norm_(optimizer, 1.0),
    "clip twice": lambda scaler, optimizer: [scaler.clip_grad_norm_(optimizer, 1.0) for _ in "12"],
    "unscale": lambda scaler, optimizer: scaler.unscale_(optimizer),
    "unscale, clip": lambda scaler, optimizer: (
        scaler.unscale_(optimizer),
        scaler.clip_grad_norm_(optimizer, 1.0),
    ),
}


def oracle(steps):
    """By parameter, from a list of gradients for each step."""
    result = {}
    for number, grads in enumerate(steps, start=1):
        for i, grad in enumerate(grads):
            values = grad.double().cpu().numpy()
            finite = np.isfinite(values)
            if not finite.all():
                largest = np.abs(values[finite]).max(initial=0.0)
                counts = np.isinf(values).sum(), np.isnan(values).sum()
                result[i] = (*counts, largest, result.get(i, (0,) * 5)[3] + 1, number)
    return {f"parameter {i} of group 0": result[i] for i in sorted(result)}


@on_devices
@settings(max_examples=40)
@given(
    seed=st.integers(0, 2**32),
    shapes=st.lists(st.lists(st.integers(0, 70), max_size=3).map(tuple), min_size=1, max_size=4),
    layout=st.sampled_from(sorted(LAYOUTS)),
    overflows=st.lists(st.integers(0, 3), min_size=1, max_size=6),
    way=st.sampled_from(sorted(WAYS)),
)
def test_records_equal_an_oracle(device, seed, shapes, layout, overflows, way):
    generator = torch.Generator().manual_seed(seed)
    unscaled = "unscale" in way  # torch's rules: no fp16, and no elements that share memory
    dtypes = [torch.float32, torch.bfloat16] if unscaled else DTYPES
    dtypes = [dtypes[int(torch.randint(len(dtypes), (), generator=generator))] for _ in shapes]
    layout = "strided" if unscaled and layout == "expanded" else layout
    params = [
        nn.Parameter(torch.zeros(shape, dtype=dtype, device=device))
        for shape, dtype in zip(shapes, dtypes, strict=True)
    ]
    optimizer = mixprec.SGD(params, lr=0.1)
    scaler = mixprec.GradScaler(device, init_scale=64.0, record_overflow=True)
    steps = []
    for count in overflows:
        grads = [random_tensor(generator, p.shape, p.dtype, "cpu", 64.0) for p in params]
        filled = [grad.view(-1) for grad in grads if grad.numel()]
        for _ in range(count if filled else 0):
            grad = filled[int(torch.randint(len(filled), (), generator=generator))]
            value = (INF, -INF, NAN)[int(torch.randint(3, (), generator=generator))]
            grad[int(torch.randint(grad.numel(), (), generator=generator))] = value
        steps.append([LAYOUTS[layout](grad) for grad in grads])
        for param, grad in zip(params, steps[-1], strict=True):
            param.grad = LAYOUTS[layout](grad.to(device, copy=True))
        iteration(scaler, [optimizer], WAYS[way])
    assert recorded(scaler.report_overflow()) == oracle(steps)


def set_grads(optimizer, *values):
    params = [param for group in optimizer.param_groups for param in group["params"]]
    for param, value in zip(params, values, strict=True):
        param.grad = torch.full_like(param, value)


@on_devices
@pytest.mark.parametrize("options", [{}, {"fused": True}])
@pytest.mark.parametrize("cls", [torch.optim.SGD, torch.optim.AdamW])
def test_torchs_optimizers(device, cls, options):
    """Clipping in torch's way makes NaN of all gradients, after the record."""
    params = [nn.Parameter(torch.ones(3, device=device)) for _ in range(2)]
    optimizer = cls([("a", params[0]), ("b", params[1])], lr=0.1, **options)
    scaler = mixprec.GradScaler(device, init_scale=8.0, record_overflow=True)
    for value in (INF, 2.0):
        set_grads(optimizer, 1.0, value)
        iteration(scaler, [optimizer], WAYS["clip"])
    assert recorded(scaler.report_overflow()) == {"b": (3, 0, 0.0, 1, 1)}


@on_devices
def test_two_optimizers_and_added_groups(device):
    def param():
        return nn.Parameter(torch.ones(2, device=device))

    first = mixprec.SGD([("w", param())], lr=0.1)
    second = mixprec.SGD([("w", param()), ("v", param())], lr=0.1)
    scaler = mixprec.GradScaler(device, record_overflow=True)
    set_grads(first, 1.0)
    set_grads(second, NAN, 1.0)
    iteration(scaler, [first, second])
    second.add_param_group({"params": [("u", param())]})
    set_grads(first, INF)
    set_grads(second, 1.0, 1.0, -INF)
    iteration(scaler, [first, second])
    assert recorded(scaler.report_overflow()) == {
        "w": (2, 0, 0.0, 1, 2),
        "w of optimizer 1": (0, 2, 0.0, 1, 1),
        "u of optimizer 1": (2, 0, 0.0, 1, 2),
    }
    for other in (copy.deepcopy(scaler), pickle.loads(pickle.dumps(scaler))):
        assert other.record_overflow
        assert not other.report_overflow().rows
    assert scaler.state_dict().keys() == mixprec.GradScaler(device).state_dict().keys()


@on_devices
def test_an_optimizer_that_is_gone(device):
    names = ("w", "v")
    optimizers = [
        mixprec.SGD([(name, nn.Parameter(torch.ones(2, device=device)))], lr=0.1) for name in names
    ]
    scaler = mixprec.GradScaler(device, record_overflow=True)
    set_grads(optimizers[0], INF)
    set_grads(optimizers[1], NAN)
    iteration(scaler, optimizers)
    assert recorded(scaler.report_overflow()) == {
        "w": (2, 0, 0.0, 1, 1),
        "v of optimizer 1": (0, 2, 0.0, 1, 1),
    }
    del optimizers[1]
    gc.collect()
    assert recorded(scaler.report_overflow()) == {"w": (2, 0, 0.0, 1, 1)}


def test_a_group_that_grows():
    """Rows go by a parameter's place: after one is put in between, all counts begin anew."""
    params = [nn.Parameter(torch.ones(2)) for _ in range(3)]
    optimizer = mixprec.SGD([{"params": params[:1]}, {"params": params[1:2]}], lr=0.1)
    scaler = mixprec.GradScaler("cpu", record_overflow=True)
    set_grads(optimizer, 1.0, INF)
    iteration(scaler, [optimizer])
    optimizer.param_groups[0]["params"].append(params[2])
    set_grads(optimizer, 1.0, 1.0, NAN)
    iteration(scaler, [optimizer])
    assert recorded(scaler.report_overflow()) == {"parameter 0 of group 1": (0, 2, 0.0, 1, 1)}


@on_devices
def test_disabled_scaler_records_what_clipping_finds(device):
    optimizer = mixprec.SGD([param_with(torch.tensor([NAN, 1.0], device=device))], lr=0.1)
    scaler = mixprec.GradScaler(device, enabled=False, record_overflow=True)
    for _ in range(2):
        iteration(scaler, [optimizer], WAYS["clip twice"])
    assert recorded(scaler.report_overflow()) == {"parameter 0 of group 0": (0, 1, 1.0, 2, 2)}


@on_devices
def test_many_and_large_gradients(device):
    """More than one launch holds, and more chunks than it has blocks."""
    sizes = [3] * 2500 + [3_000_001]
    params = [nn.Parameter(torch.zeros(size, device=device)) for size in sizes]
    optimizer = mixprec.SGD(params, lr=0.1)
    scaler = mixprec.GradScaler(device, record_overflow=True)
    for _ in range(2):
        for param in params:
            param.grad = torch.ones_like(param)
        params[0].grad[1], params[2499].grad[2] = NAN, INF
        params[-1].grad[::1000], params[-1].grad[-1] = INF, -7.0
        iteration(scaler, [optimizer])
    assert recorded(scaler.report_overflow()) == {
        "parameter 0 of group 0": (0, 1, 1.0, 2, 2),
        "parameter 2499 of group 0": (1, 0, 1.0, 2, 2),
        "parameter 2500 of group 0": (3000, 0, 7.0, 2, 2),
    }
