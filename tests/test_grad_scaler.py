"""mixprec.GradScaler as a drop-in: what is found, unscaled and skipped; state; every error."""

import copy
import io
import pickle

import pytest
import torch
from gradients import found_inf, param_with, ready
from helpers import assert_same_bits, on_devices, random_tensor, scaler_pair

import mixprec

INF, NAN = float("inf"), float("nan")


@on_devices
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("scale", [1.0, 1000.0, 3e-3, 2.0**16])
@pytest.mark.parametrize("overflow", [None, INF, NAN])
def test_unscale_writes_torchs_bits(device, dtype, scale, overflow):
    if device == "cuda" and dtype is not torch.float32:
        pytest.skip(f"torch's GradScaler and mixprec do not both take {dtype} on CUDA")
    grad = random_tensor(torch.Generator().manual_seed(0), (4099,), dtype, device, scale)
    if overflow is not None:
        grad[4098] = overflow
    ours, torchs = scaler_pair(device, init_scale=scale)
    results = []
    for scaler in (ours, torchs):
        param = param_with(grad)
        optimizer = torch.optim.SGD([param], lr=0.5)
        scaler.scale(torch.zeros((), device=device))
        scaler.unscale_(optimizer)
        assert found_inf(scaler, optimizer) == (overflow is not None)
        results.append(param.grad)
    finite = results[1].isfinite()
    assert_same_bits(results[0][finite], results[1][finite])
    assert torch.equal(results[0].isnan(), results[1].isnan())


@on_devices
def test_unscale_refuses_fp16_before_anything_changes(device):
    grads = [torch.ones(3, device=device), torch.ones(3, dtype=torch.float16, device=device)]
    optimizer, scaler = ready(device, *grads)
    with pytest.raises(ValueError, match="Attempting to unscale FP16 gradients"):
        scaler.unscale_(optimizer)
    for param, grad in zip(optimizer.param_groups[0]["params"], grads, strict=True):
        assert_same_bits(param.grad, grad)
    scaler.step(optimizer)  # still possible
    assert found_inf(scaler, optimizer) == 0


@on_devices
def test_unscale_then_step_does_not_unscale_again(device):
    optimizer, scaler = ready(device, torch.full((3,), 1000.0, device=device))
    scaler.unscale_(optimizer)
    scaler.step(optimizer)
    assert optimizer.param_groups[0]["params"][0].eq(0.5).all()


@on_devices
@pytest.mark.parametrize("cls", [mixprec.SGD, torch.optim.SGD])
def test_order_of_calls(device, cls):
    def fresh():
        return ready(device, torch.ones(3, device=device), cls=cls)

    optimizer, scaler = fresh()
    scaler.unscale_(optimizer)
    with pytest.raises(RuntimeError, match="already been called"):
        scaler.unscale_(optimizer)
    scaler.step(optimizer)
    with pytest.raises(RuntimeError, match="after step"):
        scaler.unscale_(optimizer)
    with pytest.raises(RuntimeError, match="after step"):
        scaler.clip_grad_norm_(optimizer, 1.0)
    with pytest.raises(RuntimeError, match="already been called"):
        scaler.step(optimizer)
    scaler.update()
    scaler.unscale_(optimizer)

    optimizer, scaler = fresh()
    with pytest.raises(AssertionError, match="No inf checks"):
        scaler.update()
    with pytest.raises(RuntimeError, match="Closure"):
        scaler.step(optimizer, closure=lambda: 0.0)
    optimizer.zero_grad()
    with pytest.raises(AssertionError, match="No inf checks"):
        scaler.step(optimizer)
    scaler = mixprec.GradScaler(device)
    for name, args in (("step", ()), ("unscale_", ()), ("clip_grad_norm_", (1.0,))):
        with pytest.raises(AssertionError, match=rf"{name}.*scaler.scale\(loss or outputs\)"):
            getattr(scaler, name)(optimizer, *args)
    with pytest.raises(AssertionError, match="Attempted update"):
        scaler.update()


@on_devices
def test_exception_in_step_leaves_nothing_on_the_optimizer(device):
    optimizer, scaler = ready(device, torch.ones(3, device=device))

    def fail(*_):
        assert optimizer.found_inf.item() == 0
        raise KeyError("from the hook")

    handle = optimizer.register_step_pre_hook(fail)
    scaler.clip_grad_norm_(optimizer, 1.0)
    with pytest.raises(KeyError, match="from the hook"):
        scaler.step(optimizer)
    assert not {"grad_scale", "found_inf", "grad_clip"} & vars(optimizer).keys()
    handle.remove()
    scaler.step(optimizer)
    assert not {"grad_scale", "found_inf", "grad_clip"} & vars(optimizer).keys()


@on_devices
def test_state_dict_loads_both_ways(device):
    ours, torchs = scaler_pair(device, init_scale=77.0, growth_factor=3.0, backoff_factor=0.25)
    others = torch.amp.GradScaler(device), mixprec.GradScaler(device)
    for scaler, other in zip((ours, torchs), others, strict=True):
        file = io.BytesIO()
        torch.save(scaler.state_dict(), file)
        file.seek(0)
        other.load_state_dict(torch.load(file, weights_only=True))
        common = torchs.state_dict().keys()
        assert all(other.state_dict()[k] == scaler.state_dict()[k] for k in common)


@on_devices
@pytest.mark.parametrize("how", ["state_dict", "state_dict, running", "pickle", "deepcopy"])
def test_copies_go_on_alike(device, how):
    options = {"hysteresis": 3, "growth_interval": 4, "min_scale": 2.0, "max_scale": 2.0**15}

    def overflow(scaler, value):
        optimizer = mixprec.SGD([param_with(torch.full((2,), value, device=device))])
        scaler.scale(torch.zeros((), device=device))
        scaler.step(optimizer)
        scaler.update()

    scaler = mixprec.GradScaler(device, init_scale=64.0, **options)
    for value in (INF, 1.0, INF, 1.0, 1.0):
        overflow(scaler, value)
    if how.startswith("state_dict"):
        other = mixprec.GradScaler(device)
        if how == "state_dict, running":
            overflow(other, 1.0)
        other.load_state_dict(scaler.state_dict())
    else:
        other = copy.deepcopy(scaler) if how == "deepcopy" else pickle.loads(pickle.dumps(scaler))
    assert other.steps_skipped == 2
    for value in (INF, INF, 1.0, 1.0, 1.0, 1.0, INF):
        overflow(scaler, value)
        overflow(other, value)
        assert other.state_dict() == scaler.state_dict()
