"""A training that is saved and resumed, for the tests of checkpoints."""

import io

import torch
from helpers import DTYPES, params_of, random_steps, random_tensor

import mixprec

OPTIONS = {"lr": 0.1, "momentum": 0.9, "dampening": 0.3, "weight_decay": 0.01}
OVERFLOWS = [True, False, False, True, False, False, True, False]


def make_params(device, dtypes=DTYPES, shape=(3, 5, 7, 11)):
    generator = torch.Generator().manual_seed(0)
    return [torch.nn.Parameter(random_tensor(generator, shape, d, device)) for d in dtypes]


def steps_for(params, overflows=OVERFLOWS):
    return random_steps(torch.Generator().manual_seed(1), params, overflows)


def through_file(value):
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def saved(optimizer, scaler):
    weights = [param.detach() for param in params_of(optimizer)]
    return through_file((weights, optimizer.state_dict(), scaler.state_dict()))


def resumed(checkpoint, optimizer, scaler):
    weights, optimizer_state, scaler_state = checkpoint
    for param, weight in zip(params_of(optimizer), weights, strict=True):
        param.data.copy_(weight)
    optimizer.load_state_dict(optimizer_state)
    scaler.load_state_dict(scaler_state)
    return optimizer, scaler


def fresh(device, dtypes=DTYPES, cls=mixprec.SGD):
    return cls(make_params(device, dtypes), **OPTIONS), mixprec.GradScaler(device, 1000.0)


def state_tensors(optimizer):
    state = optimizer.state_dict()["state"]
    return {(i, name): value for i in state for name, value in state[i].items()}
