"""Runs each op of mixprec on small tensors and compares it with float64 on the CPU."""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import mixprec
from mixprec import _C

_SIZE = 4099  # more than one chunk, and no multiple of a vector
_OPTIONS: dict[str, Any] = {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01}
_TOLERANCE = 1e-6  # of the largest value: a few roundings of float32


def check(device: str) -> list[dict[str, Any]]:
    """Of each op: its name, whether it is right on ``device``, and its error or distance."""
    results = []
    for name, op in OPS.items():
        try:
            distance = op(device)
            if device == "cuda":
                torch.cuda.synchronize()
            ok, detail = distance <= 1, f"{distance:.2g} of the tolerance from float64"
        except Exception as error:
            ok, detail = False, (str(error).splitlines() or [type(error).__name__])[0]
        results.append({"name": name, "ok": ok, "detail": detail})
    return results


def _distance(actual: Tensor, expected: Tensor, tolerance: float = _TOLERANCE) -> float:
    """The largest distance in units of what is tolerated; NaN where an element is NaN."""
    expected = expected.detach().double()
    difference = actual.detach().cpu().double() - expected
    return float(difference.abs().max() / expected.abs().max() / tolerance)


def _train(device: str, dtype: torch.dtype, compact: bool = False, clip: bool = False) -> float:
    """Three steps under a scaler, the second of which overflows."""
    generator = torch.Generator().manual_seed(0)
    start = torch.randn(_SIZE, generator=generator).to(dtype)
    weight, exact = nn.Parameter(start.to(device)), nn.Parameter(start.double())
    optimizer = mixprec.SGD([weight], **_OPTIONS, store_param_remainders=compact)
    oracle = torch.optim.SGD([exact], **_OPTIONS)
    scaler = mixprec.GradScaler(device, init_scale=64.0)
    distances = []
    for step in range(3):
        scale = 32.0 if step == 2 else 64.0
        scaled = (torch.randn(_SIZE, generator=generator) * scale).to(dtype)
        exact.grad = scaled.double() / scale
        scaled[-1] = torch.inf if step == 1 else scaled[-1]
        weight.grad = scaled.to(device)
        scaler.scale(torch.zeros((), device=device))
        if clip:
            norm = scaler.clip_grad_norm_(optimizer, 1.0)
            if step != 1:
                distances.append(_distance(norm, nn.utils.clip_grad_norm_([exact], 1.0)))
        scaler.step(optimizer)
        scaler.update()
        if step != 1:
            oracle.step()
    state = optimizer.state[weight]
    master: Tensor = weight
    if compact:
        master = _C.to_master(weight.detach(), state["master_remainder"])
    elif dtype is not torch.float32:
        master = state["master"]
    unit = torch.finfo(dtype).eps * master.abs().clamp(min=torch.finfo(dtype).tiny)
    if not bool(((weight - master).abs() <= unit).all()):
        raise RuntimeError("a weight is not its master rounded")
    distances.append(_distance(master, exact))
    distances.append(_distance(state["momentum_buffer"], oracle.state[exact]["momentum_buffer"]))
    return max(distances)


def _unscale(device: str) -> float:
    weight = nn.Parameter(torch.zeros(_SIZE, device=device))
    scaled = torch.randn(_SIZE, generator=torch.Generator().manual_seed(0))
    weight.grad = scaled.clone().to(device)
    scaler = mixprec.GradScaler(device, init_scale=1000.0)
    scaler.scale(torch.zeros((), device=device))
    scaler.unscale_(mixprec.SGD([weight]))
    return _distance(weight.grad, scaled.double() / 1000.0)


def _update_scale(device: str) -> float:
    weight = nn.Parameter(torch.zeros(1, device=device))
    optimizer = mixprec.SGD([weight])
    scaler = mixprec.GradScaler(device, init_scale=8.0, growth_interval=2)
    scales = []
    for grad in (1.0, 1.0, torch.inf, torch.nan, 1.0):
        weight.grad = torch.full_like(weight, grad)
        scaler.scale(torch.zeros((), device=device))
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
    actual = torch.tensor([*scales, scaler.steps_skipped])
    return _distance(actual, torch.tensor([8, 16, 8, 4, 4, 2]))


def _half_weights(device: str) -> float:
    model = nn.Linear(17, 5)
    exact = {name: value.clone() for name, value in model.state_dict().items()}
    model = mixprec.half_weights(model.to(device))
    full = mixprec.full_precision_state_dict(model, mixprec.SGD(model.parameters()))
    return max(_distance(full[name], exact[name]) for name in exact)


def _autocast(device: str) -> float:
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.randn(64, 64, generator=generator).bfloat16().float() for _ in range(2))
    with mixprec.autocast(device):
        product = a.to(device) @ b.to(device)
    if product.dtype is torch.float32:
        raise RuntimeError("autocast does not cast")
    return _distance(product, a.double() @ b.double(), 2**-8)  # rounding to bfloat16: 2^-9


def _graphed(device: str) -> float:
    """Eight calls, of which on a GPU five are replays; no matrix product, so the same bits."""

    def trained(graphed: bool) -> Tensor:
        generator = torch.Generator().manual_seed(0)
        weight = nn.Parameter(torch.randn(_SIZE, generator=generator).to(device))
        optimizer, scaler = mixprec.SGD([weight], **_OPTIONS), mixprec.GradScaler(device)

        def step(x: Tensor) -> None:
            optimizer.zero_grad()
            loss = (weight * x - 1).square().mean()
            scaler.scale(loss).backward()  # type: ignore[no-untyped-call]
            scaler.step(optimizer)
            scaler.update()

        call = mixprec.graphed(step, enabled=graphed)
        for _ in range(8):
            call(torch.randn(_SIZE, generator=generator).to(device))
        return weight.detach().cpu()

    return _distance(trained(True), trained(False))


def _prefetch(device: str) -> float:
    batches = [torch.full((_SIZE,), float(i + 1)) for i in range(4)]
    copies = list(mixprec.prefetch(batches, device))
    if len(copies) != 4 or copies[0].device.type != device:
        raise RuntimeError(f"{len(copies)} of 4 batches came, on {copies[0].device}")
    return max(map(_distance, copies, batches))


OPS: dict[str, Callable[[str], float]] = {
    "SGD float32": functools.partial(_train, dtype=torch.float32),
    "SGD float16": functools.partial(_train, dtype=torch.float16),
    "SGD bfloat16": functools.partial(_train, dtype=torch.bfloat16),
    "SGD remainders float16": functools.partial(_train, dtype=torch.float16, compact=True),
    "SGD remainders bfloat16": functools.partial(_train, dtype=torch.bfloat16, compact=True),
    "clip_grad_norm_": functools.partial(_train, dtype=torch.float16, clip=True),
    "unscale_": _unscale,
    "update": _update_scale,
    "half_weights": _half_weights,
    "autocast": _autocast,
    "graphed": _graphed,
    "prefetch": _prefetch,
}
