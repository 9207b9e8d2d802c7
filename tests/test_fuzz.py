"""Ten thousand calls on tensors, state and options that somebody broke: an error that says
something and nothing written, or a call that did its work; never a crash."""

import functools
import random

import pytest
import torch
from helpers import HALF, on_devices, params_of

import mixprec
from mixprec import _C

CALLS = 10_000


def freed(tensor):
    tensor.untyped_storage().resize_(0)
    return tensor


def shrunk(tensor):
    tensor.untyped_storage().resize_(tensor.untyped_storage().nbytes() // 2)
    return tensor


def broken(rng, like, has_memory=False):
    """A tensor that does not go with `like`, or something else entirely.

    `has_memory`: for what goes through torch's own ops, which crash without.
    """
    shape, device = like.shape, like.device
    makers = (
        lambda: 3,
        lambda: "text",
        lambda: [1.0],
        lambda: torch.ones(shape, device="meta"),
        lambda: torch.ones(7, device=device),
        lambda: torch.ones(shape, device=device, dtype=torch.float64),
        lambda: torch.ones(shape, device=device, dtype=torch.int64),
        lambda: torch.ones(shape, device=device, dtype=torch.complex64),
        lambda: torch.ones(shape, device=device, dtype=torch.bool),
        lambda: torch.ones(shape, device=device).to_sparse(),
        lambda: torch.ones((), device=device).expand(shape),
        lambda: torch.ones((*shape, 2), device=device)[..., 0],
        lambda: torch.ones(shape[::-1], device=device).t(),
        lambda: torch.full(shape, torch.nan, device=device),
        lambda: torch.empty(0, device=device),
        lambda: freed(torch.ones(shape, device=device)),
        lambda: shrunk(torch.ones(shape, device=device)),
    )
    return rng.choice(makers[:-2] if has_memory else makers)()


def number(rng):
    values = torch.nan, torch.inf, -1.0, 0.0, 1e-45, 1e39, 10**400, None, "1", [], torch.ones(2)
    return rng.choice(values)


def break_gradient(rng, optimizer, scaler):
    param = rng.choice(params_of(optimizer))
    cast = rng.random() < 0.5
    bad = broken(rng, param, has_memory=cast)
    if cast and isinstance(bad, torch.Tensor) and bad.shape == param.shape:
        bad = bad.to(param.dtype)
    param.grad = bad


def break_memory(rng, optimizer, scaler):
    param = rng.choice(params_of(optimizer))
    state = [value for value in optimizer.state[param].values() if isinstance(value, torch.Tensor)]
    rng.choice([freed, shrunk])(rng.choice([param.data, param.grad, *state]))


def break_weight(rng, optimizer, scaler):
    param = rng.choice(params_of(optimizer))
    param.data = broken(rng, param)


def break_state(rng, optimizer, scaler):
    param = rng.choice(params_of(optimizer))
    if rng.random() < 0.1:
        optimizer.state[param] = rng.choice([3, [], None, "text"])
    else:
        name = rng.choice(["momentum_buffer", "master", "master_remainder", "step"])
        optimizer.state[param][name] = broken(rng, param)


def break_group(rng, optimizer, scaler):
    group = optimizer.param_groups[0]
    name = rng.choice(["lr", "momentum", "dampening", "weight_decay", "nesterov", "maximize"])
    if rng.random() < 0.1:
        del group[name]
    elif rng.random() < 0.2:
        group["params"] = [*group["params"], rng.choice([None, 3, "text", torch.ones(3)])]
    else:
        group[name] = number(rng)


def break_scaler(rng, optimizer, scaler):
    name = rng.choice(["_scale", "_growth_tracker", "_history"])
    if rng.random() < 0.5:
        setattr(scaler, name, broken(rng, getattr(scaler, name), has_memory=True))
    else:
        names = "_growth_factor", "_backoff_factor", "_growth_interval", "_min_scale", "_hysteresis"
        setattr(scaler, rng.choice(names), number(rng))


def break_protocol(rng, optimizer, scaler):
    name = rng.choice(["grad_scale", "found_inf", "grad_clip"])
    setattr(optimizer, name, broken(rng, scaler._scale, has_memory=True))


BREAKERS = [
    break_gradient,
    break_memory,
    break_weight,
    break_state,
    break_group,
    break_scaler,
    break_protocol,
]


def calls_on(rng, optimizer, scaler):
    """The public calls that read what was broken, and each op with arguments in wrong places."""
    # Not those that may be broken: pybind's error prints arguments, and torch crashes when it
    # prints a tensor whose memory was freed.
    things = [[{"params": []}], [{}], {}, torch.ones(()), torch.ones(2), number(rng), True, None]
    ops = [_C.check, _C.sgd_step, _C.update_scale, _C.to_remainder, _C.to_master]
    return (
        optimizer.step,
        optimizer.state_dict,
        lambda: scaler.step(optimizer),
        lambda: scaler.unscale_(optimizer),
        lambda: scaler.clip_grad_norm_(optimizer, number(rng), number(rng)),
        lambda: scaler.clip_grad_norm_(optimizer, 1.0),
        lambda: scaler.update(number(rng)),
        scaler.update,
        lambda: rng.choice(ops)(*rng.choices(things, k=rng.randrange(12))),
    )


def written_tensors(optimizer, scaler):
    """Tensors that a call may write, with their bytes, as far as they have any."""
    tensors = [scaler._scale, scaler._growth_tracker, scaler._history]
    for param in params_of(optimizer):
        if isinstance(param, torch.Tensor):
            tensors += [param.data, param.grad]
            state = optimizer.state.get(param)
            tensors += state.values() if isinstance(state, dict) else []
    return [
        (tensor, raw_bytes(tensor))
        for tensor in tensors
        if isinstance(tensor, torch.Tensor) and raw_bytes(tensor) is not None
    ]


def raw_bytes(tensor):
    if tensor.layout is not torch.strided or tensor.is_meta:
        return None
    storage = tensor.untyped_storage()
    return torch.tensor([], dtype=torch.uint8, device=tensor.device).set_(storage).clone()


@on_devices
@pytest.mark.filterwarnings("ignore")
def test_broken_arguments(device):
    errors = 0
    for seed in range(CALLS):
        rng = random.Random(seed)
        dtypes = rng.choices((torch.float32, *HALF), k=3)
        params = [torch.nn.Parameter(torch.ones(4, 3, device=device, dtype=d)) for d in dtypes]
        optimizer = mixprec.SGD(
            params, lr=0.1, momentum=0.9, store_param_remainders=rng.random() < 0.3
        )
        scaler = mixprec.GradScaler(device)
        scaler.scale(torch.zeros((), device=device))
        for param in params:
            param.grad = torch.ones_like(param)
        if rng.random() < 0.7:
            rng.choice([optimizer.step, functools.partial(scaler.step, optimizer)])()
        try:
            rng.choice(BREAKERS)(rng, optimizer, scaler)
        except (RuntimeError, TypeError, AttributeError):
            continue  # torch itself refuses to set that
        call = rng.choice(calls_on(rng, optimizer, scaler))
        before = written_tensors(optimizer, scaler)
        try:
            call()
        except Exception as error:
            errors += 1
            assert str(error)
            for tensor, expected in before:
                assert torch.equal(raw_bytes(tensor), expected)
    assert errors > CALLS / 4
