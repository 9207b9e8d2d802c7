"""A small regression, and the plain loop over it, that the trainers' tests compare with."""

from typing import Any, NamedTuple

import torch
from helpers import assert_same_bits
from torch import nn
from torch.nn import functional as F

import mixprec

HALF = {"cpu": torch.bfloat16, "cuda": torch.float16}  # what mixprec.autocast chooses
SGD = {"lr": 0.05, "momentum": 0.9, "weight_decay": 0.01}
SCALER = {"init_scale": 1024.0, "growth_interval": 4}
OVERFLOWS = (0, 3)  # the first step is skipped too
INF = float("inf")


class Run(NamedTuple):
    model: nn.Module
    optimizer: torch.optim.Optimizer
    scaler: torch.amp.GradScaler


def make_model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.GELU(), nn.Linear(16, 1))


def make_batches(overflows=OVERFLOWS, count=10):
    """Inputs and targets; those of `overflows` make inf and NaN of all gradients."""
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(count, 4, 8, generator=generator)
    targets = inputs.sum(2, keepdim=True)
    for i in overflows:
        targets[i] *= INF
    return list(zip(inputs, targets, strict=True))


def loss_of(model, x, y):
    return F.mse_loss(model(x).float(), y)


def schedule_for(optimizer):
    return torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=30)


def ours(device, half=None, make_model=make_model) -> Run:
    model = make_model().to(device)
    if half is not None:
        mixprec.half_weights(model, half)
    optimizer = mixprec.SGD(model.parameters(), **SGD)
    return Run(model, optimizer, mixprec.GradScaler(device, **SCALER))


def torchs(device, enabled=True, make_model=make_model, **options) -> Run:
    model = make_model().to(device)
    optimizer = torch.optim.SGD(model.parameters(), **SGD, **(options or {"foreach": False}))
    return Run(model, optimizer, torch.amp.GradScaler(device, **SCALER, enabled=enabled))


def trained(
    run: Run,
    dtype,
    batches,
    *,
    loss_of=loss_of,
    clip=None,
    value=None,
    accumulate=1,
    schedule=None,
    hold=False,
) -> Run:
    """The plain loop; `hold`: the schedule waits where a step was skipped."""
    model, optimizer, scaler = run
    params = list(model.parameters())
    for i, batch in enumerate(batches, 1):
        x, y = (tensor.to(params[0].device) for tensor in batch)
        with torch.autocast(x.device.type, dtype):
            loss = loss_of(model, x, y)
        scaler.scale(loss / accumulate).backward()
        if i % accumulate:
            continue
        if clip is not None and isinstance(scaler, mixprec.GradScaler):
            scaler.clip_grad_norm_(optimizer, clip)
        elif clip is not None:
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(params, clip)
        if value is not None:
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_value_(params, value)
        before = scaler.get_scale()
        scaler.step(optimizer)
        scaler.update()
        if schedule is not None and not (hold and scaler.get_scale() < before):
            schedule.step()
        optimizer.zero_grad()
    return run


def result(run: Run) -> dict[str, Any]:
    """Weights in full precision, momentum, the scaler's numbers, the groups' hyperparameters."""
    found: dict[str, Any] = mixprec.full_precision_state_dict(run.model, run.optimizer)
    state = run.optimizer.state_dict()
    for i, values in state["state"].items():
        found[f"momentum {i}"] = values["momentum_buffer"]
    scaler = run.scaler.state_dict()
    found["scaler"] = {key: scaler[key] for key in ("scale", "_growth_tracker") if scaler}
    found = {k: v.cpu() if isinstance(v, torch.Tensor) else v for k, v in found.items()}
    found["groups"] = [(group["lr"], group["momentum"]) for group in state["param_groups"]]
    return found


def assert_same_run(run: Run, expected: Run):
    actual, wanted = result(run), result(expected)
    assert actual.keys() == wanted.keys()
    for name, value in wanted.items():
        if isinstance(value, torch.Tensor):
            assert value.isfinite().all(), name
            assert_same_bits(actual[name], value, name)
        else:
            assert actual[name] == value, name


def assert_close_run(run: Run, expected: Run):
    """Where torch adds the norm up in another order, which may round half weights another way."""
    actual, wanted = result(run), result(expected)
    for name, value in wanted.items():
        if isinstance(value, torch.Tensor):
            assert (actual[name] - value).abs().max() <= 0.01 * value.abs().max(), name
