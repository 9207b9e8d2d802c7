"""What mixprec.graphed watches: everything a graph reads is found, and every change of it shows."""

import functools
import importlib
import types

import pytest
import torch
from torch import nn

import mixprec
from mixprec import _C
from mixprec._found import Found

graphed_module = importlib.import_module("mixprec.graphed")  # the name is the decorator's

factor = 0.5
table = torch.ones(3)
net = nn.Linear(3, 3)


def through_globals(x):
    return helper(x) * factor + table


def helper(x):
    return net(x)


class Trainer:
    def __init__(self):
        self.model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Dropout())
        self.optimizer = mixprec.SGD(self.model.parameters(), lr=0.1, momentum=0.9)
        self.scaler = mixprec.GradScaler("cpu")
        self.parts = {"extra": [nn.Linear(1, 1)]}
        self.step(torch.randn(5, 3))

    def step(self, x):
        self.optimizer.zero_grad()
        self.scaler.scale(self.model(x).sum()).backward()
        self.scaler.step(self.optimizer)
        self.scaler.update()


def tensors_of(*roots):
    return {id(tensor) for tensor in Found(roots).tensors}


def ids(*tensors):
    return {id(tensor) for tensor in tensors}


def test_reached_by_owner():
    trainer = Trainer()
    found = Found([trainer.step])
    assert found.optimizers == [trainer.optimizer] and found.scalers == [trainer.scaler]
    model = [*trainer.model.parameters(), *trainer.model.buffers()]
    state = [v for values in trainer.optimizer.state.values() for v in values.values()]
    scaler = [trainer.scaler._scale, trainer.scaler._growth_tracker, trainer.scaler._history]
    extra = list(trainer.parts["extra"][0].parameters())
    assert {id(t) for t in found.tensors} == ids(*model, *state, *scaler, *extra)
    assert ids(*found.params) == ids(*trainer.model.parameters(), *extra)


def test_reached_by_globals_closures_and_wrappers():
    expected = ids(net.weight, net.bias, table)
    assert tensors_of(through_globals) == expected
    assert tensors_of(functools.partial(through_globals, x=1)) == expected
    assert tensors_of(lambda x: through_globals(x)) == expected
    assert tensors_of(mixprec.graphed(through_globals)) == expected

    inner = nn.Linear(2, 2)
    scale = torch.ones(())
    assert tensors_of(lambda x, default=scale: inner(x) * default) == ids(
        inner.weight, inner.bias, scale
    )
    later = lambda: unset  # noqa: E731
    assert tensors_of(later) == set()
    unset = scale
    assert tensors_of(later) == ids(scale)
    holds_itself = [inner]
    holds_itself.append(holds_itself)
    assert tensors_of(holds_itself) == ids(inner.weight, inner.bias)


def change_global(name, value):
    def change(trainer):
        globals()[name] = value

    return change


# Memory: graphs are stale for good. Modes: a graph for each.
MEMORY = {
    "weight's data": lambda t: setattr(t.model[0].weight, "data", torch.zeros(4, 3)),
    "weight": lambda t: setattr(t.model[0], "weight", nn.Parameter(torch.zeros(4, 3))),
    "buffer": lambda t: setattr(t.model[1], "running_mean", torch.zeros(4)),
    "size": lambda t: setattr(t.model[0].weight, "data", t.model[0].weight.data[:2]),
    "module": lambda t: t.model.__setitem__(0, nn.Linear(3, 4)),
    "model": lambda t: setattr(t, "model", nn.Linear(3, 4)),
    "layout": lambda t: setattr(
        t.model[0].weight, "data", t.model[0].weight.data.as_strided((4, 3), (1, 4))
    ),
    "optimizer": lambda t: setattr(t, "optimizer", mixprec.SGD(t.model.parameters())),
    "optimizer's state": lambda t: t.optimizer.load_state_dict(t.optimizer.state_dict()),
    "group": lambda t: t.optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(1))]}),
    "scaler": lambda t: setattr(t, "scaler", mixprec.GradScaler("cpu")),
    "in a container": lambda t: t.parts["extra"].append(nn.Linear(1, 1)),
    "global tensor": change_global("table", torch.zeros(3)),
    "global function": change_global("helper", lambda x: x),
}
MODES = {
    "eval": lambda t: t.model.eval(),
    "one module's eval": lambda t: t.model[2].eval(),
    "requires_grad": lambda t: t.model[0].weight.requires_grad_(False),
    "nesterov": lambda t: t.optimizer.param_groups[0].update(nesterov=True),
    "momentum off": lambda t: t.optimizer.param_groups[0].update(momentum=0),
    "growth factor": lambda t: t.scaler.set_growth_factor(4.0),
    "remainders": lambda t: setattr(t.optimizer, "store_param_remainders", True),
    "global number": change_global("factor", 0.25),
}
# In place, or read on the device.
NOTHING = {
    "nothing": lambda t: None,
    "values": lambda t: t.model[0].weight.data.zero_(),
    "loaded": lambda t: t.model.load_state_dict(t.model.state_dict()),
    "gradient": lambda t: t.optimizer.zero_grad(),
    "learning rate": lambda t: t.optimizer.param_groups[0].update(lr=0.3, weight_decay=0.1),
    "momentum": lambda t: t.optimizer.param_groups[0].update(momentum=0.5),
    "scale": lambda t: t.scaler.update(8.0),
    "there and back": lambda t: t.model.eval().train(),
    "its own counter": lambda t: setattr(t, "count", 7),
}


@pytest.mark.parametrize("change", [*MEMORY, *MODES, *NOTHING])
def test_changes_show(change, monkeypatch):
    for name in ("factor", "table", "helper"):
        monkeypatch.setitem(globals(), name, globals()[name])
    trainer = Trainer()
    found = Found([trainer.step, through_globals])
    addresses, modes = _C.fingerprint(found.watched)
    {**MEMORY, **MODES, **NOTHING}[change](trainer)
    new_addresses, new_modes = _C.fingerprint(found.watched)
    assert (new_addresses != addresses) == (change in MEMORY)
    if change not in MEMORY:
        assert (new_modes != modes) == (change in MODES)


@pytest.mark.parametrize("optimizer_first", [True, False])
def test_weights_of_an_optimizer_alone(optimizer_first):
    model, alone = nn.Linear(3, 4), nn.Parameter(torch.ones(2))
    optimizer = mixprec.SGD([*model.parameters(), alone], lr=0.1)
    found = Found([optimizer, model] if optimizer_first else [model, optimizer])
    for weight in (model.weight, model.bias, alone):
        before = _C.fingerprint(found.watched)
        weight.data = weight.data.clone()
        assert _C.fingerprint(found.watched)[0] != before[0]


@pytest.mark.parametrize(("before", "after"), [(-1, -2), (1, 1.0), (1, True), (0.5, 0.25), (0, "")])
def test_numbers_of_one_hash_differ(before, after):
    number = before
    found = Found([lambda: number])
    old = _C.fingerprint(found.watched)
    assert _C.fingerprint(found.watched) == old
    number = after
    assert _C.fingerprint(found.watched)[1] != old[1]
    number = 10**400  # no float holds it
    assert _C.fingerprint(found.watched)[1] != old[1]


def test_objects_made_for_each_call_are_not_held():
    runner = graphed_module._Runner(lambda batch: None, max_graphs=8)
    for _ in range(100):
        runner.remember([Trainer])  # a class leads to no tensor
        runner.remember([types.SimpleNamespace(x=torch.ones(1))])
    assert len(runner.passed) == graphed_module._MAX_PASSED


def test_torchs_optimizers_keep_the_captures_hyperparameters():
    weight = nn.Parameter(torch.ones(2))
    for fused in (False, True):
        optimizer = torch.optim.SGD([weight], lr=0.1, momentum=0.9, fused=fused)
        found = Found([optimizer])
        before = _C.fingerprint(found.watched)
        optimizer.param_groups[0]["lr"] = 0.2
        assert (_C.fingerprint(found.watched) == before) == fused
        optimizer.param_groups[0]["momentum"] = 0.5
        assert _C.fingerprint(found.watched) != before


def test_on_a_cpu_it_is_the_plain_call():
    trainer, calls = Trainer(), []

    @mixprec.graphed
    def step(x, *, scale):
        calls.append(1)
        return trainer.model(x) * scale

    for _ in range(8):
        result = step(torch.ones(2, 3), scale=2)
        assert result.requires_grad
    assert len(calls) == 8
    assert mixprec.graphed(step, enabled=False) is step
    assert isinstance(mixprec.graphed(max_graphs=2), functools.partial)
    assert step.__name__ == "step" and isinstance(step.__wrapped__, types.FunctionType)
