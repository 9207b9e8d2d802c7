"""Checkpoints of something else: torch's, another dtype, layout, device or model."""

import itertools

import pytest
import torch
from checkpoints import (
    OPTIONS,
    fresh,
    make_params,
    resumed,
    saved,
    state_tensors,
    steps_for,
    through_file,
)
from helpers import (
    DTYPES,
    HALF,
    assert_same_bits,
    assert_same_training,
    on_devices,
    params_of,
    torch_twin,
    train,
    upcast,
)

import mixprec


@on_devices
@pytest.mark.parametrize(
    ("source", "target"), itertools.permutations([mixprec.SGD, torch.optim.SGD])
)
def test_torchs_checkpoints_both_ways(device, source, target):
    first, scaler = fresh(device, (torch.float32,) * 2, source)
    steps = steps_for(params_of(first))
    train(first, scaler, steps[:4])
    second, second_scaler = resumed(
        saved(first, scaler), *fresh(device, (torch.float32,) * 2, target)
    )
    train(first, scaler, steps[4:])
    train(second, second_scaler, steps[4:])
    assert first.state_dict()["state"].keys() == second.state_dict()["state"].keys()
    for optimizer in (first, second):
        assert all(key[1] == "momentum_buffer" for key in state_tensors(optimizer))
    for key, value in state_tensors(first).items():
        assert_same_bits(state_tensors(second)[key], value)
    for param, expected in zip(params_of(second), params_of(first), strict=True):
        assert_same_bits(param, expected)


@on_devices
@pytest.mark.parametrize("momentum_dtype", DTYPES)
@pytest.mark.parametrize("source", DTYPES)
@pytest.mark.parametrize("target", DTYPES)
def test_loads_into_other_dtypes_and_layouts(device, source, target, momentum_dtype):
    optimizer, scaler = fresh(device, (source,))
    train(optimizer, scaler, steps_for(params_of(optimizer))[:3])
    (param,) = make_params(device, (target,))
    param.data = param.data.contiguous(memory_format=torch.channels_last)
    other = mixprec.SGD([param], **OPTIONS)
    state = through_file(optimizer.state_dict())
    state["state"][0]["momentum_buffer"] = state["state"][0]["momentum_buffer"].to(momentum_dtype)
    other.load_state_dict(state)
    twin = torch_twin(other)
    (twin_param,) = params_of(twin)
    momentum = state["state"][0]["momentum_buffer"].float()
    twin.state[twin_param]["momentum_buffer"] = momentum.clone(memory_format=torch.preserve_format)
    if target in HALF and source in HALF:  # the old master where it still rounds to the weight
        master = state["state"][0]["master"]
        same = master.to(target) == param
        twin_param.data.copy_(torch.where(same, master, twin_param))
    steps = steps_for([param], [False, False])
    train(other, mixprec.GradScaler(device, 1000.0), steps)
    train(twin, torch.amp.GradScaler(device, 1000.0), upcast(steps))
    assert_same_training(other, twin)
    for value in other.state[param].values():
        assert value.dtype is torch.float32
        assert value.stride() == param.stride()
    assert ("master" in other.state[param]) is (target in HALF)


@on_devices
def test_checkpoint_of_another_model_is_refused(device):
    optimizer, scaler = fresh(device)
    train(optimizer, scaler, steps_for(params_of(optimizer))[:3])
    before = {key: value.clone() for key, value in state_tensors(optimizer).items()}
    other, _ = fresh(device, DTYPES[:2])
    with pytest.raises(ValueError, match="doesn't match the size"):
        optimizer.load_state_dict(other.state_dict())
    for key, value in before.items():
        assert_same_bits(state_tensors(optimizer)[key], value)
    train(optimizer, scaler, steps_for(params_of(optimizer))[3:])


@on_devices
def test_loads_across_devices(device):
    optimizer, scaler = fresh(device)
    steps = steps_for(params_of(optimizer))
    train(optimizer, scaler, steps[:3])
    state = through_file(optimizer.state_dict())  # state_dict() itself shares dicts, as torch's
    for values in state["state"].values():
        values.update({name: value.cpu() for name, value in values.items()})
    other, _ = fresh(device)
    other.load_state_dict(state)
    for key, value in state_tensors(optimizer).items():
        assert_same_bits(state_tensors(other)[key], value)
        assert state_tensors(other)[key].device == value.device
