"""Case by case, torch's scaler and SGD and ours: the same results, states and errors.

docs/compatibility.md has a row for each case: its docstring.
"""

import copy
import inspect
import pickle
import re
import warnings
from pathlib import Path

import pytest
import torch
from helpers import on_devices
from torch import nn

import mixprec

PAGE = Path(__file__).parents[1] / "docs" / "compatibility.md"
INF = float("inf")


class Torch:
    """What a case is made of. foreach=False is the rule that ours equals to the bit."""

    def __init__(self, device):
        self.device = device

    def scaler(self, **options):
        return torch.amp.GradScaler(self.device, **{"init_scale": 8.0, **options})

    def sgd(self, params, **options):
        return torch.optim.SGD(params, **{"foreach": False, "lr": 0.1, **options})

    def params(self, count=2):
        values = torch.arange(1.0, 4.0, device=self.device)
        return [nn.Parameter(values * (i + 1)) for i in range(count)]

    def ready(self, count=2, **options):
        """A scaler, parameters, and an optimizer of these with `options`."""
        params = self.params(count)
        return self.scaler(), params, self.sgd(params, **options)

    def iteration(self, scaler, optimizer, gradient=1.0, update=True):
        """Gradients are `gradient` times the weights."""
        optimizer.zero_grad()
        params = [param for group in optimizer.param_groups for param in group["params"]]
        loss = sum(p.square().sum() / 2 for p in params if p.requires_grad) * gradient
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        if update:
            scaler.update()


class Ours(Torch):
    def scaler(self, **options):
        return mixprec.GradScaler(self.device, **{"init_scale": 8.0, **options})

    def sgd(self, params, **options):
        return mixprec.SGD(params, **{"foreach": False, "lr": 0.1, **options})


def error(call):
    try:
        return "no error", call()
    except Exception as caught:
        return type(caught), str(caught)


def stepped(lib, scaler=None, steps=(1.0, INF, 1.0, 0.5), **options):
    """Weights and states after some iterations, of which one overflows."""
    params = lib.params()
    scaler = scaler or lib.scaler(growth_interval=2)
    optimizer = lib.sgd(params, **{"momentum": 0.9, **options})
    for gradient in steps:
        lib.iteration(scaler, optimizer, gradient)
    return params, optimizer, scaler


def outcome(params, optimizer, scaler):
    return params, optimizer.state_dict(), torchs_part(scaler)


def finished(params, optimizer, scaler):
    """The iteration whose gradients are there."""
    scaler.step(optimizer)
    scaler.update()
    return outcome(params, optimizer, scaler)


def torchs_part(scaler):
    ours_alone = {"min_scale", "max_scale", "hysteresis", "_history"}
    return {key: value for key, value in scaler.state_dict().items() if key not in ours_alone}


CASES = {}


def case(function):
    CASES[function.__name__] = function
    return function


# The scaler.


@case
def disabled(lib):
    """`enabled=False`: `scale` returns what it got, `step` steps, the rest does nothing"""
    scaler, params = lib.scaler(enabled=False), lib.params()
    optimizer = lib.sgd(params)
    loss = params[0].sum()
    same = scaler.scale(loss) is loss
    loss.backward()
    scaler.unscale_(optimizer)
    scaler.step(optimizer)
    scaler.update()
    scaler.load_state_dict({})
    return params, same, scaler.state_dict(), scaler.get_scale(), scaler.is_enabled()


@case
def constructor_errors(lib):
    """growth factor of at most 1, backoff factor of at least 1"""
    return error(lambda: lib.scaler(growth_factor=1.0)), error(
        lambda: lib.scaler(backoff_factor=1.0)
    )


@case
def getters_and_setters(lib):
    """`get_` and `set_growth_factor`, `backoff_factor`, `growth_interval`; `get_scale`"""
    scaler = lib.scaler()
    scaler.set_growth_factor(3.0)
    scaler.set_backoff_factor(0.25)
    scaler.set_growth_interval(1)
    got = scaler.get_growth_factor(), scaler.get_backoff_factor(), scaler.get_growth_interval()
    before = scaler.get_scale()
    return got, before, outcome(*stepped(lib, scaler))


@case
def growth_and_backoff(lib):
    """the scale and its counter over good steps and overflows"""
    scaler, scales = lib.scaler(growth_interval=2), []
    optimizer = lib.sgd(lib.params())
    for gradient in (1.0, 1.0, INF, INF, 1.0, INF, 1.0, 1.0, 1.0):
        lib.iteration(scaler, optimizer, gradient)
        scales.append((scaler.get_scale(), scaler._get_growth_tracker()))
    return scales


@case
def scale_of_containers(lib):
    """`scale` of a tensor, list, tuple, generator, nested; of something else: the error"""
    scaler, one = lib.scaler(), torch.ones((), device=lib.device)
    made = scaler.scale([one, (one * 2, [one * 3])]), scaler.scale((one,))
    generated = list(scaler.scale(one * i for i in range(3)))
    return made, generated, error(lambda: scaler.scale([1.0])), error(lambda: scaler.scale(1.0))


@case
def before_the_first_scale(lib):
    """`step`, `unscale_` and `update` before `scale`: the errors"""
    scaler, params, optimizer = lib.ready()
    params[0].grad = torch.ones_like(params[0])
    return [
        error(lambda: scaler.step(optimizer)),
        error(lambda: scaler.unscale_(optimizer)),
        error(scaler.update),
    ]


@case
def unscale_twice(lib):
    """`unscale_` twice, and after `step`: the errors"""
    scaler, params, optimizer = lib.ready()
    scaler.scale(params[0].sum()).backward()
    scaler.unscale_(optimizer)
    twice = error(lambda: scaler.unscale_(optimizer))
    gradient = params[0].grad.clone()
    scaler.step(optimizer)
    return twice, error(lambda: scaler.unscale_(optimizer)), gradient, params


@case
def step_twice(lib):
    """`step` twice without `update`: the error; weights of one step"""
    scaler, params, optimizer = lib.ready()
    lib.iteration(scaler, optimizer, update=False)
    return error(lambda: scaler.step(optimizer)), params


@case
def update_without_step(lib):
    """`update` after no check: the error; the scale stays"""
    scaler, params = lib.scaler(), lib.params()
    scaler.scale(params[0].sum()).backward()
    return error(scaler.update), scaler.get_scale()


@case
def step_after_update_without_scale(lib):
    """`step` on gradients that were not scaled anew: they are divided by the new scale"""
    params, optimizer, scaler = stepped(lib)
    for param in params:
        param.grad = torch.ones_like(param)
    return finished(params, optimizer, scaler)


@case
def update_with_a_new_scale(lib):
    """`update(new_scale)`: a float, a tensor, and the errors for other tensors and types"""
    scaler = lib.scaler()
    scaler.scale(torch.ones((), device=lib.device))
    scales = []
    for new in (32.0, torch.full((), 4.0, device=lib.device), torch.tensor(2).to(lib.device)):
        scaler.update(new)
        scales.append(scaler.get_scale())
    two, one = torch.ones(2, device=lib.device), torch.ones((), device=lib.device)
    bad = two, one[None], one.clone().requires_grad_(), one.to("meta"), 3, "text"
    return scales, [error(lambda b=b: scaler.update(b)) for b in bad]


@case
def several_optimizers(lib):
    """one scaler, two optimizers, one overflows: the other steps, the scale backs off once"""
    scaler, params = lib.scaler(), lib.params()
    first, second = lib.sgd(params[:1]), lib.sgd(params[1:])
    scaler.scale(params[0].sum() * INF + params[1].sum()).backward()
    scaler.step(first)
    scaler.step(second)
    scaler.update()
    return params, torchs_part(scaler)


@case
def several_losses(lib):
    """two losses with `retain_graph`, scaled apart, added up in the gradients"""
    scaler, params, optimizer = lib.ready()
    hidden = params[0] * params[1]
    scaler.scale(hidden.sum()).backward(retain_graph=True)
    scaler.scale(hidden.square().sum()).backward()
    return finished(params, optimizer, scaler)


@case
def accumulation(lib):
    """gradients added up over several backward passes before a step"""
    scaler, params, optimizer = lib.ready(momentum=0.9)
    for _ in range(2):
        for i in range(3):
            scaler.scale(params[0].sum() * i + params[1].square().sum()).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    return outcome(params, optimizer, scaler)


@case
def clipping_in_torchs_way(lib):
    """`unscale_`, then `torch.nn.utils.clip_grad_norm_`"""
    scaler, params, optimizer = lib.ready(momentum=0.9)
    scaler.scale(params[0].sum() * 5).backward()
    scaler.unscale_(optimizer)
    norm = nn.utils.clip_grad_norm_(params, 1.0)
    return norm, finished(params, optimizer, scaler)


@case
def gradient_penalty(lib):
    """`autograd.grad` of a scaled loss, unscaled by hand, in a second loss"""
    scaler, params, optimizer = lib.ready()
    loss = params[0].pow(3).sum()
    (scaled,) = torch.autograd.grad(scaler.scale(loss), params[0], create_graph=True)
    gradient = scaled * (1.0 / scaler.get_scale())
    scaler.scale(loss + gradient.square().sum().sqrt()).backward()
    return finished(params, optimizer, scaler)


@case
def optimizer_without_gradients(lib):
    """no parameter has a gradient: the error of `step`"""
    scaler = lib.scaler()
    scaler.scale(torch.ones((), device=lib.device))
    return error(lambda: scaler.step(lib.sgd(lib.params())))


@case
def parameter_frozen_midway(lib):
    """`requires_grad_(False)` between steps: its momentum waits"""
    params, optimizer, scaler = stepped(lib)
    params[0].requires_grad_(False)
    for _ in range(2):
        lib.iteration(scaler, optimizer)
    params[0].requires_grad_(True)
    lib.iteration(scaler, optimizer)
    return outcome(params, optimizer, scaler)


@case
def closure_under_the_scaler(lib):
    """`scaler.step(optimizer, closure=...)`: refused"""
    scaler = lib.scaler()
    scaler.scale(torch.ones((), device=lib.device))
    return error(lambda: scaler.step(lib.sgd(lib.params()), closure=lambda: 0.0))


@case
def scaler_pickled_and_copied(lib):
    """pickle and `deepcopy` between iterations; the error within one"""
    params, optimizer, scaler = stepped(lib)
    copies = pickle.loads(pickle.dumps(scaler)), copy.deepcopy(scaler)
    results = [torchs_part(copied) for copied in copies]
    lib.iteration(copies[0], optimizer)
    lib.iteration(scaler, optimizer, update=False)
    return results, params, torchs_part(copies[0]), error(lambda: pickle.dumps(scaler))


@case
def scaler_state_dict(lib):
    """`state_dict`, `load_state_dict` before and after the first `scale`; an empty one"""
    state = stepped(lib)[2].state_dict()
    fresh, running = lib.scaler(), stepped(lib, steps=(1.0,))[2]
    results = []
    for scaler in (fresh, running):
        scaler.load_state_dict(state)
        results.append(outcome(*stepped(lib, scaler)))
    return (
        results,
        error(lambda: fresh.load_state_dict({})),
        error(lambda: fresh.load_state_dict({"scale": 1.0})),
    )


# The optimizer.


@case
def optimizer_constructor_errors(lib):
    """negative or mismatched hyperparameters, empty lists, non-leaf and non-tensor parameters"""
    params = lib.params()
    bad = [
        {"lr": -1.0}, {"momentum": -0.1}, {"weight_decay": -0.1}, {"nesterov": True},
        {"nesterov": True, "momentum": 0.9, "dampening": 0.1}, {"lr": torch.ones(2)},
        {"foreach": True, "fused": True}, {"capturable": True}, {"unknown": 1},
    ]  # fmt: skip
    lists = [], params[0], [params[0] * 2], [3], [{"params": params}, {"params": params[:1]}]
    results = [error(lambda o=o: lib.sgd(params, **o)) for o in bad]
    return [
        # TypeErrors name the class's own __init__.
        (kind, re.sub(r"^\w*\.?__init__", "__init__", message))
        for kind, message in [*results, *(error(lambda p=p: lib.sgd(p)) for p in lists)]
    ]


@case
def defaults_and_groups(lib):
    """`defaults`, the keys and values of `param_groups`, `repr`; named parameters"""
    named = [(f"p{i}", param) for i, param in enumerate(lib.params())]
    optimizer = lib.sgd(named, momentum=0.9)
    group = {key: value for key, value in optimizer.param_groups[0].items() if key != "params"}
    return optimizer.defaults, group, repr(optimizer)


HYPERPARAMETERS = {
    "plain": {},
    "momentum": {"momentum": 0.9},
    "dampening": {"momentum": 0.9, "dampening": 0.3},
    "nesterov": {"momentum": 0.9, "nesterov": True},
    "weight decay": {"weight_decay": 0.01},
    "maximize": {"momentum": 0.9, "maximize": True},
    "all": {"momentum": 0.9, "nesterov": True, "weight_decay": 0.01, "maximize": True},
}


@case
def hyperparameters(lib):
    """momentum, dampening, nesterov, weight decay, maximize: weights and states"""
    return {
        name: outcome(*stepped(lib, **{"momentum": 0, **options}))
        for name, options in HYPERPARAMETERS.items()
    }


@case
def tensor_learning_rate(lib):
    """`lr` as a tensor, changed in place"""
    lr = torch.tensor(0.1)
    params, optimizer, scaler = stepped(lib, lr=lr)
    lr.mul_(0.5)
    lib.iteration(scaler, optimizer)
    return outcome(params, optimizer, scaler)


@case
def groups_of_their_own(lib):
    """per-group hyperparameters, `add_param_group` on the way; a parameter twice: the error"""
    params = lib.params(3)
    optimizer = lib.sgd(
        [{"params": params[:1], "lr": 0.5}, {"params": params[1:2], "momentum": 0.5}]
    )
    scaler = lib.scaler()
    lib.iteration(scaler, optimizer)
    optimizer.add_param_group({"params": params[2], "weight_decay": 0.1, "momentum": 0.9})
    for gradient in (1.0, INF, 1.0):
        lib.iteration(scaler, optimizer, gradient)
    twice = error(lambda: optimizer.add_param_group({"params": params[0]}))
    return twice, outcome(params, optimizer, scaler)


@case
def changed_hyperparameters(lib):
    """a group's values changed between steps, momentum off and on again"""
    params, optimizer, scaler = stepped(lib)
    for change in ({"lr": 0.5}, {"momentum": 0.0}, {"momentum": 0.5, "weight_decay": 0.1}):
        optimizer.param_groups[0].update(change)
        lib.iteration(scaler, optimizer)
    return outcome(params, optimizer, scaler)


@case
def some_without_gradients(lib):
    """parameters without a gradient keep value and state"""
    scaler, params, optimizer = lib.ready(3, momentum=0.9, weight_decay=0.1)
    for i in (0, 2, 1, 0):
        optimizer.zero_grad()
        scaler.scale(params[i].square().sum()).backward()
        scaler.step(optimizer)
        scaler.update()
    return outcome(params, optimizer, scaler)


@case
def without_a_scaler(lib):
    """`optimizer.step()` alone, with a closure, and on inf gradients"""
    params = lib.params()
    optimizer = lib.sgd(params, momentum=0.9)

    def closure():
        optimizer.zero_grad()
        loss = params[0].square().sum() + params[1].sum()
        loss.backward()
        return loss.item()

    losses = [optimizer.step(closure) for _ in range(3)]
    params[0].grad = torch.full_like(params[0], INF)
    nothing = optimizer.step()
    return losses, nothing, params, optimizer.state_dict()


@case
def zero_grad(lib):
    """`zero_grad` with `set_to_none` true and false"""
    params, optimizer, _ = stepped(lib)
    optimizer.zero_grad(set_to_none=False)
    zeros = [param.grad.clone() for param in params]
    optimizer.zero_grad()
    return zeros, [param.grad for param in params]


@case
def hooks(lib):
    """hooks before and after `step`, `state_dict` and `load_state_dict`; how often and with what"""
    params, seen = lib.params(), []
    optimizer = lib.sgd(params, momentum=0.9)
    optimizer.register_step_pre_hook(
        lambda o, args, kwargs: seen.append(("pre", len(args), kwargs))
    )
    optimizer.register_step_post_hook(
        lambda o, args, kwargs: seen.append(("post", len(args), kwargs))
    )
    optimizer.register_state_dict_pre_hook(lambda o: seen.append("state"))
    optimizer.register_state_dict_post_hook(lambda o, state: {**state, "extra": 1})
    optimizer.register_load_state_dict_pre_hook(lambda o, state: seen.append("load"))
    optimizer.register_load_state_dict_post_hook(lambda o: seen.append("loaded"))
    lib.iteration(lib.scaler(), optimizer)
    state = optimizer.state_dict()
    optimizer.load_state_dict(state)
    return seen, state


@case
def optimizer_pickled_and_copied(lib):
    """pickle and `deepcopy`, with their states"""
    _, optimizer, _ = stepped(lib)
    copies = pickle.loads(pickle.dumps(optimizer)), copy.deepcopy(optimizer)
    return [(copied.param_groups, copied.state_dict()) for copied in copies]


@case
def optimizer_state_dict(lib):
    """`state_dict` saved and loaded; other groups: the error"""
    params, optimizer, scaler = stepped(lib)
    state = copy.deepcopy(optimizer.state_dict())
    other = lib.sgd(params)
    other.load_state_dict(copy.deepcopy(state))
    lib.iteration(scaler, other)
    fewer = lib.sgd(params[:1])
    two = lib.sgd([{"params": params[:1]}, {"params": params[1:]}])
    errors = [error(lambda o=o: o.load_state_dict(state)) for o in (fewer, two)]
    return state, errors, outcome(params, other, scaler)


@case
def schedulers(lib):
    """OneCycle, cosine and step schedules, momentum cycled; no warning about the order of calls"""
    results = []
    for make in (
        lambda o: torch.optim.lr_scheduler.OneCycleLR(o, 0.5, total_steps=10),
        lambda o: torch.optim.lr_scheduler.CosineAnnealingLR(o, 5),
        lambda o: torch.optim.lr_scheduler.StepLR(o, 2, 0.1),
    ):
        params, scaler = lib.params(), lib.scaler()
        optimizer = lib.sgd(params, momentum=0.9)
        schedule = make(optimizer)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for _ in range(6):
                lib.iteration(scaler, optimizer)
                schedule.step()
        results.append((params, optimizer.state_dict(), [str(w.message) for w in caught]))
    return results


@case
def gradient_of_another_kind(lib):
    """a gradient of another shape, dtype or device: torch refuses the assignment itself"""
    param = lib.params()[0]

    def assign(gradient):
        param.grad = gradient

    one = torch.ones(3, device=lib.device)
    return [error(lambda b=b: assign(b)) for b in (one[:2], one.to(torch.int64), one.to("meta"), 3)]


def assert_equal(actual, expected, where=""):
    assert type(actual) is type(expected), where
    if isinstance(expected, torch.Tensor):
        assert actual.dtype == expected.dtype and actual.device == expected.device, where
        same = actual.detach().view(torch.uint8 if actual.dim() else actual.dtype)
        assert torch.equal(same, expected.detach().view(same.dtype)), where
    elif isinstance(expected, dict):
        assert list(actual) == list(expected), where
        for key in expected:
            assert_equal(actual[key], expected[key], f"{where}[{key!r}]")
    elif isinstance(expected, (list, tuple)):
        assert len(actual) == len(expected), where
        for i, pair in enumerate(zip(actual, expected, strict=True)):
            assert_equal(*pair, f"{where}[{i}]")
    else:
        assert actual == expected, where


@on_devices
@pytest.mark.parametrize("name", CASES)
def test_same_as_torch(device, name):
    assert_equal(CASES[name](Ours(device)), CASES[name](Torch(device)))


@on_devices
def test_no_false_warning_when_the_first_step_is_skipped(device):
    """torch's scaler does not call `optimizer.step()` then, and its scheduler misses that call."""
    for lib, warned in ((Torch(device), True), (Ours(device), False)):
        optimizer, scaler = lib.sgd(lib.params()), lib.scaler()
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            lib.iteration(scaler, optimizer, INF)
            schedule.step()
        assert any("before `optimizer.step()`" in str(w.message) for w in caught) == warned


def test_page_has_every_case():
    page = PAGE.read_text()
    for name, function in CASES.items():
        row = (
            f"| {inspect.getdoc(function)} | `test_compatibility.py::test_same_as_torch[{name}]` |"
        )
        assert row in page, row
