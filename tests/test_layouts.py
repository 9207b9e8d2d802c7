"""Memory: any dense order, alignment and gradient, lists of any length, sizes around a chunk."""

import pytest
import torch
from helpers import (
    DTYPES,
    HALF,
    assert_same_bits,
    assert_same_training,
    on_devices,
    random_steps,
    random_tensor,
    scaler_pair,
    set_grads,
    torch_twin,
    train,
    upcast,
)

import mixprec

OPTIONS = {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.01}

# Each makes a (6, 5, 3, 4) tensor of its values in another order of memory.
LAYOUTS = {
    "contiguous": lambda t: t.contiguous(),
    "channels_last": lambda t: t.contiguous(memory_format=torch.channels_last),
    "transposed": lambda t: t.permute(3, 1, 0, 2).contiguous().permute(2, 1, 3, 0),
}
LOOSE = {
    "every second": lambda t: torch.stack((t, torch.full_like(t, torch.nan)), -1)[..., 0],
    "expanded": lambda t: t[:, :1].expand(-1, 5, -1, -1),
    "one value": lambda t: t[0, 0, 0, 0].expand(t.shape),
}


def generator_of(seed):
    return torch.Generator().manual_seed(seed)


def check_against_torch(ours, steps, device, changes=lambda grad: grad):
    """Three steps of both, the twin's gradients contiguous."""
    twin = torch_twin(ours)
    our_scaler, torch_scaler = scaler_pair(device)
    train(twin, torch_scaler, upcast([[g.contiguous() for g in grads] for grads in steps]))
    for grads in steps:
        our_scaler.scale(torch.zeros((), device=device))
        set_grads(ours, grads)
        for param in ours.param_groups[0]["params"]:
            param.grad = changes(param.grad)
        our_scaler.step(ours)
        our_scaler.update()
    assert_same_training(ours, twin)


@on_devices
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("param_layout", LAYOUTS)
@pytest.mark.parametrize("grad_layout", [*LAYOUTS, *LOOSE])
def test_layouts_of_parameter_and_gradient(device, dtype, param_layout, grad_layout):
    value = random_tensor(generator_of(0), (6, 5, 3, 4), dtype, device)
    param = torch.nn.Parameter(LAYOUTS[param_layout](value))
    strides = param.stride()
    ours = mixprec.SGD([param], **OPTIONS)
    change = {**LAYOUTS, **LOOSE}[grad_layout]
    steps = random_steps(generator_of(1), [param], [True, False, False])
    steps = [[change(grad) for grad in grads] for grads in steps]
    if grad_layout in LOOSE:
        steps = steps[1:]
    check_against_torch(ours, steps, device, change)
    assert param.stride() == ours.state[param]["momentum_buffer"].stride() == strides


@on_devices
@pytest.mark.parametrize("dtype", DTYPES)
def test_layout_of_parameter_changed_later(device, dtype):
    param = torch.nn.Parameter(random_tensor(generator_of(0), (6, 5, 3, 4), dtype, device))
    ours = mixprec.SGD([param], **OPTIONS)
    twin = torch_twin(ours)
    steps = random_steps(generator_of(1), [param], [False, False])
    for optimizer, scaler, grads in zip(
        (ours, twin), scaler_pair(device), (steps, upcast(steps)), strict=True
    ):
        train(optimizer, scaler, grads[:1])
        param.data = LAYOUTS["channels_last"](param.data)
        train(optimizer, scaler, grads[1:])
    assert_same_training(ours, twin)


@on_devices
@pytest.mark.parametrize("shape", [(1, 5, 1, 4), (1, 1, 1, 1), (7, 1)])
def test_strides_of_dimensions_of_one_mean_nothing(device, shape):
    value = random_tensor(generator_of(0), shape, torch.float16, device)
    odd = [999 if size == 1 else stride for size, stride in zip(shape, value.stride(), strict=True)]
    param = torch.nn.Parameter(value)
    steps = random_steps(generator_of(1), [param], [False, False])
    odd_grad = lambda grad: grad.as_strided(shape, odd)  # noqa: E731
    ours = mixprec.SGD([param], **OPTIONS)
    check_against_torch(ours, steps, device, odd_grad)
    buffer = ours.state[param]["momentum_buffer"]
    ours.state[param]["momentum_buffer"] = buffer.as_strided(shape, odd)
    param.grad = steps[0][0]
    ours.step()
    assert ours.state[param]["momentum_buffer"].data_ptr() == buffer.data_ptr()


def within(buffer, offset, value):
    """A view of `buffer` that begins `offset` elements after its start, with this value."""
    view = buffer[offset : offset + value.numel()]
    view.copy_(value)
    return view


@on_devices
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tensor", ["param", "grad", "momentum_buffer", "master"])
def test_every_start_offset_within_16_bytes(device, dtype, tensor):
    if tensor == "master" and dtype is torch.float32:
        pytest.skip("an fp32 parameter has no master")
    for size in (1, 3, 8195):
        for offset in range(4 if tensor in ("momentum_buffer", "master") else 16 // dtype.itemsize):
            values = random_tensor(generator_of(offset), (3, size), device=device)
            weight, grad = values[0].to(dtype), values[1].to(dtype)
            buffers = {
                "param": torch.full((size + 16,), 77.0, dtype=dtype, device=device),
                "grad": torch.full((size + 16,), torch.nan, dtype=dtype, device=device),
                "momentum_buffer": torch.full((size + 16,), 77.0, device=device),
                "master": torch.full((size + 16,), 77.0, device=device),
            }
            start = dict.fromkeys(buffers, 0) | {tensor: offset}
            param = torch.nn.Parameter(within(buffers["param"], start["param"], weight))
            ours = mixprec.SGD([param], **OPTIONS)
            twin = torch_twin(ours)
            (twin_param,) = twin.param_groups[0]["params"]
            param.grad = within(buffers["grad"], start["grad"], grad)
            twin_param.grad = grad.float()
            state = {"momentum_buffer": values[2]}
            if dtype in HALF:
                state["master"] = weight.float()
            for name, value in state.items():
                ours.state[param][name] = within(buffers[name], start[name], value)
            twin.state[twin_param]["momentum_buffer"] = values[2].clone()
            ours.step()
            twin.step()
            assert_same_training(ours, twin)
            for name, buffer in buffers.items():  # written in place, and nothing around it
                outside = torch.cat((buffer[: start[name]], buffer[start[name] + size :]))
                assert bool((outside == 77).all()) is (name != "grad")
            if dtype is not torch.float16:
                scaler = mixprec.GradScaler(device, init_scale=8.0)
                scaler.scale(torch.zeros((), device=device))
                scaler.unscale_(ours)
                assert_same_bits(param.grad, grad / 8)
                assert buffers["grad"].isnan().sum() == 16


# What one launch of the step and of the check takes on CUDA (small and large list), +-1.
CAPACITIES = [(list_size + more) for list_size in (83, 706, 174, 1477) for more in (-1, 0, 1)]


@on_devices
@pytest.mark.parametrize("count", [*CAPACITIES, 3000])
def test_lists_of_any_length(device, count):
    dtypes = [DTYPES[i % 3] for i in range(count)]
    values = random_tensor(generator_of(0), (count, 5), device=device)
    params = [
        torch.nn.Parameter(value[: i % 6].to(dtype))
        for i, (value, dtype) in enumerate(zip(values, dtypes, strict=True))
    ]
    ours = mixprec.SGD(params, **OPTIONS)
    twin = torch_twin(ours)
    steps = random_steps(generator_of(1), params, [False, False])
    overflow = [grad.clone() for grad in steps[0]]
    last = max(i for i, grad in enumerate(overflow) if grad.numel() > 0)
    overflow[last][-1] = torch.inf
    steps.insert(1, overflow)
    our_scaler, torch_scaler = scaler_pair(device)
    train(ours, our_scaler, steps)
    train(twin, torch_scaler, upcast(steps))
    assert_same_training(ours, twin)


@on_devices
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [4095, 4096, 4097, 8191, 8192, 8193, 32768, 32769, 100_003])
def test_sizes_around_chunks(device, dtype, size):
    params = [
        torch.nn.Parameter(random_tensor(generator_of(i), (n,), dtype, device))
        for i, n in enumerate((1, size, 0, 5))
    ]
    ours = mixprec.SGD(params, **OPTIONS)
    check_against_torch(ours, random_steps(generator_of(9), params, [False, True, False]), device)
