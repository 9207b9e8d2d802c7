"""Saving and loading: the same bits as without, nothing shared, torch's files both ways."""

import pytest
import torch
from checkpoints import fresh, resumed, saved, state_tensors, steps_for
from helpers import (
    DTYPES,
    assert_same_bits,
    assert_same_training,
    bits,
    on_devices,
    params_of,
    torch_twin,
    train,
    upcast,
)

pytestmark = pytest.mark.usefixtures("poisoned")


@on_devices
@pytest.mark.parametrize("every", [1, 3])
def test_reloading_on_the_way_changes_no_bit(device, every):
    optimizer, scaler = fresh(device)
    other, other_scaler = fresh(device)
    steps = steps_for(params_of(optimizer))
    for i, grads in enumerate(steps):
        train(optimizer, scaler, [grads])
        train(other, other_scaler, [grads])
        if i % every == 0:
            checkpoint = saved(other, other_scaler)
            other, other_scaler = resumed(checkpoint, *fresh(device))
            assert state_tensors(other).keys() == state_tensors(optimizer).keys()
            for key, value in state_tensors(optimizer).items():
                assert_same_bits(state_tensors(other)[key], value, key)
    for param, expected in zip(params_of(other), params_of(optimizer), strict=True):
        assert_same_bits(param, expected)
    assert other_scaler.state_dict() == scaler.state_dict()
    if every == 1:  # weights and optimizer hold all: masters are worth saving
        bare, bare_scaler = fresh(device)
        for param, weight in zip(params_of(bare), saved(optimizer, scaler)[0], strict=True):
            param.data.copy_(weight)
        train(bare, bare_scaler, steps[1:2])
        train(other, other_scaler, steps[1:2])
        assert not torch.equal(params_of(bare)[1], params_of(other)[1])


@on_devices
def test_checkpoint_is_not_shared(device):
    optimizer, scaler = fresh(device)
    steps = steps_for(params_of(optimizer))
    train(optimizer, scaler, steps[:4])
    state = optimizer.state_dict()
    copies = {key: bits(value).clone() for key, value in state_tensors(optimizer).items()}
    other, other_scaler = fresh(device)
    other.load_state_dict(state)
    train(other, other_scaler, steps[4:])
    for key, value in copies.items():
        assert torch.equal(bits(state["state"][key[0]][key[1]]), value), key
        ours = state_tensors(optimizer)[key]
        assert state_tensors(other)[key].data_ptr() != ours.data_ptr()


@on_devices
def test_unwritten_momentum_is_not_saved(device):
    optimizer, scaler = fresh(device)
    steps = steps_for(params_of(optimizer))
    train(optimizer, scaler, steps[:1])
    for i in range(len(DTYPES)):
        assert "momentum_buffer" not in optimizer.state_dict()["state"].get(i, {})
    assert optimizer.state[params_of(optimizer)[0]]["momentum_buffer"].isnan().all()  # still there
    other, other_scaler = resumed(saved(optimizer, scaler), *fresh(device))
    for each, each_scaler in ((optimizer, scaler), (other, other_scaler)):
        train(each, each_scaler, steps[1:3])
    for key, value in state_tensors(optimizer).items():
        assert value.isfinite().all()
        assert_same_bits(state_tensors(other)[key], value)


@on_devices
def test_hooks_of_state_dict(device):
    optimizer, scaler = fresh(device)
    train(optimizer, scaler, steps_for(params_of(optimizer))[:3])
    optimizer.register_state_dict_pre_hook(lambda o: calls.append("pre"))
    optimizer.register_state_dict_post_hook(lambda o, state: {**state, "extra": 1})
    calls = []
    state = optimizer.state_dict()
    assert calls == ["pre"]
    assert state["extra"] == 1
    other, _ = fresh(device)

    def double_masters(_, state):
        doubled = {
            key: {name: value * (2 if name == "master" else 1) for name, value in values.items()}
            for key, values in state["state"].items()
        }
        return {**state, "state": doubled}

    other.register_load_state_dict_pre_hook(double_masters)
    other.register_load_state_dict_post_hook(lambda o: calls.append(len(o.state)))
    other.load_state_dict(state)
    assert calls == ["pre", 3]
    masters = [o.state[params_of(o)[1]]["master"] for o in (optimizer, other)]
    assert_same_bits(masters[1], masters[0] * 2)


@on_devices
def test_twin_after_reload(device):
    """Not only equal to itself: torch's on fp32 masters, with a reload in the middle."""
    optimizer, scaler = fresh(device)
    twin, twin_scaler = torch_twin(optimizer), torch.amp.GradScaler(device, 1000.0)
    steps = steps_for(params_of(optimizer))
    train(twin, twin_scaler, upcast(steps))
    train(optimizer, scaler, steps[:5])
    optimizer, scaler = resumed(saved(optimizer, scaler), *fresh(device))
    train(optimizer, scaler, steps[5:])
    assert_same_training(optimizer, twin)
