"""What AMP and mixprec gain here: a small network, the modes by turns."""

import statistics
import time
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

import mixprec

_SECONDS = 2.0
_LAYERS = 8

Step = Callable[[], Any]


def measure(device: str) -> dict[str, Any]:
    """Medians of milliseconds an iteration, and on a GPU what its kernels alone take.

    ``busy`` is the share of AMP's time in which the GPU works, and ``bound`` says whether it waits
    for the "host"; None on a CPU.
    """
    on_gpu = device == "cuda"
    batch, size, width = (128, 32, 128) if on_gpu else (16, 12, 32)
    x, y = torch.randn(batch, 3, size, size, device=device), torch.arange(batch, device=device) % 10
    steps = {
        "fp32": _torch_step(_network(width, device), x, y, amp=False),
        "torch AMP": _torch_step(_network(width, device), x, y, amp=True),
        "mixprec graphed": _mixprec_step(_network(width, device), x, y),
    }
    if on_gpu:
        last = torch.channels_last
        model = _network(width, device).to(memory_format=last)
        steps["the same, channels_last"] = _mixprec_step(model, x.to(memory_format=last), y)
    for step in steps.values():
        for _ in range(6 if on_gpu else 1):  # graphed captures in the fourth
            step()
    times: dict[str, list[float]] = {mode: [] for mode in steps}
    end = time.perf_counter() + _SECONDS
    while time.perf_counter() < end or len(times["fp32"]) < 3:
        for mode, step in steps.items():
            times[mode].append(_milliseconds(step, device))
    medians = {mode: statistics.median(samples) for mode, samples in times.items()}
    modes: list[dict[str, Any]] = []
    for mode, step in steps.items():
        gpu_ms, launches = _kernels(step) if on_gpu else (None, None)
        row = {"mode": mode, "ms": medians[mode], "gpu_ms": gpu_ms, "launches": launches}
        modes.append({**row, "speed_against_fp32": medians["fp32"] / medians[mode]})
    amp = modes[1]
    busy = amp["gpu_ms"] and amp["gpu_ms"] / amp["ms"]
    return {
        "device": device,
        "network": f"{_LAYERS} convolutions of {width} channels, {size}x{size}",
        "batch_size": batch,
        "modes": modes,
        "busy": busy,
        "bound": busy and ("host" if busy < 0.8 else "GPU"),
    }


def _network(width: int, device: str) -> nn.Module:
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for i in range(_LAYERS):
        convolution = nn.Conv2d(width if i else 3, width, 3, padding=1, bias=False)
        layers += [convolution, nn.BatchNorm2d(width), nn.ReLU()]
    head = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, 10)]
    return nn.Sequential(*layers, *head).to(device)


def _torch_step(model: nn.Module, x: torch.Tensor, y: torch.Tensor, amp: bool) -> Step:
    """As in torch's tutorials."""
    device, half = x.device.type, torch.float16 if x.is_cuda else torch.bfloat16
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    scaler = torch.amp.GradScaler(device, enabled=amp)

    def step() -> None:
        optimizer.zero_grad()
        with torch.autocast(device, half, enabled=amp):
            loss = F.cross_entropy(model(x), y)
        scaler.scale(loss).backward()  # type: ignore[no-untyped-call]
        scaler.step(optimizer)
        scaler.update()

    return step


def _mixprec_step(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> Step:
    half = torch.float16 if x.is_cuda else torch.bfloat16
    model = mixprec.half_weights(model, half)
    optimizer = mixprec.SGD(model.parameters(), lr=0.01, momentum=0.9)
    scaler = mixprec.GradScaler(x.device.type)

    @mixprec.graphed
    def step(x: torch.Tensor, y: torch.Tensor) -> None:
        optimizer.zero_grad()
        with mixprec.autocast(x.device.type):
            loss = F.cross_entropy(model(x), y)
        scaler.scale(loss).backward()  # type: ignore[no-untyped-call]
        scaler.step(optimizer)
        scaler.update()

    return lambda: step(x, y)


def _milliseconds(step: Step, device: str) -> float:
    """Of an iteration; on a GPU of ten in a row, from an idle GPU until they are done."""
    repeats = 10 if device == "cuda" else 1
    if device == "cuda":
        torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(repeats):
        step()
    if device == "cuda":
        torch.cuda.synchronize()
    return (time.perf_counter() - start) / repeats * 1e3


def _kernels(step: Step) -> tuple[float | None, int | None]:
    """Milliseconds and number of kernels, copies and memsets of an iteration; None: no profiler."""
    repeats = 5
    torch.cuda.synchronize()
    activities = [torch.profiler.ProfilerActivity.CUDA]
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that events are cleared at the end
            with torch.profiler.profile(activities=activities) as profile:
                for _ in range(repeats):
                    step()
                torch.cuda.synchronize()
    except RuntimeError:  # another profiler is attached, say
        return None, None
    on_gpu = torch.autograd.DeviceType.CUDA  # type: ignore[attr-defined]
    times = [
        event.device_time
        for event in profile.events() or ()
        if event.device_type == on_gpu and "Optimizer." not in event.name  # torch's own marks
    ]
    return (sum(times) / repeats * 1e-3, len(times) // repeats) if times else (None, None)
