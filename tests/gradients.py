"""Optimizers whose parameters have given gradients, and what a scaler made of these."""

import torch
from helpers import DTYPES, random_tensor

import mixprec

SHAPES = [(4099,), (), (0,), (1,), (7, 3), (100_003,)]


def optimizer_with(grads, **options):
    """Weights are 0: with lr 1 a step makes them the negated gradients that it used."""
    params = [torch.nn.Parameter(torch.zeros_like(grad)) for grad in grads]
    for param, grad in zip(params, grads, strict=True):
        param.grad = grad.clone()
    return mixprec.SGD(params, **{"lr": 1.0, **options})


def random_grads(device, dtypes=DTYPES, seed=0, scale=100.0):
    generator = torch.Generator().manual_seed(seed)
    return [
        random_tensor(generator, shape, dtypes[i % len(dtypes)], device, scale)
        for i, shape in enumerate(SHAPES * 3)
    ]


def unscaled(grads, scale):
    inverse = torch.tensor(1 / scale, dtype=torch.float32)
    return [grad.cpu().float() * inverse for grad in grads]


def clip_and_step(device, optimizer, max_norm, scale=1000.0, **options):
    scaler = mixprec.GradScaler(device, init_scale=scale)
    scaler.scale(torch.zeros((), device=device))
    norm = scaler.clip_grad_norm_(optimizer, max_norm, **options)
    scaler.step(optimizer)
    scaler.update()
    return norm, scaler


def param_with(grad):
    param = torch.nn.Parameter(torch.ones_like(grad))
    param.grad = grad.clone()
    return param


def ready(device, *grads, cls=mixprec.SGD, **options):
    """An optimizer whose parameters have these gradients, and a scaler that scaled a loss."""
    optimizer = cls([param_with(grad) for grad in grads], lr=0.5)
    scaler = mixprec.GradScaler(device, **{"init_scale": 1000.0, **options})
    scaler.scale(torch.zeros((), device=device))
    return optimizer, scaler


def found_inf(scaler, optimizer):
    (value,) = scaler._found_inf_per_device(optimizer).values()
    return value.item()
