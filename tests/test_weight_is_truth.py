"""A weight that somebody changed between two steps wins over its master, element by element."""

import copy

import pytest
import torch
from helpers import (
    HALF,
    assert_same_bits,
    assert_same_training,
    on_devices,
    random_steps,
    random_tensor,
    scaler_pair,
    torch_twin,
    train,
    upcast,
)
from torch import nn

import mixprec

OPTIONS = {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.01}


class Model(nn.Module):
    def __init__(self, weight):
        super().__init__()
        self.weight = nn.Parameter(weight)


def load_state_dict(model, new):
    model.load_state_dict({"weight": new})


def load_state_dict_assign(model, new):
    model.load_state_dict({"weight": new.float()})


def data_in_place(model, new):
    model.weight.data.copy_(new)


def data_elements(model, new):
    for i in range(0, new.numel(), 7):
        model.weight.data.view(-1)[i] = new.view(-1)[i]


def data_assignment(model, new):
    model.weight.data = new.clone()


def numpy(model, new):
    if new.is_cuda or new.dtype is torch.bfloat16:
        pytest.skip("numpy has neither GPU memory nor bfloat16")
    model.weight.detach().numpy()[:] = new.numpy()


def numpy_bits(model, new):
    if new.is_cuda:
        pytest.skip("numpy has no GPU memory")
    model.weight.detach().view(torch.int16).numpy()[:] = new.view(torch.int16).numpy()


def weight_averaging(model, new):
    with torch.no_grad():
        model.weight.lerp_(new, 0.25)


def averaged_model(model, new):
    average = torch.optim.swa_utils.AveragedModel(model)
    average.module.weight.data.copy_(new)
    model.load_state_dict(average.module.state_dict())


def add_in_place(model, new):
    with torch.no_grad():
        model.weight.add_(new, alpha=0.5)


def foreach(model, new):
    with torch.no_grad():
        torch._foreach_mul_([model.weight], 0.5)


def initialisation(model, new):
    nn.init.constant_(model.weight, 0.3)


def sign_of_zero(model, new):
    model.weight.data.zero_().neg_()


EDITS = [
    load_state_dict,
    load_state_dict_assign,
    data_in_place,
    data_elements,
    data_assignment,
    numpy,
    numpy_bits,
    weight_averaging,
    averaged_model,
    add_in_place,
    foreach,
    initialisation,
    sign_of_zero,
]


def trained(device, dtype, overflows=(False, True, False)):
    """A model, its optimizer and the same on fp32 masters, after some steps, and steps to go."""
    generator = torch.Generator().manual_seed(0)
    model = Model(random_tensor(generator, (33, 7), dtype, device))
    ours = mixprec.SGD(model.parameters(), **OPTIONS)
    twin, scalers = torch_twin(ours), scaler_pair(device)
    steps = random_steps(generator, [model.weight], overflows)
    train(ours, scalers[0], steps)
    train(twin, scalers[1], upcast(steps))
    new = random_tensor(generator, (33, 7), dtype, device)
    return model, ours, twin, scalers, random_steps(generator, [model.weight], overflows), new


@on_devices
@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("edit", EDITS)
def test_edited_weight_wins(device, dtype, edit):
    model, ours, twin, scalers, steps, new = trained(device, dtype)
    before = model.weight.detach().clone()
    edit(model, new)
    (master,) = twin.param_groups[0]["params"]
    changed = model.weight.detach() != before
    assert changed.any()
    exact = torch.where(changed, model.weight.detach().float(), master.detach())
    assert changed.all() or not torch.equal(exact, model.weight.float())  # else both would pass
    master.data.copy_(exact)
    train(ours, scalers[0], steps)
    train(twin, scalers[1], upcast(steps))
    assert_same_training(ours, twin)


@on_devices
@pytest.mark.parametrize("dtype", HALF)
def test_edit_to_the_same_value_keeps_the_master(device, dtype):
    model, ours, twin, scalers, steps, _ = trained(device, dtype)
    assert not torch.equal(ours.state[model.weight]["master"], model.weight.float())
    model.load_state_dict(copy.deepcopy(model.state_dict()))
    model.weight.data = model.weight.data.clone()
    train(ours, scalers[0], steps)
    train(twin, scalers[1], upcast(steps))
    assert_same_training(ours, twin)


@on_devices
@pytest.mark.parametrize("dtype", HALF)
def test_edit_before_a_skipped_step_survives_it(device, dtype):
    model, ours, twin, scalers, steps, new = trained(device, dtype)
    steps.insert(0, [torch.full_like(steps[0][0], torch.inf)])
    model.weight.data.copy_(new)
    twin.param_groups[0]["params"][0].data.copy_(new.float())
    train(ours, scalers[0], steps[:1])
    assert_same_bits(model.weight, new)
    train(ours, scalers[0], steps[1:])
    train(twin, scalers[1], upcast(steps))
    assert_same_training(ours, twin)


@on_devices
@pytest.mark.parametrize("dtype", HALF)
def test_edit_between_half_weights_and_the_first_step(device, dtype):
    torch.manual_seed(0)
    model = mixprec.half_weights(nn.Linear(5, 7), dtype).to(device)
    model.load_state_dict(mixprec.half_weights(nn.Linear(5, 7), dtype).state_dict())
    optimizer = mixprec.SGD(model.parameters(), lr=1.0)
    expected = [param.detach().float() for param in model.parameters()]
    for param in model.parameters():
        param.grad = torch.zeros_like(param)
    optimizer.step()
    for param, value in zip(model.parameters(), expected, strict=True):
        assert_same_bits(optimizer.state[param]["master"], value)
