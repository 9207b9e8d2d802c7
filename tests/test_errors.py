"""Bad input: one clear error, before a weight, its state or a gradient has changed."""

import math

import pytest
import torch
from helpers import assert_same_bits, on_devices, params_of

import mixprec


def wrong_shape(param):
    param.data = torch.ones(7, device=param.device)


def sparse_gradient(param):
    param.grad = torch.ones(4, 3, device=param.device).to_sparse()


def complex_parameter(param):
    param.data = torch.ones(4, 3, dtype=torch.complex64, device=param.device)
    param.grad = torch.ones_like(param)


def expanded(param):
    param.data = torch.ones(1, 3, device=param.device).expand(4, 3)


def gaps(param):
    param.data = torch.ones(4, 6, device=param.device)[:, ::2]


def wrong_dtype(param):
    param.data = param.data.double()


def half_gradient(param):
    param.grad = None
    param.data = param.data.half()
    param.grad = torch.ones_like(param)
    param.data = param.data.float()


def float8_parameter(param):
    param.grad = None
    param.data = param.data.to(torch.float8_e4m3fn)
    param.grad = param.data.clone()


SPOILERS = {
    wrong_shape: r"parameter 2 of group 0 has shape \[7\], its gradient \[4, 3\]",
    sparse_gradient: "gradient of parameter 2 of group 0 is Sparse",
    complex_parameter: "parameter 2 of group 0 is ComplexFloat",
    expanded: r"parameter 2 of group 0 has shape \[4, 3\] and strides \[0, 1\]",
    gaps: r"parameter 2 of group 0 has shape \[4, 3\] and strides \[6, 2\]",
    wrong_dtype: "parameter 2 of group 0 is Double|weight of parameter 2 of group 0 is Double",
    half_gradient: "parameter 2 of group 0 is Float, its gradient Half",
    float8_parameter: "parameter 2 of group 0 is Float8",
}


def optimizer_of_three(device, **options):
    dtypes = (torch.float32, torch.float16, torch.float32)
    params = [torch.nn.Parameter(torch.ones(4, 3, dtype=dtype, device=device)) for dtype in dtypes]
    optimizer = mixprec.SGD(params, **{"lr": 0.1, "momentum": 0.9, **options})
    for param in params:
        param.grad = torch.ones_like(param)
    return optimizer


def snapshot(optimizer, count=2):
    """Weights, gradients and state of the parameters that are not spoiled."""
    params = params_of(optimizer)[:count]
    state = [value for p in params for value in optimizer.state.get(p, {}).values()]
    return [t.detach().clone() for t in [*params, *(p.grad for p in params), *state]]


def assert_unchanged(optimizer, before, count=2):
    after = snapshot(optimizer, count)
    assert len(after) == len(before)
    for tensor, expected in zip(after, before, strict=True):
        assert_same_bits(tensor, expected)


@on_devices
@pytest.mark.parametrize("steps_before", [0, 1])
@pytest.mark.parametrize("spoil", SPOILERS)
def test_bad_tensor_is_refused_before_anything_changes(device, spoil, steps_before):
    optimizer = optimizer_of_three(device)
    for _ in range(steps_before):
        optimizer.step()
    spoil(params_of(optimizer)[2])
    before = snapshot(optimizer)
    with pytest.raises((RuntimeError, ValueError, TypeError), match=SPOILERS[spoil]):
        optimizer.step()
    assert_unchanged(optimizer, before)
    params_of(optimizer)[2].grad = None
    optimizer.step()  # the others still work
    assert not torch.equal(params_of(optimizer)[0], before[0])


@on_devices
def test_other_device(device):
    optimizer = optimizer_of_three(device)
    # torch lets no gradient live on another device than its parameter
    optimizer.param_groups[0]["params"][2] = torch.nn.Parameter(torch.ones(4, device="meta"))
    optimizer.param_groups[0]["params"][2].grad = torch.ones(4, device="meta")
    before = snapshot(optimizer)
    with pytest.raises(RuntimeError, match="works on CPU and CUDA tensors, got one on meta"):
        optimizer.step()
    assert_unchanged(optimizer, before)


def assert_steps_as_fresh(optimizer, device):
    """State that was made before the error, if any, is as good as none."""
    fresh = optimizer_of_three(device)
    for each in (optimizer, fresh):
        each.step()
    for param, expected in zip(params_of(optimizer), params_of(fresh), strict=True):
        assert_same_bits(param, expected)
        for name, value in fresh.state[expected].items():
            assert_same_bits(optimizer.state[param][name], value)


@on_devices
@pytest.mark.parametrize("name", ["momentum_buffer", "master"])
def test_state_of_another_shape(device, name):
    optimizer = optimizer_of_three(device)
    param = params_of(optimizer)[1]
    optimizer.state[param][name] = torch.ones(5, device=device)
    before = [p.detach().clone() for p in params_of(optimizer)]
    with pytest.raises(RuntimeError, match=rf"{name} of parameter 1 of group 0 has shape \[5\]"):
        optimizer.step()
    for p, expected in zip(params_of(optimizer), before, strict=True):
        assert_same_bits(p, expected)
    del optimizer.state[param][name]
    assert_steps_as_fresh(optimizer, device)


@on_devices
@pytest.mark.parametrize("shrink_to", [0, 20])
@pytest.mark.parametrize("call", ["step", "clip_grad_norm_"])
@pytest.mark.parametrize("what", ["weight", "gradient", "momentum_buffer", "master"])
def test_memory_that_was_freed(device, what, call, shrink_to):
    """storage.resize_(0) is how people offload: torch's own kernels crash on what is left."""
    optimizer, scaler = optimizer_of_three(device), mixprec.GradScaler(device)
    optimizer.step()
    scaler.scale(torch.zeros((), device=device))
    param = params_of(optimizer)[1]
    kept = [p for p in params_of(optimizer) if p is not param]
    before = [t.clone() for p in kept for t in (p.detach(), p.grad)]
    victim = {"weight": param.data, "gradient": param.grad}.get(what)
    victim = optimizer.state[param][what] if victim is None else victim
    victim.untyped_storage().resize_(shrink_to)

    def run():
        getattr(scaler, call)(optimizer, *((1.0,) if call == "clip_grad_norm_" else ()))

    if what == "gradient" or call == "step":
        message = f"the {what} of parameter 1 of group 0 has 12 elements, but its storage was"
        with pytest.raises(RuntimeError, match=message):
            run()
        for tensor, expected in zip([t for p in kept for t in (p, p.grad)], before, strict=True):
            assert_same_bits(tensor, expected)
    else:
        run()  # reads gradients alone


@on_devices
@pytest.mark.parametrize("bad", ["0.1", None, torch.ones(2), torch.nan, -torch.inf])
@pytest.mark.parametrize("name", ["lr", "momentum", "dampening", "weight_decay"])
def test_hyperparameter_that_is_no_number(device, name, bad):
    optimizer = optimizer_of_three(device)
    before = snapshot(optimizer, 3)
    optimizer.add_param_group({"params": [torch.nn.Parameter(torch.ones(3, device=device))]})
    optimizer.param_groups[1][name] = bad
    with pytest.raises((TypeError, ValueError), match=f"{name} of group 1 is"):
        optimizer.step()
    assert_unchanged(optimizer, before, 3)


@on_devices
@pytest.mark.parametrize("max_norm", [-1.0, math.nan])
def test_max_norm_that_is_none(device, max_norm):
    optimizer, scaler = optimizer_of_three(device), mixprec.GradScaler(device)
    scaler.scale(torch.zeros((), device=device))
    with pytest.raises(ValueError, match="max_norm must be at least 0"):
        scaler.clip_grad_norm_(optimizer, max_norm)
    scaler.step(optimizer)  # as if it had not been called


@on_devices
@pytest.mark.parametrize("name", ["_scale", "_growth_tracker", "_history"])
def test_state_of_a_scaler(device, name):
    optimizer, scaler = optimizer_of_three(device), mixprec.GradScaler(device)
    scaler.scale(torch.zeros((), device=device))
    scaler.step(optimizer)
    before = scaler.state_dict()
    original = getattr(scaler, name)
    for bad in (original.double(), torch.cat([original.view(-1)] * 2), original.to("meta")):
        setattr(scaler, name, bad)
        with pytest.raises(RuntimeError, match=r"the scaler's .* must be|works on CPU and CUDA"):
            scaler.update()
        setattr(scaler, name, original)
        assert scaler.state_dict() == before


@on_devices
@pytest.mark.parametrize("name", ["found_inf", "grad_scale"])
@pytest.mark.parametrize("value", [torch.ones(2), torch.ones((), dtype=torch.float64)])
def test_scalars_of_a_scaler(device, name, value):
    optimizer = optimizer_of_three(device)
    before = [p.detach().clone() for p in params_of(optimizer)]
    setattr(optimizer, name, value.to(device))
    with pytest.raises(RuntimeError, match=f"{name} must be one float32"):
        optimizer.step()
    for p, expected in zip(params_of(optimizer), before, strict=True):
        assert_same_bits(p, expected)
    delattr(optimizer, name)
    assert_steps_as_fresh(optimizer, device)


@on_devices
@pytest.mark.parametrize("call", ["step", "clip_grad_norm_", "unscale_"])
def test_scaler_refuses_before_anything_changes(device, call):
    optimizer, scaler = optimizer_of_three(device), mixprec.GradScaler(device)
    complex_parameter(params_of(optimizer)[2])
    scaler.scale(torch.zeros((), device=device))
    before, state = snapshot(optimizer), scaler.state_dict()
    with pytest.raises((RuntimeError, ValueError), match=r"ComplexFloat|FP16"):
        getattr(scaler, call)(optimizer, *((1.0,) if call == "clip_grad_norm_" else ()))
    assert_unchanged(optimizer, before)
    assert scaler.state_dict() == state
    assert optimizer.state_dict()["state"] == {}


@on_devices
def test_overlapping_gradient_is_not_unscaled(device):
    param = torch.nn.Parameter(torch.ones(4, device=device))
    optimizer, scaler = mixprec.SGD([param], lr=0.1), mixprec.GradScaler(device)
    param.grad = torch.ones(1, device=device).expand(4)
    scaler.scale(torch.zeros((), device=device))
    with pytest.raises(RuntimeError, match="share memory"):
        scaler.unscale_(optimizer)
    assert param.grad.eq(1).all()
