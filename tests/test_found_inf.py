"""inf and NaN are found wherever they are, also those that unscaling makes, and nothing else."""

import pytest
import torch
from gradients import found_inf, ready
from helpers import on_devices

INF, NAN = float("inf"), float("nan")


@on_devices
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("value", [INF, -INF, NAN, None])
@pytest.mark.parametrize("size", [1, 5, 4096, 4097, 12289])
def test_finds_every_inf_and_nan(device, dtype, value, size):
    places = [None] if value is None else sorted({0, size // 2, 4095 % size, 4096 % size, size - 1})
    for place in places:
        grads = [torch.full((n,), 512.0, dtype=dtype, device=device) for n in (3, size, 0, 7)]
        if place is not None:
            grads[1][place] = value
        optimizer, scaler = ready(device, *grads)
        scaler.step(optimizer)
        assert found_inf(scaler, optimizer) == (value is not None)
        before = [torch.ones_like(grad) for grad in grads]
        unchanged = all(map(torch.equal, optimizer.param_groups[0]["params"], before))
        assert unchanged is (value is not None)


@on_devices
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_largest_finite_values_are_no_overflow(device, dtype):
    limit = torch.finfo(dtype).max
    grads = torch.tensor([limit, -limit, 0.0], dtype=dtype, device=device)
    optimizer, scaler = ready(device, grads)
    scaler.step(optimizer)
    assert found_inf(scaler, optimizer) == 0


@on_devices
@pytest.mark.parametrize("unscale", [False, True])
def test_overflow_by_unscaling_changes_nothing(device, unscale):
    """At a scale below 1 a finite gradient may be inf once it is unscaled; torch would apply it."""
    grad = torch.tensor([3e38, 3e38, 1.0], device=device)
    optimizer, scaler = ready(device, grad, init_scale=0.5, record_overflow=True)
    if unscale:
        scaler.unscale_(optimizer)
    scaler.step(optimizer)
    assert found_inf(scaler, optimizer) == 1
    assert optimizer.param_groups[0]["params"][0].eq(1).all()
    scaler.update()
    assert scaler.last_step_skipped
    assert scaler.get_scale() == 0.25
    (row,) = scaler.report_overflow().rows
    assert (row.inf, row.nan, row.largest) == (2, 0, 1.0)


@on_devices
def test_overflow_by_rounding_what_is_unscaled(device):
    """Finite in fp32 after unscaling, but not as the bf16 number that is written back."""
    grad = torch.full((3,), torch.finfo(torch.bfloat16).max, dtype=torch.bfloat16, device=device)
    assert (grad.float() / 0.9975).isfinite().all()
    optimizer, scaler = ready(device, grad, init_scale=0.9975)
    scaler.unscale_(optimizer)
    assert optimizer.param_groups[0]["params"][0].grad.isinf().all()
    assert found_inf(scaler, optimizer) == 1
