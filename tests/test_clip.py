"""GradScaler.clip_grad_norm_: the norm, the rounding of the coefficient, what it does not touch."""

import math

import numpy as np
import pytest
import torch
from gradients import clip_and_step, optimizer_with, random_grads, unscaled
from helpers import (
    assert_same_bits,
    on_devices,
    params_of,
    scaler_pair,
)

import mixprec


def used_gradients(optimizer):
    """In fp32, where the master of a half parameter shows them."""
    return [-optimizer.state[p].get("master", p.detach()).cpu() for p in params_of(optimizer)]


@on_devices
@pytest.mark.parametrize("norm_type", [2.0, math.inf])
@pytest.mark.parametrize("max_norm", [0.01, 3.3, 1e6, 0.0, math.inf])
def test_rounds_as_torch_does(device, norm_type, max_norm):
    """Unscaled, then multiplied by the coefficient: two roundings, given the norm."""
    grads = random_grads(device)
    optimizer = optimizer_with(grads)
    norm, _ = clip_and_step(device, optimizer, max_norm, norm_type=norm_type)
    expected = [torch.nn.Parameter(torch.zeros_like(grad)) for grad in unscaled(grads, 1000.0)]
    for param, grad in zip(expected, unscaled(grads, 1000.0), strict=True):
        param.grad = grad
    torch.nn.utils.clip_grads_with_norm_(expected, max_norm, norm.cpu(), foreach=False)
    for used, param in zip(used_gradients(optimizer), expected, strict=True):
        assert torch.equal(used, param.grad)


@on_devices
def test_coefficient_is_not_folded_into_the_scale(device):
    grads = [grad for grad in random_grads(device) if grad.numel() > 1000]
    optimizer = optimizer_with(grads)
    norm, _ = clip_and_step(device, optimizer, 3.3)
    one, inverse = np.float32(1), np.float32(1 / 1000.0)
    coefficient = one / (np.float32(norm.item()) + np.float32(1e-6)) * np.float32(3.3)
    assert coefficient < 1
    for used, grad in zip(used_gradients(optimizer), grads, strict=True):
        values = grad.cpu().float().numpy()
        assert np.array_equal(used.numpy(), values * inverse * coefficient)
        assert not np.array_equal(used.numpy(), values * (inverse * coefficient))


@on_devices
@pytest.mark.parametrize("enabled", [True, False])
@pytest.mark.parametrize(
    ("value", "count", "norm_type"),
    [
        (math.inf, 1, 2.0),
        (math.nan, 1, 2.0),
        (3e38, 2, 2.0),  # finite, and its square is not
        (math.inf, 1, math.inf),
        (math.nan, 1, math.inf),
    ],
)
def test_norm_that_is_not_finite_skips_the_step(device, enabled, value, count, norm_type):
    grad = torch.zeros(5000, device=device)
    grad[-count:] = value
    optimizer = optimizer_with([grad], momentum=0.9)
    scaler = mixprec.GradScaler(device, init_scale=1.0, enabled=enabled)
    scaler.scale(torch.zeros((), device=device))
    assert not scaler.clip_grad_norm_(optimizer, 1.0, norm_type).isfinite()
    scaler.step(optimizer)
    scaler.update()
    assert params_of(optimizer)[0].eq(0).all()
    assert optimizer.state_dict()["state"] == {}
    assert scaler.last_step_skipped is enabled


@on_devices
def test_disabled_scaler_clips(device):
    grads = random_grads(device)
    scaler = mixprec.GradScaler(device, enabled=False)
    disabled, enabled = optimizer_with(grads), optimizer_with(grads)
    norm = scaler.clip_grad_norm_(disabled, 3.3)
    scaler.step(disabled)
    expected, _ = clip_and_step(device, enabled, 3.3, scale=1.0)
    assert_same_bits(norm, expected)
    for used, grad in zip(used_gradients(disabled), used_gradients(enabled), strict=True):
        assert_same_bits(used, grad)


@on_devices
@pytest.mark.parametrize("enabled", [True, False])
def test_without_gradients_the_norm_is_zero(device, enabled):
    optimizer = optimizer_with([torch.ones(3, device=device)])
    optimizer.zero_grad()
    scaler = mixprec.GradScaler(device, enabled=enabled)
    scaler.scale(torch.zeros((), device=device))
    assert scaler.clip_grad_norm_(optimizer, 1.0).item() == 0


@on_devices
def test_clips_one_step_only(device):
    grad = torch.full((4,), 1000.0, device=device)
    optimizer = optimizer_with([grad])
    norm, scaler = clip_and_step(device, optimizer, 1.0)
    assert norm.item() == 2.0
    clipped = params_of(optimizer)[0].detach().clone()
    scaler.scale(torch.zeros((), device=device))
    scaler.step(optimizer)
    assert params_of(optimizer)[0].eq(clipped - 1).all()


@on_devices
@pytest.mark.parametrize("norm_type", [1.0, 2.0, 3.0, math.inf])
@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("enabled", [True, False])
def test_other_optimizers_unscale_and_clip_as_torch(device, norm_type, fused, enabled):
    results = []
    for scaler in scaler_pair(device, enabled=enabled):
        grads = [grad for grad in random_grads(device, (torch.float32,)) if grad.numel() > 0]
        params = params_of(optimizer_with(grads))  # torch has no inf norm of an empty tensor
        optimizer = torch.optim.SGD(params, lr=1.0, fused=fused)
        scaler.scale(torch.zeros((), device=device))
        if isinstance(scaler, mixprec.GradScaler):
            norm = scaler.clip_grad_norm_(optimizer, 3.3, norm_type)
        else:
            scaler.unscale_(optimizer)
            norm = torch.nn.utils.clip_grad_norm_(params, 3.3, norm_type)
        scaler.step(optimizer)
        scaler.update()
        results.append([norm, *params])
    for ours, torchs in zip(*results, strict=True):
        assert_same_bits(ours, torchs)


@on_devices
def test_after_unscale(device):
    grads = random_grads(device, (torch.float32,))
    results = []
    for unscale in (False, True):
        optimizer, scaler = optimizer_with(grads), mixprec.GradScaler(device, init_scale=1000.0)
        scaler.scale(torch.zeros((), device=device))
        if unscale:
            scaler.unscale_(optimizer)
        norm = scaler.clip_grad_norm_(optimizer, 3.3)
        scaler.step(optimizer)
        results.append([norm, *params_of(optimizer)])
    for once, twice in zip(*results, strict=True):
        assert_same_bits(once, twice)
