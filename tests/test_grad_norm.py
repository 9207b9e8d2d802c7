"""The norm that GradScaler.clip_grad_norm_ returns: float64's within the bound, every time."""

import math

import pytest
import torch
from gradients import clip_and_step, optimizer_with, random_grads, unscaled
from helpers import DTYPES, on_devices, params_of

# fp32 roundings on the way of one square into the sum of its chunk of 4096, which float64 adds up:
# the square, and at most 256 + 15 additions (16 sums side by side; the CUDA kernel does less).
ROUNDINGS = 272
UNIT, UNDERFLOW = 2.0**-24, 2.0**-150


def norm_interval(grads):
    squares = [torch.cat([grad.double().flatten() for grad in grads]).square().tolist()]
    total, count = math.fsum(squares[0]), len(squares[0])
    relative = ROUNDINGS * UNIT / (1 - ROUNDINGS * UNIT)
    low = math.sqrt(max(total * (1 - relative) - count * UNDERFLOW, 0)) * (1 - UNIT)
    return low, math.sqrt(total * (1 + relative) + count * UNDERFLOW) * (1 + UNIT)


@on_devices
@pytest.mark.parametrize("scale", [1.0, 1000.0, 2.0**16])
@pytest.mark.parametrize("dtypes", [DTYPES, *((dtype,) for dtype in DTYPES)], ids=str)
def test_norm_against_float64(device, dtypes, scale):
    grads = random_grads(device, dtypes)
    norm, _ = clip_and_step(device, optimizer_with(grads), 1.0, scale)
    low, high = norm_interval(unscaled(grads, scale))
    assert norm.dtype is torch.float32
    assert norm.shape == ()
    assert norm.device.type == device
    assert low <= norm.item() <= high


@on_devices
def test_inf_norm_is_exact(device):
    grads = random_grads(device)
    norm, _ = clip_and_step(device, optimizer_with(grads), 1.0, norm_type=math.inf)
    assert norm.item() == max(g.abs().max() for g in unscaled(grads, 1000.0) if g.numel() > 0)


@on_devices
def test_same_bits_on_every_run(device):
    grads = random_grads(device, seed=1)
    norms = {clip_and_step(device, optimizer_with(grads), 1.0)[0].item() for _ in range(20)}
    threads = torch.get_num_threads()
    for count in (1, 2, 5):
        torch.set_num_threads(count)
        norms.add(clip_and_step(device, optimizer_with(grads), 1.0)[0].item())
    torch.set_num_threads(threads)
    assert len(norms) == 1


@on_devices
def test_fp16_gradients_do_not_overflow_the_norm(device):
    grads = [torch.full((10_000,), 65504.0, dtype=torch.float16, device=device)]
    optimizer = optimizer_with(grads)
    norm, scaler = clip_and_step(device, optimizer, 1.0, scale=2.0)
    low, high = norm_interval(unscaled(grads, 2.0))
    assert low <= norm.item() <= high
    assert not scaler.last_step_skipped
    assert not optimizer.state[params_of(optimizer)[0]]["master"].eq(0).any()
