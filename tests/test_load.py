"""Under load: many threads at once, a million steps."""

import contextlib
import gc
import resource
import threading

import pytest
import torch
from helpers import DTYPES, assert_same_bits, on_devices, random_steps, random_tensor, train

import mixprec

INF = float("inf")


def trained(device, seed, steps=60):
    """Weights and states after some steps with overflows, of a model of its own shapes."""
    generator = torch.Generator().manual_seed(seed)
    shapes = [(seed % 7 + 1, 700), (3 + seed,), (64, 8, 3, 3), (20_000,)]
    params = [
        torch.nn.Parameter(random_tensor(generator, shape, dtype, device))
        for shape in shapes
        for dtype in DTYPES
    ]
    optimizer = mixprec.SGD(
        params, lr=0.1, momentum=0.9, weight_decay=0.01, store_param_remainders=seed % 2 == 1
    )
    scaler = mixprec.GradScaler(device, 1000.0, growth_interval=5)
    gradients = random_steps(generator, params, [seed % 5 == i % 11 for i in range(12)])
    train(optimizer, scaler, gradients * (steps // 12))
    state = [value for values in optimizer.state.values() for value in values.values()]
    return [*params, *state, scaler._scale]


def assert_all_same(actual, expected):
    for one, other in zip(actual, expected, strict=True):
        assert_same_bits(one, other)


@on_devices
def test_24_threads(device):
    """Each with a model of its own, on a GPU with a stream of its own: the bits of one alone."""
    expected = [trained(device, seed) for seed in range(24)]
    results, start = [None] * 24, threading.Barrier(24)

    def work(seed):
        stream = contextlib.nullcontext()
        if device == "cuda":
            stream = torch.cuda.stream(torch.cuda.Stream())
        start.wait()
        with stream:
            results[seed] = trained(device, seed)
            if device == "cuda":
                torch.cuda.current_stream().synchronize()

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(24)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for one, other in zip(results, expected, strict=True):
        assert_all_same(one, other)


@on_devices
@pytest.mark.filterwarnings("error")
def test_a_million_steps(device):
    """Memory stays flat, and the scale goes as the rule says."""
    param = torch.nn.Parameter(torch.ones(8, device=device))
    optimizer = mixprec.SGD([param], lr=1e-9, momentum=0.9)
    scaler = mixprec.GradScaler(device, 2.0**16, growth_interval=100)
    good, bad = torch.ones_like(param), torch.full_like(param, INF)
    scaler.scale(torch.zeros((), device=device))
    scale, good_steps, skipped, used = 2.0**16, 0, 0, []

    for i in range(1_000_000):
        overflows = i % 997 == 0 or (i % 83 == 7 and i % 10_000 < 2_000)
        param.grad = bad if overflows else good
        scaler.step(optimizer)
        scaler.update()
        good_steps = 0 if overflows else good_steps + 1
        skipped += overflows
        if overflows:
            scale *= 0.5
        elif good_steps == 100:
            scale, good_steps = min(scale * 2, 2.0**127), 0
        if i % 100_000 == 50_000:
            assert scaler.get_scale() == scale
            used.append(memory(device))

    assert scaler.steps_skipped == skipped
    assert torch.isfinite(param).all()
    assert used[-1] - used[0] < 1 << 20, used


def memory(device):
    gc.collect()
    if device == "cuda":
        return torch.cuda.memory_allocated()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
