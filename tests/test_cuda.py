"""What only a GPU has: no host sync, counted launches, streams, graph capture, a second device."""

import pytest
import torch
from helpers import (
    DTYPES,
    assert_same_bits,
    assert_same_training,
    needs_cuda,
    params_of,
    random_steps,
    random_tensor,
    scaler_pair,
    torch_twin,
    train,
    upcast,
)

import mixprec

pytestmark = needs_cuda
OPTIONS = {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.01}


@pytest.fixture
def no_sync():
    """A host sync raises."""
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    yield
    torch.cuda.set_sync_debug_mode("default")


def resnet_like(device="cuda", seed=0):
    """62 tensors as ResNet-18's: convolutions and head in fp16, 40 small ones in fp32."""
    generator = torch.Generator().manual_seed(seed)
    shapes = [(64, 3, 3, 3), *[(64, 64, 3, 3)] * 19, (10, 64), (10,)]
    values = [random_tensor(generator, shape, torch.float16, device) for shape in shapes]
    values += [random_tensor(generator, (64,), torch.float32, device) for _ in range(40)]
    return [torch.nn.Parameter(value) for value in values]


def iteration(optimizer, scaler, loss, clip):
    scaler.scale(loss)
    if clip:
        scaler.clip_grad_norm_(optimizer, 1.0)
    scaler.step(optimizer)
    scaler.update()


def with_gradients(params, seed=1):
    (grads,) = random_steps(torch.Generator().manual_seed(seed), params, [False])
    for param, grad in zip(params, grads, strict=True):
        param.grad = grad
    return params


OPTIMIZERS = {
    "mixprec": lambda params: mixprec.SGD(params, **OPTIONS),
    "mixprec remainders": lambda params: mixprec.SGD(
        params, store_param_remainders=True, **OPTIONS
    ),
    "torch fused SGD": lambda params: torch.optim.SGD(params, fused=True, **OPTIONS),
    "torch fused AdamW": lambda params: torch.optim.AdamW(params, fused=True),
}


@pytest.mark.parametrize("clip", [False, True])
@pytest.mark.parametrize("cls", OPTIMIZERS)
def test_no_sync_from_the_first_iteration_on(no_sync, cls, clip):
    torch.cuda.set_sync_debug_mode("default")
    params = with_gradients(resnet_like())
    if not cls.startswith("mixprec"):
        params = [param for param in params if param.dtype is torch.float32]
    optimizer, loss = OPTIMIZERS[cls](params), torch.ones((), device="cuda")
    if cls.startswith("mixprec"):
        clips = (clip,) * 3
    else:  # torch's clip_grad_norm_ has no sync either; AdamW's first step makes its state
        iteration(optimizer, mixprec.GradScaler("cuda"), loss, clip)
        clips = (clip,) * 2
    torch.cuda.set_sync_debug_mode("error")
    scaler = mixprec.GradScaler("cuda")
    for use_clip in clips:
        iteration(optimizer, scaler, loss, use_clip)


def test_no_sync_in_unscale_and_two_optimizers(no_sync):
    torch.cuda.set_sync_debug_mode("default")
    params = [p for p in with_gradients(resnet_like()) if p.dtype is torch.float32]
    optimizers = [mixprec.SGD(params[:20], **OPTIONS), mixprec.SGD(params[20:], **OPTIONS)]
    loss, scaler = torch.ones((), device="cuda"), mixprec.GradScaler("cuda")
    torch.cuda.set_sync_debug_mode("error")
    for _ in range(2):
        scaler.scale(loss)
        for optimizer in optimizers:
            scaler.unscale_(optimizer)
            scaler.step(optimizer)
        scaler.update()


def test_no_sync_with_torchs_scaler(no_sync):
    torch.cuda.set_sync_debug_mode("default")
    optimizer = mixprec.SGD(with_gradients(resnet_like()), **OPTIONS)
    scaler, loss = torch.amp.GradScaler("cuda"), torch.ones((), device="cuda")
    iteration(optimizer, scaler, loss, False)
    torch.cuda.set_sync_debug_mode("error")
    iteration(optimizer, scaler, loss, False)


@pytest.mark.parametrize("clip", [False, True])
@pytest.mark.parametrize("cls", ["mixprec", "mixprec remainders"])
def test_three_launches(cls, clip):
    optimizer, scaler = OPTIMIZERS[cls](with_gradients(resnet_like())), mixprec.GradScaler()
    loss = torch.ones((), device="cuda")
    iteration(optimizer, scaler, loss, clip)
    scaler.scale(loss)
    torch.cuda.synchronize()
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        if clip:
            scaler.clip_grad_norm_(optimizer, 1.0)
        scaler.step(optimizer)
        scaler.update()
        torch.cuda.synchronize()
    on_device = torch.autograd.DeviceType.CUDA
    names = [event.name for event in profile.events() if event.device_type == on_device]
    names = [name for name in names if "Optimizer.step#" not in name]  # a mark on the time line
    assert len(names) == 3, names
    kernels = ("check_kernel", "sgd_step_kernel", "update_scale")
    for kernel, name in zip(kernels, names, strict=True):
        assert kernel in name


def test_on_another_stream():
    """Gradients come late on a stream of their own; nothing here waits for another stream."""
    params = resnet_like()
    ours, twin = mixprec.SGD(params, **OPTIONS), None
    twin = torch_twin(ours)
    steps = random_steps(torch.Generator().manual_seed(2), params, [True, False, False])
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    our_scaler, torch_scaler = scaler_pair("cuda")
    train(twin, torch_scaler, upcast(steps))
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        for grads in steps:
            torch.cuda._sleep(20_000_000)
            train(ours, our_scaler, [grads])
        assert_same_training(ours, twin)


@pytest.mark.parametrize("clip", [False, True])
@pytest.mark.parametrize("count", [1, 12, 83, 84, 200, 1500])
@pytest.mark.parametrize("cls", ["mixprec", "mixprec remainders"])
def test_graph_replays_have_the_bits_of_eager(cls, count, clip):
    """One iteration captured, replayed over gradients that overflow, against eager."""
    generator = torch.Generator().manual_seed(3)
    sizes = [4097 if i < 4 else 9 for i in range(count)]
    values = [random_tensor(generator, (size,), device="cuda") for size in sizes]
    optimizers, scalers, results = [], [], []
    for _ in range(2):
        params = [torch.nn.Parameter(v.to(DTYPES[i % 3], copy=True)) for i, v in enumerate(values)]
        optimizers.append(OPTIMIZERS[cls](params))
        scalers.append(mixprec.GradScaler("cuda", 1000.0, growth_interval=2))
    overflows = [False, True, False, False, False, True, True, False]
    steps = random_steps(generator, params, overflows)
    loss = torch.ones((), device="cuda")
    for optimizer, scaler in zip(optimizers, scalers, strict=True):
        for param, grad in zip(params_of(optimizer), steps[0], strict=True):
            param.grad = grad.clone()
        iteration(optimizer, scaler, loss, clip)

    def replay_or_call(call, optimizer):
        for grads in steps[1:]:
            for param, grad in zip(params_of(optimizer), grads, strict=True):
                param.grad.copy_(grad)
            call()

    replay_or_call(lambda: iteration(optimizers[0], scalers[0], loss, clip), optimizers[0])
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        iteration(optimizers[1], scalers[1], loss, clip)
    replay_or_call(graph.replay, optimizers[1])
    assert scalers[0].steps_skipped == 3
    assert scalers[1].state_dict() == scalers[0].state_dict()
    for optimizer in optimizers:
        tensors = list(params_of(optimizer))
        tensors += [t for p in params_of(optimizer) for t in optimizer.state[p].values()]
        results.append(tensors)
    for i, (eager, replayed) in enumerate(zip(*results, strict=True)):
        assert_same_bits(replayed, eager, f"tensor {i}")


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA GPUs")
@pytest.mark.parametrize("devices", [("cuda:1",), ("cuda:0", "cuda:1"), ("cpu", "cuda:0")])
def test_devices_that_are_not_current(devices):
    params = [param for device in devices for param in resnet_like(device)]
    ours = mixprec.SGD(params, **OPTIONS)
    twin = torch_twin(ours)
    steps = random_steps(torch.Generator().manual_seed(4), params, [True, False, False, True])
    our_scaler, torch_scaler = scaler_pair("cuda")
    train(ours, our_scaler, steps)
    train(twin, torch_scaler, upcast(steps))
    assert_same_training(ours, twin)
