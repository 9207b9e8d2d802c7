"""The rule of the dynamic scale: torch's bit for bit, and its limits, hysteresis and counters."""

import hypothesis.strategies as st
import pytest
import torch
from helpers import assert_same_bits, on_devices, scaler_pair
from hypothesis import given

import mixprec

BIG = torch.finfo(torch.float32).max


def optimizer_on(device):
    return mixprec.SGD([torch.nn.Parameter(torch.zeros(2, device=device))], lr=0.0)


def iterate(scaler, optimizer, overflow):
    (param,) = optimizer.param_groups[0]["params"]
    param.grad = torch.full_like(param, float("nan") if overflow else 0.0)
    scaler.scale(torch.zeros((), device=param.device))
    scaler.step(optimizer)
    scaler.update()


class MegatronScaler:
    """Megatron-LM's DynamicGradScaler, on Python floats (powers of two, so no rounding)."""

    def __init__(self, scale, interval, hysteresis, min_scale):
        self.scale, self.interval, self.min_scale = scale, interval, min_scale
        self.hysteresis = self.left = hysteresis
        self.good_steps = 0

    def update(self, overflow):
        if overflow:
            self.good_steps = 0
            self.left -= 1
            if self.left <= 0:
                self.scale = max(self.scale / 2, self.min_scale)
            return
        self.good_steps += 1
        if self.good_steps == self.interval:
            self.good_steps = 0
            self.left = self.hysteresis
            self.scale *= 2


@on_devices
@given(
    init_scale=st.floats(2.0**-100, BIG, width=32),
    growth_factor=st.floats(1.0, 1e6, exclude_min=True),
    backoff_factor=st.floats(1e-6, 1.0, exclude_max=True),
    growth_interval=st.integers(1, 4),
    overflows=st.lists(st.booleans(), min_size=1, max_size=30),
)
def test_bits_equal_torch(device, overflows, init_scale, **options):
    if init_scale * options["backoff_factor"] ** len(overflows) < 2.0**-126:
        init_scale = 1e30  # below the smallest normal number min_scale holds, and torch goes on
        options["backoff_factor"] = 0.25
    ours, torchs = scaler_pair(device, init_scale=init_scale, **options)
    optimizer = optimizer_on(device)
    reference = torch.optim.SGD([torch.nn.Parameter(torch.zeros(2, device=device))], lr=0.0)
    for i, overflow in enumerate(overflows):
        iterate(ours, optimizer, overflow)
        iterate(torchs, reference, overflow)
        assert_same_bits(ours._scale, torchs._scale, f"scale {i}")
        assert_same_bits(ours._growth_tracker, torchs._growth_tracker, f"tracker {i}")


@on_devices
def test_long_run_equals_torch(device):
    ours, torchs = scaler_pair(device, growth_factor=1.7, backoff_factor=0.3, growth_interval=2)
    optimizer = optimizer_on(device)
    reference = torch.optim.SGD([torch.nn.Parameter(torch.zeros(2, device=device))], lr=0.0)
    overflows = torch.rand(1000, generator=torch.Generator().manual_seed(0)) < 0.18
    for overflow in overflows.tolist():
        iterate(ours, optimizer, overflow)
        iterate(torchs, reference, overflow)
        assert ours.state_dict().items() >= torchs.state_dict().items()
    assert ours.steps_skipped == int(overflows.sum())


@on_devices
def test_does_not_grow_to_inf(device):
    scaler = mixprec.GradScaler(device, init_scale=BIG / 1.5, growth_interval=1)
    optimizer = optimizer_on(device)
    for _ in range(3):
        iterate(scaler, optimizer, False)
        assert scaler.get_scale() == pytest.approx(BIG / 1.5, rel=1e-7)
        assert scaler._get_growth_tracker() == 0


@on_devices
def test_limits(device):
    limits = {"min_scale": 3.0, "max_scale": 20.0}
    scaler = mixprec.GradScaler(device, init_scale=8.0, growth_interval=1, **limits)
    optimizer = optimizer_on(device)
    seen = []
    for overflow in (False, False, False, True, True, True, True, False):
        iterate(scaler, optimizer, overflow)
        seen.append(scaler.get_scale())
    assert seen == [16, 20, 20, 10, 5, 3, 3, 6]


@on_devices
def test_never_collapses_to_zero(device):
    scaler = mixprec.GradScaler(device, init_scale=1e-30, backoff_factor=1e-20)
    optimizer = optimizer_on(device)
    for _ in range(3):
        iterate(scaler, optimizer, True)
    assert scaler.get_scale() == 2.0**-126


@on_devices
@given(
    overflows=st.lists(st.booleans(), min_size=1, max_size=40),
    hysteresis=st.integers(1, 4),
    interval=st.integers(1, 4),
)
def test_hysteresis_is_megatrons(device, overflows, hysteresis, interval):
    scaler = mixprec.GradScaler(
        device,
        init_scale=64.0,
        growth_interval=interval,
        min_scale=2.0,
        hysteresis=hysteresis,
    )
    model = MegatronScaler(64.0, interval, hysteresis, 2.0)
    optimizer = optimizer_on(device)
    for overflow in overflows:
        iterate(scaler, optimizer, overflow)
        model.update(overflow)
        assert (scaler.get_scale(), scaler._get_growth_tracker()) == (model.scale, model.good_steps)


@on_devices
def test_counters(device):
    scaler, optimizer = mixprec.GradScaler(device), optimizer_on(device)
    assert (scaler.steps_skipped, scaler.last_step_skipped) == (0, False)
    for overflow, expected in ((True, 1), (False, 1), (True, 2), (True, 3), (False, 3)):
        iterate(scaler, optimizer, overflow)
        assert (scaler.steps_skipped, scaler.last_step_skipped) == (expected, overflow)


@on_devices
@pytest.mark.parametrize("new_scale", ["float", "tensor"])
def test_new_scale(device, new_scale):
    ours, torchs = scaler_pair(device)
    value = 123.5 if new_scale == "float" else torch.full((), 123.5, device=device)
    for scaler in (ours, torchs):
        scaler.scale(torch.zeros((), device=device))
        scaler.update(value)
    assert ours.get_scale() == torchs.get_scale() == 123.5
    iterate(ours, optimizer_on(device), True)
    assert ours.get_scale() == 61.75


@on_devices
def test_several_optimizers_one_update(device):
    ours, torchs = scaler_pair(device)
    for overflows in ((False, True), (False, False), (True, True), (False, False)):
        for scaler, cls in ((ours, mixprec.SGD), (torchs, torch.optim.SGD)):
            scaler.scale(torch.zeros((), device=device))
            params = [torch.nn.Parameter(torch.ones(3, device=device)) for _ in overflows]
            optimizers = [cls([param], lr=0.5) for param in params]
            for param, optimizer, overflow in zip(params, optimizers, overflows, strict=True):
                param.grad = torch.full_like(param, float("inf") if overflow else 1.0)
                scaler.step(optimizer)
                assert bool((param == 1).all()) is overflow
            scaler.update()
        assert_same_bits(ours._scale, torchs._scale)
        assert_same_bits(ours._growth_tracker, torchs._growth_tracker)
