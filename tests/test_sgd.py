"""mixprec.SGD's arithmetic: bit for bit torch's on fp32 masters, and float64's within the bound."""

import hypothesis.strategies as st
import oracle
import pytest
import torch
from helpers import (
    DTYPES,
    HALF,
    HYPERPARAMETERS,
    SHAPES,
    assert_same_bits,
    assert_same_training,
    on_devices,
    params_of,
    random_steps,
    random_tensor,
    scaler_pair,
    set_grads,
    torch_twin,
    train,
    upcast,
)
from hypothesis import given

import mixprec

pytestmark = pytest.mark.usefixtures("poisoned")


def make_params(generator, shapes_and_dtypes, device):
    return [
        torch.nn.Parameter(random_tensor(generator, shape, dtype, device))
        for shape, dtype in shapes_and_dtypes
    ]


@on_devices
@given(
    shapes_and_dtypes=st.lists(
        st.tuples(st.sampled_from(SHAPES), st.sampled_from(DTYPES)), min_size=1, max_size=6
    ),
    hyperparameters=st.sampled_from(HYPERPARAMETERS),
    overflows=st.lists(st.booleans(), min_size=1, max_size=6),
    seed=st.integers(0, 2**32),
)
def test_equals_torch_on_masters(device, shapes_and_dtypes, hyperparameters, overflows, seed):
    generator = torch.Generator().manual_seed(seed)
    params = make_params(generator, shapes_and_dtypes, device)
    steps = random_steps(generator, params, overflows)
    ours = mixprec.SGD(params, **hyperparameters)
    twin = torch_twin(ours)
    our_scaler, torch_scaler = scaler_pair(device)
    train(ours, our_scaler, steps)
    train(twin, torch_scaler, upcast(steps))
    assert_same_training(ours, twin)


@on_devices
@pytest.mark.parametrize("hyperparameters", HYPERPARAMETERS, ids=str)
@pytest.mark.parametrize("scaled", [True, False])
def test_every_hyperparameter_combination(device, hyperparameters, scaled):
    generator = torch.Generator().manual_seed(1)
    params = make_params(generator, [((4099,), dtype) for dtype in DTYPES], device)
    ours = mixprec.SGD(params, **hyperparameters)
    twin = torch_twin(ours)
    our_scaler, torch_scaler = scaler_pair(device, enabled=scaled)
    steps = random_steps(generator, params, [scaled, False, scaled, False, False])
    train(ours, our_scaler, steps)
    train(twin, torch_scaler, upcast(steps))
    assert_same_training(ours, twin)


@on_devices
@pytest.mark.parametrize("hyperparameters", HYPERPARAMETERS[::3], ids=str)
def test_thousand_steps_with_schedule_and_overflows(device, hyperparameters):
    generator = torch.Generator().manual_seed(2)
    shapes = [((37,), torch.float32), ((5, 9), torch.float16), ((65,), torch.bfloat16)]
    ours = mixprec.SGD(make_params(generator, shapes, device), **hyperparameters)
    twin = torch_twin(ours)
    # One overflow in every 13 steps, so that growth and backoff balance: under a scale that runs
    # away, gradients would vanish.
    places = torch.randint(13, (77,), generator=generator)
    overflows = torch.nn.functional.one_hot(places, 13).bool().flatten()[:1000].tolist()
    steps = random_steps(generator, params_of(ours), overflows, scale=1.0)
    scalers = scaler_pair(device, init_scale=16.0, growth_factor=1.2)
    for optimizer, scaler, grads in zip((ours, twin), scalers, (steps, upcast(steps)), strict=True):
        schedule = torch.optim.lr_scheduler.OneCycleLR(
            optimizer, 0.1, 1000, cycle_momentum=hyperparameters["momentum"] > 0
        )
        train(optimizer, scaler, grads, after_step=schedule.step)
    assert scalers[0].get_scale() == scalers[1].get_scale() and 1 < scalers[0].get_scale() < 1000
    assert_same_training(ours, twin)
    assert all(param.isfinite().all() for param in params_of(ours))


@on_devices
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("hyperparameters", HYPERPARAMETERS, ids=str)
def test_float64_within_forward_error_bound(device, dtype, hyperparameters):
    generator = torch.Generator().manual_seed(3)
    (param,) = make_params(generator, [((501,), dtype)], device)
    ours = mixprec.SGD([param], **hyperparameters)
    steps = random_steps(generator, [param], [True, False, False, True] + [False] * 8)
    inputs = param.detach().cpu().double().numpy()
    grads = [(g.cpu().double().numpy(), 1.0) for (g,) in steps]
    weight, buffer = oracle.sgd(inputs, grads, scale=1000.0, **hyperparameters)
    train(ours, mixprec.GradScaler(device, 1000.0, backoff_factor=0.999999999), steps)
    state = ours.state[param]
    if dtype in HALF:
        assert weight.holds(state["master"])
        weight = weight.rounded_to(str(dtype).split(".")[1])
    assert weight.holds(param)
    assert buffer is None or buffer.holds(state["momentum_buffer"])
    for name, other in {"lr": 0.1001, "weight_decay": 0.0101, "momentum": 0.901}.items():
        if hyperparameters[name] and dtype is torch.float32:  # the bound is tight enough to see it
            changed = {**hyperparameters, name: other}
            assert not oracle.sgd(inputs, grads, scale=1000.0, **changed)[0].holds(param)


@on_devices
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("dampening", "expected"), [(0.0, 0.339), (0.5, 0.534)])
def test_first_step_skipped(device, dtype, dampening, expected):
    """Momentum's first write is on the first step that is not skipped, without dampening."""
    param = torch.nn.Parameter(torch.ones(3, dtype=dtype, device=device))
    optimizer = mixprec.SGD([param], lr=0.1, momentum=0.9, dampening=dampening)
    scaler = mixprec.GradScaler(device, init_scale=4.0, backoff_factor=0.5)
    grads = [float("inf"), 1.0 * 2, 1.0 * 2, 2.0 * 2]  # the overflow halves the scale
    train(optimizer, scaler, [[torch.full_like(param, grad)] for grad in grads[:1]])
    assert "momentum_buffer" not in optimizer.state_dict()["state"].get(0, {})
    train(optimizer, scaler, [[torch.full_like(param, grad)] for grad in grads[1:]])
    if dtype in HALF:
        assert_same_bits(param, optimizer.state[param]["master"].to(dtype))
    exact = optimizer.state[param].get("master", param)
    inputs = [(grad / 2, 1.0) for grad in grads]
    hyperparameters = {"lr": 0.1, "momentum": 0.9, "weight_decay": 0, "maximize": False}
    bound, _ = oracle.sgd(
        1.0, inputs, scale=1.0, dampening=dampening, nesterov=False, **hyperparameters
    )
    assert bound.value == pytest.approx(expected, rel=1e-15)
    assert bound.holds(exact)


@pytest.mark.parametrize("hyperparameters", HYPERPARAMETERS, ids=str)
def test_float64_parameters_equal_torch_on_the_cpu(hyperparameters):
    generator = torch.Generator().manual_seed(4)
    params = make_params(generator, [((4097,), torch.float64), ((3,), torch.float16)], "cpu")
    ours = mixprec.SGD(params, **hyperparameters)
    twin = torch_twin(ours)
    steps = random_steps(generator, params, [True, False, False, True, False])
    our_scaler, torch_scaler = scaler_pair("cpu")
    train(ours, our_scaler, steps)
    train(twin, torch_scaler, upcast(steps))
    assert_same_training(ours, twin)


@on_devices
@pytest.mark.parametrize("dtype", HALF)
def test_fp32_gradients_on_half_parameters(device, dtype):
    if not hasattr(torch.Tensor, "grad_dtype"):
        pytest.skip(f"torch {torch.__version__} has no Tensor.grad_dtype")
    generator = torch.Generator().manual_seed(5)
    (param,) = make_params(generator, [((4099,), dtype)], device)
    param.grad_dtype = torch.float32
    ours = mixprec.SGD([param], **HYPERPARAMETERS[-1])
    twin = torch_twin(ours)
    steps = random_steps(generator, params_of(twin), [True, False, False, False])
    for optimizer, scaler in zip((ours, twin), scaler_pair(device), strict=True):
        train(optimizer, scaler, steps)
    assert ours.param_groups[0]["params"][0].grad.dtype is torch.float32
    assert_same_training(ours, twin)


@on_devices
@pytest.mark.parametrize("dtype", HALF)
def test_weight_is_rounded_to_nearest_even(device, dtype):
    """Every step of 2^-13 from a weight on: all ties, and both sides of each."""
    step = 2.0 ** (-13 if dtype is torch.float16 else -10)
    param = torch.nn.Parameter(torch.ones(64, dtype=dtype, device=device))
    param.grad = (-torch.arange(64, device=device) * step).to(dtype)
    mixprec.SGD([param], lr=1.0).step()
    expected = (1 + torch.arange(64, dtype=torch.float64) * step).to(dtype)
    assert_same_bits(param, expected.to(device))


@on_devices
def test_gradients_are_not_changed(device):
    generator = torch.Generator().manual_seed(6)
    params = make_params(generator, [((4099,), dtype) for dtype in DTYPES], device)
    optimizer = mixprec.SGD(params, **HYPERPARAMETERS[-1])
    (grads,) = random_steps(generator, params, [False])
    set_grads(optimizer, grads)
    scaler = mixprec.GradScaler(device)
    scaler.scale(torch.zeros((), device=device))
    scaler.clip_grad_norm_(optimizer, 0.1)
    scaler.step(optimizer)
    for param, grad in zip(params, grads, strict=True):
        assert_same_bits(param.grad, grad)
