"""Remainders as state: checkpoints of either kind, copies of the optimizer, memory layouts."""

import copy
import pickle

import pytest
import torch
from checkpoints import through_file
from helpers import (
    DTYPES,
    HALF,
    assert_same_bits,
    on_devices,
    params_of,
    random_steps,
    random_tensor,
    set_grads,
    torch_twin,
    train,
    upcast,
)
from remainders import assert_same_masters, away_from_zero, make_optimizer, masters, rounded
from torch import nn

import mixprec

pytestmark = pytest.mark.usefixtures("poisoned")
OPTIONS = {"lr": 0.01, "momentum": 0.9, "nesterov": True, "weight_decay": 0.01}


def steps_for(optimizer, overflows=(True, False, False, True, False), seed=1):
    generator = torch.Generator().manual_seed(seed)
    return random_steps(generator, params_of(optimizer), overflows, scale=10.0)


def go_on(optimizer, steps):
    train(optimizer, mixprec.GradScaler(params_of(optimizer)[0].device, 1000.0), steps)


@on_devices
@pytest.mark.parametrize("order", ["model first", "optimizer first"])
@pytest.mark.parametrize("target", [False, True])
@pytest.mark.parametrize("source", [False, True])
def test_checkpoints_of_either_kind(device, source, target, order):
    """Saved, loaded and gone on with: the masters of a run on fp32 masters that never stopped."""
    optimizer = make_optimizer(device, DTYPES, (3, 5, 7, 11), **OPTIONS)
    optimizer.store_param_remainders = source
    twin = torch_twin(optimizer)
    steps = steps_for(optimizer)
    train(twin, torch.amp.GradScaler(device, 1000.0, growth_interval=10**6), upcast(steps * 2))
    scaler = mixprec.GradScaler(device, 1000.0, growth_interval=10**6)
    train(optimizer, scaler, steps)
    state, kept = through_file(optimizer.state_dict()), "master_remainder" if source else "master"
    assert {key for key in state["state"][1] if "master" in key} == {kept}

    other = make_optimizer(device, DTYPES, (3, 5, 7, 11), **OPTIONS)
    other.store_param_remainders = target
    if order == "optimizer first":
        other.load_state_dict(state)
    for param, weight in zip(params_of(other), params_of(optimizer), strict=True):
        param.data.copy_(weight.detach())
    if order == "model first":
        other.load_state_dict(state)
    assert other.store_param_remainders is target
    for i, param in enumerate(params_of(other)[1:], 1):
        assert other.state[param][kept].data_ptr() != state["state"][i][kept].data_ptr()
        assert_same_bits(other.state[param][kept], state["state"][i][kept])
    train(other, scaler, steps)
    other.store_param_remainders = True  # and to remainders once more, to compare
    stop = [torch.full_like(param, torch.inf) for param in params_of(other)]
    train(other, scaler, [stop])
    assert_same_masters(other, twin)


@on_devices
@pytest.mark.parametrize("to_remainder", [False, True])
def test_conversion_half_way_between_two_weights(device, to_remainder):
    """A bf16 weight's two kinds of master round differently there: fp32's next number is taken."""
    value = torch.tensor([1 + 2.0**-8, 1 + 3 * 2.0**-8, -1 - 2.0**-8, 1.0], device=device)
    weight = value.to(torch.bfloat16) if to_remainder else rounded(value, torch.bfloat16)
    param = nn.Parameter(weight.clone())
    param.grad = torch.zeros_like(param)
    optimizer = mixprec.SGD([param], lr=0.1, store_param_remainders=to_remainder)
    if to_remainder:
        optimizer.state[param]["master"] = value
    else:
        remainder = torch.tensor([-(2**15), -(2**15), -(2**15), 0], dtype=torch.int16)
        optimizer.state[param]["master_remainder"] = remainder.to(device)
    optimizer.step()
    master = masters(optimizer)[0] if to_remainder else optimizer.state[param]["master"]
    assert ((master - value).abs() <= 2.0**-23).all()
    assert_same_bits(param, weight)


@on_devices
@pytest.mark.parametrize("dtype", HALF)
def test_master_of_a_weight_that_changed_is_not_taken(device, dtype):
    param = nn.Parameter(torch.full((3,), 2.0, dtype=dtype, device=device))
    param.grad = torch.zeros_like(param)
    optimizer = mixprec.SGD([param], lr=0.1, store_param_remainders=True)
    optimizer.state[param]["master"] = torch.tensor([1.0, 2.0 + 2.0**-20, 5.0], device=device)
    optimizer.step()
    assert masters(optimizer)[0].tolist() == [2.0, 2.0 + 2.0**-20, 2.0]


@on_devices
def test_other_checkpoints(device):
    """torch's holds momentum alone; an fp32 parameter is its own master."""
    torchs = torch_twin(make_optimizer(device, DTYPES, **OPTIONS))
    set_grads(torchs, [torch.ones_like(param) for param in params_of(torchs)])
    torchs.step()
    optimizer = make_optimizer(device, DTYPES, **OPTIONS)
    optimizer.load_state_dict(torchs.state_dict())
    for param, other in zip(params_of(optimizer), params_of(torchs), strict=True):
        assert optimizer.state[param].keys() == {"momentum_buffer"}
        buffer = torchs.state[other]["momentum_buffer"]
        assert_same_bits(optimizer.state[param]["momentum_buffer"], buffer)
    go_on(optimizer, steps_for(optimizer))
    single = make_optimizer(device, [torch.float32] * 3, **OPTIONS)
    single.load_state_dict(optimizer.state_dict())
    for param in params_of(single):
        assert single.state[param].keys() == {"momentum_buffer"}


@on_devices
@pytest.mark.parametrize("copied", [copy.deepcopy, lambda o: pickle.loads(pickle.dumps(o))])
def test_copies_of_optimizer_go_on_alike(device, copied):
    optimizer = make_optimizer(device, DTYPES, **OPTIONS)
    steps = steps_for(optimizer)
    go_on(optimizer, steps)
    optimizer.zero_grad()
    other = copied(optimizer)
    assert other.store_param_remainders is True
    assert "store_param_remainders" not in str(optimizer.state_dict()["param_groups"])
    for each in (optimizer, other):
        go_on(each, steps)
    for param, expected in zip(params_of(other), params_of(optimizer), strict=True):
        assert_same_bits(param, expected)
        assert other.state[param].keys() == optimizer.state[expected].keys()
        for name, value in optimizer.state[expected].items():
            assert_same_bits(other.state[param][name], value)


@on_devices
@pytest.mark.parametrize("dtype", HALF)
def test_first_masters_are_exact(device, dtype):
    """What half_weights kept, full_precision_state_dict reads from weights and remainders."""
    model = nn.Conv2d(5, 7, 3).to(device)
    for param in model.parameters():
        generator = torch.Generator().manual_seed(0)
        param.data = away_from_zero(generator, param.shape, torch.float32, device)
    exact = copy.deepcopy(model.state_dict())
    mixprec.half_weights(model, dtype).to(memory_format=torch.channels_last)
    optimizer = mixprec.SGD(model.parameters(), lr=0.1, store_param_remainders=True)
    for param in model.parameters():
        param.grad = torch.zeros_like(param)
    for _ in range(2):
        optimizer.step()
        full = mixprec.full_precision_state_dict(model, optimizer)
        for name, param in model.named_parameters():
            assert_same_bits(full[name], exact[name])
            assert optimizer.state[param]["master_remainder"].ne(0).any()
            assert optimizer.state[param]["master_remainder"].stride() == param.stride()


LAYOUTS = {
    "contiguous": lambda t: t.contiguous(),
    "channels_last": lambda t: t.contiguous(memory_format=torch.channels_last),
    "transposed": lambda t: t.permute(3, 1, 0, 2).contiguous().permute(2, 1, 3, 0),
}


@on_devices
@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("kept", ["master", "master_remainder"])
@pytest.mark.parametrize("before", LAYOUTS)
@pytest.mark.parametrize("after", LAYOUTS)
def test_layout_of_parameter_changed_later(device, dtype, kept, before, after):
    ours = make_optimizer(device, [dtype], (6, 5, 3, 4), **OPTIONS)
    twin = torch_twin(ours)
    steps = steps_for(ours)
    for optimizer, grads in ((ours, steps), (twin, upcast(steps))):
        optimizer.store_param_remainders = kept == "master_remainder"
        (param,) = params_of(optimizer)
        for layout in (before, after):
            param.data = LAYOUTS[layout](param.data)
            go_on(optimizer, grads)
            optimizer.store_param_remainders = True
    assert_same_masters(ours, twin)
    (param,) = params_of(ours)
    assert param.stride() == ours.state[param]["master_remainder"].stride()


@on_devices
@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("offset", range(8))
def test_every_start_offset_within_16_bytes(device, dtype, offset):
    generator = torch.Generator().manual_seed(offset)
    for size in (1, 3, 8195):
        param = nn.Parameter(away_from_zero(generator, (size,), dtype, device))
        param.grad = random_tensor(generator, (size,), dtype, device)
        optimizer = mixprec.SGD([param], **OPTIONS, store_param_remainders=True)
        twin = torch_twin(optimizer)
        params_of(twin)[0].grad = param.grad.float()
        memory = torch.full((size + 16,), 77, dtype=torch.int16, device=device)
        memory[offset : offset + size] = 0
        optimizer.state[param]["master_remainder"] = memory[offset : offset + size]
        optimizer.step()
        twin.step()
        assert_same_masters(optimizer, twin)
        assert memory[:offset].eq(77).all()  # written in place, and nothing around it
        assert memory[offset + size :].eq(77).all()


@on_devices
def test_versions_of_written_tensors(device):
    optimizer = make_optimizer(device, HALF, **OPTIONS)
    steps = steps_for(optimizer)
    go_on(optimizer, steps)
    tensors = [optimizer.state[param]["master_remainder"] for param in params_of(optimizer)]
    before = [tensor._version for tensor in tensors]
    go_on(optimizer, steps)
    assert all(t._version > v for t, v in zip(tensors, before, strict=True))


@on_devices
@pytest.mark.parametrize("kept", ["master", "master_remainder"])
@pytest.mark.parametrize("remainders", [False, True])
def test_state_of_another_shape(device, kept, remainders):
    optimizer = make_optimizer(device, DTYPES, (4, 3), lr=0.1)
    optimizer.store_param_remainders = remainders
    set_grads(optimizer, [torch.ones_like(param) for param in params_of(optimizer)])
    before = [param.detach().clone() for param in params_of(optimizer)]
    optimizer.state[params_of(optimizer)[1]][kept] = torch.ones(5, device=device)
    with pytest.raises(RuntimeError, match=rf"{kept} of parameter 1 of group 0 has shape \[5\]"):
        optimizer.step()
    for param, expected in zip(params_of(optimizer), before, strict=True):
        assert_same_bits(param, expected)
