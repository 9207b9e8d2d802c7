"""What several test files share: devices, hyperparameters, and torch.optim.SGD run beside ours."""

import contextlib
import itertools
import os
import subprocess
import sys

import pytest
import torch

import mixprec

needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
DEVICES = ["cpu", pytest.param("cuda", marks=needs_cuda)]
on_devices = pytest.mark.parametrize("device", DEVICES)
HALF = (torch.float16, torch.bfloat16)
DTYPES = (torch.float32, *HALF)

# Around the elements of a vector register, and of the chunk that one block or task takes.
SIZES = (0, 1, 3, 15, 16, 17, 127, 4095, 4096, 4097, 8193)
SHAPES = [(), *((size,) for size in SIZES), (3, 5, 7), (1, 4097), (2, 0, 3), (16, 3, 3, 3)]

# Every combination that torch.optim.SGD accepts. No value is a power of two, and 1 - 0.29 is
# another number if 0.29 is rounded to fp32 first.
HYPERPARAMETERS = [
    {
        "lr": 0.1,
        "momentum": momentum,
        "dampening": dampening,
        "nesterov": nesterov,
        "weight_decay": weight_decay,
        "maximize": maximize,
    }
    for momentum, dampening, nesterov, weight_decay, maximize in itertools.product(
        (0.0, 0.9), (0.0, 0.29), (False, True), (0.0, 0.01), (False, True)
    )
    if not nesterov or (momentum > 0 and dampening == 0)
]


def bits(tensor):
    """The elements as integers: equal bits, also of NaN and -0."""
    integer = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.int8}[tensor.element_size()]
    return tensor.detach().cpu().contiguous().view(integer)


def assert_same_bits(actual, expected, what="tensor"):
    assert actual.shape == expected.shape, what
    assert actual.dtype == expected.dtype, what
    differing = int((bits(actual) != bits(expected)).sum())
    assert differing == 0, f"{what}: {differing} of {actual.numel()} elements differ"


@contextlib.contextmanager
def poisoned_memory():
    """torch.empty() gives NaN, so that whatever reads fresh memory shows."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        assert torch.empty(3).isnan().all()
        yield
    finally:
        torch.use_deterministic_algorithms(before)


@contextlib.contextmanager
def counted_all_reduces():
    """Calls of torch.distributed.all_reduce."""
    dist = torch.distributed
    calls, all_reduce = [], dist.all_reduce

    def counting(*args, **kwargs):
        calls.append(args)
        return all_reduce(*args, **kwargs)

    dist.all_reduce = counting
    try:
        yield calls
    finally:
        dist.all_reduce = all_reduce


def random_tensor(generator, shape, dtype=torch.float32, device="cpu", scale=1.0):
    """Values over some binary orders of magnitude, the same on every device."""
    exponent = torch.randint(-6, 3, shape, generator=generator)
    value = torch.randn(shape, generator=generator) * scale * torch.exp2(exponent)
    return value.to(device, dtype)


def random_steps(generator, params, overflows, scale=64.0):
    """Scaled gradients for each step; where `overflows` is true, one element is inf or NaN."""
    steps = []
    for overflow in overflows:
        grads = [random_tensor(generator, p.shape, p.dtype, p.device, scale) for p in params]
        filled = [grad for grad in grads if grad.numel() > 0]
        if overflow and filled:
            grad = filled[int(torch.randint(len(filled), (), generator=generator))].view(-1)
            place = int(torch.randint(3, (), generator=generator))
            value = (float("inf"), float("-inf"), float("nan"))[place]
            grad[(0, -1, grad.numel() // 2)[place]] = value
        steps.append(grads)
    return steps


def params_of(optimizer):
    return [param for group in optimizer.param_groups for param in group["params"]]


def set_grads(optimizer, grads):
    for param, grad in zip(params_of(optimizer), grads, strict=True):
        param.grad = None if grad is None else grad.clone()


def train(optimizer, scaler, steps, after_step=lambda: None):
    """The usual loop around gradients that are already there."""
    device = params_of(optimizer)[0].device
    for grads in steps:
        set_grads(optimizer, grads)
        scaler.scale(torch.zeros((), device=device))
        scaler.step(optimizer)
        scaler.update()
        after_step()


def upcast(steps):
    """The gradients that fp32 masters get."""
    return [
        [g if g is None or g.dtype is torch.float64 else g.float() for g in grads]
        for grads in steps
    ]


def fp32_twins(params):
    """The masters as parameters of their own: fp32 (fp64 stays), same layout."""
    return [
        torch.nn.Parameter((p if p.dtype is torch.float64 else p.float()).detach().clone())
        for p in params
    ]


def torch_twin(optimizer):
    """torch.optim.SGD over fp32 copies of the optimizer's parameters, group by group."""
    groups = [
        {**group, "params": fp32_twins(group["params"]), "foreach": False, "fused": False}
        for group in optimizer.param_groups
    ]
    for group in groups:
        group.pop("param_names", None)
    return torch.optim.SGD(groups, foreach=False)


def scaler_pair(device, **options):
    options = {"init_scale": 1000.0, "growth_interval": 3, **options}
    return mixprec.GradScaler(device, **options), torch.amp.GradScaler(device, **options)


def assert_same_training(ours, twin):
    """Weights and state of mixprec.SGD are those of torch.optim.SGD on the fp32 masters."""
    ours_state, twin_state = ours.state_dict()["state"], twin.state_dict()["state"]
    for i, (param, expected) in enumerate(zip(params_of(ours), params_of(twin), strict=True)):
        assert_same_bits(param, expected.detach().to(param.dtype), f"parameter {i}")
        state = dict(ours_state.get(i, {}))
        if param.dtype in HALF and "master" in state:
            assert_same_bits(state.pop("master"), expected, f"master {i}")
        if param.numel() > 0:  # momentum without elements may be there before its first write
            assert state.keys() == twin_state.get(i, {}).keys(), f"state of parameter {i}"
        for name in state.keys() & twin_state.get(i, {}).keys():
            assert_same_bits(state[name], twin_state[i][name], f"{name} {i}")


def run_python(*arguments, folder):
    """stdout of a Python process of its own, which must not fail."""
    environment = {**os.environ, "OMP_NUM_THREADS": str(min(torch.get_num_threads(), 4))}
    command = [sys.executable, *map(str, arguments)]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout
