"""mixprec.GradScaler with torch's optimizers: torch's results, whoever skips the step."""

import pytest
import torch
from helpers import (
    DTYPES,
    assert_same_bits,
    assert_same_training,
    on_devices,
    params_of,
    random_steps,
    random_tensor,
    scaler_pair,
    torch_twin,
    train,
    upcast,
)

import mixprec

KINDS = [{"foreach": False}, {"foreach": True}, {"fused": True}]
CLASSES = {
    "SGD": lambda params, **kind: torch.optim.SGD(params, lr=0.1, momentum=0.9, **kind),
    "Adam": lambda params, **kind: torch.optim.Adam(params, lr=0.1, **kind),
    "AdamW": lambda params, **kind: torch.optim.AdamW(params, lr=0.1, **kind),
}


@on_devices
@pytest.mark.parametrize("cls", CLASSES)
@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize("unscale", [False, True])
def test_as_under_torchs_scaler(device, cls, kind, unscale):
    results = []
    for scaler in scaler_pair(device):
        generator = torch.Generator().manual_seed(0)
        shapes = ((4099,), (3, 5), (0,), (1,))
        params = [
            torch.nn.Parameter(random_tensor(generator, shape, device=device)) for shape in shapes
        ]
        optimizer = CLASSES[cls](params, **kind)
        # torch's fused SGD reads momentum that it never wrote if its first step is skipped
        steps = random_steps(generator, params, [False, True, False, True, True, False, False])
        if unscale:
            scale = scaler.scale
            scaler.scale = lambda outputs, scaler=scaler, o=optimizer, scale=scale: (
                scale(outputs),
                scaler.unscale_(o),
            )
        train(optimizer, scaler, steps)
        state = [v for p in params for v in optimizer.state[p].values() if v is not None]
        results.append([*params, *state, scaler._scale, scaler._growth_tracker])
    for ours, torchs in zip(*results, strict=True):
        assert_same_bits(ours, torchs)


@on_devices
@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_overflow_by_unscaling_is_skipped(device, kind):
    param = torch.nn.Parameter(torch.ones(3, device=device))
    optimizer = torch.optim.SGD([param], lr=0.1, **kind)
    train(optimizer, mixprec.GradScaler(device, 0.5), [[torch.full_like(param, 3e38)]])
    assert param.detach().eq(1).all()


@on_devices
def test_found_inf_is_zero_or_one(device):
    """torch's fused kernels test for equality with 1, so two devices or checks may not add up."""
    params = [torch.nn.Parameter(torch.ones(3, device=device)) for _ in range(2)]
    for param in params:
        param.grad = torch.full_like(param, torch.inf)
    optimizer = torch.optim.SGD(params, lr=0.1, fused=True)
    seen = []
    optimizer.register_step_pre_hook(lambda *_: seen.append(optimizer.found_inf.item()))
    scaler = mixprec.GradScaler(device)
    scaler.scale(torch.zeros((), device=device))
    scaler.step(optimizer)
    assert seen == [1.0]
    assert scaler._combined({"a": torch.ones(()), "b": torch.ones(())}).item() == 1.0


@on_devices
def test_grad_scale_of_the_user_counts(device):
    results = []
    for scaler in scaler_pair(device, init_scale=8.0):
        param = torch.nn.Parameter(torch.ones(3, device=device))
        optimizer = torch.optim.SGD([param], lr=1.0, fused=True)
        optimizer.grad_scale = torch.full((), 4.0, device=device)
        train(optimizer, scaler, [[torch.full_like(param, 16.0)]])
        results += params_of(optimizer)
    assert results[0].detach().eq(0.5).all()
    assert_same_bits(results[0], results[1])


@on_devices
def test_sparse_gradients(device):
    results = []
    for scaler in scaler_pair(device, init_scale=8.0):
        embedding = torch.nn.Embedding(10, 3, sparse=True, device=device)
        torch.nn.init.ones_(embedding.weight)
        optimizer = torch.optim.SGD(embedding.parameters(), lr=1.0)
        for factor in (1.0, torch.inf, 2.0):
            optimizer.zero_grad()
            chosen = embedding(torch.tensor([1, 1, 7], device=device))
            scaler.scale(chosen.sum() * factor).backward()
            scaler.step(optimizer)
            scaler.update()
        results.append(embedding.weight)
    assert_same_bits(results[0], results[1])
    assert results[0][1].eq(1 - 2 - 4).all()


@on_devices
def test_torchs_scaler_with_our_optimizer(device):
    """Its check has no bf16 kernel on CUDA, so not there."""
    generator = torch.Generator().manual_seed(0)
    dtypes = DTYPES if device == "cpu" else DTYPES[:2]
    params = [torch.nn.Parameter(random_tensor(generator, (4099,), d, device)) for d in dtypes]
    ours = mixprec.SGD(params, lr=0.1, momentum=0.9, nesterov=True)
    twin = torch_twin(ours)
    steps = random_steps(generator, params, [True, False, False, True, False])
    train(ours, torch.amp.GradScaler(device, 1000.0, growth_interval=3), steps)
    train(twin, torch.amp.GradScaler(device, 1000.0, growth_interval=3), upcast(steps))
    assert_same_training(ours, twin)


@on_devices
def test_is_torchs_sgd_and_scaler(device):
    optimizer = mixprec.SGD([torch.nn.Parameter(torch.ones(3, device=device))], lr=0.1)
    assert isinstance(optimizer, torch.optim.SGD)
    assert optimizer._step_supports_amp_scaling
    assert isinstance(mixprec.GradScaler(device), torch.amp.GradScaler)
    assert mixprec.GradScaler()._device == ("cuda" if torch.cuda.is_available() else "cpu")
