"""mixprec.SGD in the places of torch.optim.SGD: groups, closures, hooks, changed settings."""

import copy
import pickle

import pytest
import torch
from helpers import (
    DTYPES,
    assert_same_bits,
    assert_same_training,
    on_devices,
    params_of,
    random_steps,
    random_tensor,
    scaler_pair,
    torch_twin,
    train,
    upcast,
)
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

import mixprec

pytestmark = pytest.mark.usefixtures("poisoned")


def make_params(device, count=3, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [
        torch.nn.Parameter(random_tensor(generator, (4099,), DTYPES[i % 3], device))
        for i in range(count)
    ]


def both(device, ours, overflows=(False, False, False), change=lambda optimizer: None, seed=1):
    """The same steps with torch's on fp32 masters, `change` between, compared."""
    twin = torch_twin(ours)
    generator = torch.Generator().manual_seed(seed)
    first = random_steps(generator, params_of(ours), overflows)
    scalers = scaler_pair(device)
    train(ours, scalers[0], first)
    train(twin, scalers[1], upcast(first))
    change(ours)
    change(twin)
    then = random_steps(generator, params_of(ours), overflows)
    train(ours, scalers[0], then)
    train(twin, scalers[1], upcast(then))
    assert_same_training(ours, twin)


def set_option(**options):
    return lambda optimizer: [group.update(options) for group in optimizer.param_groups]


@on_devices
def test_groups_with_their_own_hyperparameters(device):
    params = make_params(device, 8)
    groups = [
        {"params": params[:3], "lr": 0.3, "momentum": 0.8, "nesterov": True},
        {"params": params[3:5], "weight_decay": 0.1},
        {"params": params[5:6], "maximize": True, "momentum": 0.7, "dampening": 0.2},
        {"params": []},
        {"params": params[6:], "momentum": 0.0},
    ]
    ours = mixprec.SGD(groups, lr=0.05, momentum=0.9)
    both(device, ours, (True, False, False))
    assert not ours.state.get(params[6])  # fp32 without momentum has none


@on_devices
def test_add_param_group(device):
    def add(optimizer):
        params = make_params(device, seed=7)
        if type(optimizer) is torch.optim.SGD:
            params = [torch.nn.Parameter(param.detach().float()) for param in params]
        optimizer.add_param_group({"params": params, "lr": 0.7, "momentum": 0.5})

    both(device, mixprec.SGD(make_params(device), lr=0.1, momentum=0.9), change=add)


CHANGES = {
    "momentum on": ({"momentum": 0.0}, {"momentum": 0.9}),
    "momentum off": ({"momentum": 0.9}, {"momentum": 0.0}),
    "momentum on, dampened": ({"momentum": 0.0, "dampening": 0.3}, {"momentum": 0.9}),
    "weight decay on": ({"momentum": 0.9}, {"weight_decay": 0.1}),
    "learning rate": ({"momentum": 0.9}, {"lr": 0.003}),
    "maximize": ({"momentum": 0.9}, {"maximize": True}),
    "nesterov": ({"momentum": 0.9}, {"nesterov": True}),
}


@on_devices
@pytest.mark.parametrize("name", CHANGES)
def test_hyperparameters_changed_on_the_way(device, name):
    before, after = CHANGES[name]
    ours = mixprec.SGD(make_params(device), lr=0.1, **before)
    both(device, ours, (True, False), set_option(**after))


@on_devices
def test_learning_rate_as_a_tensor(device):
    results = []
    for lr in (torch.tensor(0.1, device=device), torch.tensor(0.1).item()):
        ours = mixprec.SGD(make_params(device), lr=lr, momentum=0.9)
        both(device, ours)
        results.append(params_of(ours))
    for with_tensor, with_float in zip(*results, strict=True):
        assert_same_bits(with_tensor, with_float)


@on_devices
def test_parameters_without_gradient(device):
    ours = mixprec.SGD(make_params(device, 4), lr=0.1, momentum=0.9, dampening=0.5)
    twin = torch_twin(ours)
    steps = random_steps(torch.Generator().manual_seed(1), params_of(ours), [False] * 5)
    for i, missing in enumerate([(0, 1, 3), (1,), (), (2, 3), (0, 1, 2)]):
        for j in missing:
            steps[i][j] = None
    for optimizer, scaler, grads in zip(
        (ours, twin), scaler_pair(device), (steps, upcast(steps)), strict=True
    ):
        train(optimizer, scaler, grads[:1])
        assert len(optimizer.state_dict()["state"]) == 1
        train(optimizer, scaler, grads[1:])
    assert_same_training(ours, twin)


@on_devices
def test_closure(device):
    param = torch.nn.Parameter(torch.ones(3, device=device))
    optimizer = mixprec.SGD([param], lr=0.5)

    def closure():
        optimizer.zero_grad()
        loss = param.square().sum()
        loss.backward()
        return loss

    assert optimizer.step(closure).item() == 3
    assert param.detach().eq(0).all()
    assert mixprec.GradScaler(device, enabled=False).step(optimizer, closure).item() == 0


@on_devices
def test_hooks_and_no_parameters(device):
    param = torch.nn.Parameter(torch.ones(3, device=device))
    optimizer, calls = mixprec.SGD([param], lr=0.5), []
    optimizer.register_step_pre_hook(lambda *_: calls.append(param.detach().sum().item()))
    optimizer.register_step_post_hook(lambda *_: calls.append(param.detach().sum().item()))
    param.grad = torch.ones_like(param)
    optimizer.step()
    assert calls == [3.0, 1.5]
    optimizer.zero_grad()
    assert optimizer.step() is None
    assert optimizer.state_dict()["state"] == {}
    assert len(calls) == 4


def test_hooks_on_all_optimizers_and_the_profilers_label():
    optimizer, calls = mixprec.SGD([torch.nn.Parameter(torch.ones(3))], lr=0.5), []
    optimizer.step()  # the wrapper is there before the hooks
    hooks = [
        register(lambda called, *_: calls.append(called))
        for register in (register_optimizer_step_pre_hook, register_optimizer_step_post_hook)
    ]
    optimizer.step()
    for hook in hooks:
        hook.remove()
    optimizer.step()
    assert calls == [optimizer, optimizer]
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        optimizer.step()
    assert "Optimizer.step#SGD.step" in {event.name for event in profile.events()}


@on_devices
@pytest.mark.parametrize("copied", [copy.deepcopy, lambda o: pickle.loads(pickle.dumps(o))])
def test_copies_of_optimizer_go_on_alike(device, copied):
    optimizer = mixprec.SGD(make_params(device), lr=0.1, momentum=0.9, nesterov=True)
    steps = random_steps(torch.Generator().manual_seed(1), params_of(optimizer), [False] * 4)
    scaler = mixprec.GradScaler(device)
    train(optimizer, scaler, steps[:2])
    for param in params_of(optimizer):
        param.grad = None
    other = copied(optimizer)
    for each in (optimizer, other):
        train(each, mixprec.GradScaler(device), steps[2:])
    for param, expected in zip(params_of(other), params_of(optimizer), strict=True):
        assert param is not expected
        assert_same_bits(param, expected)
        for name, value in optimizer.state[expected].items():
            assert_same_bits(other.state[param][name], value)


@on_devices
@pytest.mark.parametrize("flags", [{"foreach": True}, {"fused": True}, {"foreach": False}])
def test_torchs_choices_change_nothing(device, flags):
    results = []
    for options in ({}, flags):
        optimizer = mixprec.SGD(make_params(device), lr=0.1, momentum=0.9, **options)
        steps = random_steps(torch.Generator().manual_seed(1), params_of(optimizer), [False] * 2)
        train(optimizer, mixprec.GradScaler(device), steps)
        results.append(params_of(optimizer))
    for param, expected in zip(*results, strict=True):
        assert_same_bits(param, expected)
