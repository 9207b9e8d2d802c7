"""store_param_remainders: what 16 bits beside a half weight hold, and training with them."""

import copy

import oracle
import pytest
import torch
from helpers import (
    DTYPES,
    HALF,
    HYPERPARAMETERS,
    assert_same_bits,
    on_devices,
    params_of,
    random_steps,
    scaler_pair,
    set_grads,
    torch_twin,
    train,
    upcast,
)
from remainders import (
    assert_same_masters,
    away_from_zero,
    every_weight,
    make_optimizer,
    masters,
    rounded,
)

import mixprec
from mixprec import _C

pytestmark = pytest.mark.usefixtures("poisoned")


def step_to(values, dtype):
    """A parameter that one step takes from 0 to these fp32 values, and its optimizer."""
    param = torch.nn.Parameter(torch.zeros_like(values, dtype=dtype))
    param.grad = torch.zeros_like(param)
    optimizer = mixprec.SGD([param], lr=1.0, momentum=1.0, store_param_remainders=True)
    optimizer.state[param]["momentum_buffer"] = -values
    optimizer.step()
    return param, optimizer


@on_devices
@pytest.mark.parametrize("dtype", HALF)
def test_any_weight_stays_with_any_remainder(device, dtype):
    """Each of the 65,536 weights over stale remainders: its master rounds to it, and so steps."""
    generator = torch.Generator().manual_seed(0)
    stale = torch.randint(-(2**15), 2**15, (2**16, 64), generator=generator, dtype=torch.int16)
    edges = [
        0,
        *(sign * n for n in (1, 2**12 - 1, 2**12, 2**12 + 1, 2**15 - 1) for sign in (-1, 1)),
    ]
    stale[:, : len(edges) + 1] = torch.tensor([*edges, -(2**15)], dtype=torch.int16)
    weight = every_weight(dtype, device).view(-1, 1).expand(-1, 64).contiguous()
    master = _C.to_master(weight, stale)
    assert_same_bits(master.isnan(), weight.isnan())
    known = ~weight.isnan()
    assert_same_bits(rounded(master[known], dtype), weight[known])
    assert_same_bits(master.isfinite(), weight.isfinite())
    is_zero_and_stale = (weight == 0) & (stale.to(device) < 0)
    assert master[is_zero_and_stale].eq(0).all()

    param = torch.nn.Parameter(weight.clone())
    param.grad = torch.zeros_like(param)
    optimizer = mixprec.SGD([param], lr=1.0, store_param_remainders=True)
    optimizer.state[param]["master_remainder"] = stale.to(device, copy=True)
    optimizer.step()
    assert_same_bits(param[known], weight[known])
    assert param[~known].isnan().all()
    written = known & (stale.to(device) > -(2**15))  # which float16's rule never writes
    assert_same_bits(masters(optimizer)[0][written], master[written])


@on_devices
@pytest.mark.parametrize("dtype", HALF)
def test_masters_between_any_two_weights(device, dtype):
    """Each pair of neighbours: at, around and between them, and at and around half-way."""
    weight = every_weight(dtype).float()
    low = weight[weight.isfinite()].unique()
    low, high = low[:-1, None].double(), low[1:, None].double()
    part = torch.rand((1, 20), generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    value = torch.cat([low + (high - low) * part, (low + high) / 2, low], 1).float()
    near = [torch.nextafter(value[:, -2:], torch.tensor(t)) for t in (torch.inf, -torch.inf)]
    value = torch.cat([value, *near], 1).to(device)

    param, optimizer = step_to(value, dtype)
    assert_same_bits(param, rounded(value, dtype))
    remainder = optimizer.state[param]["master_remainder"]
    assert_same_bits(_C.to_remainder(param.detach(), value), remainder)
    (master,) = masters(optimizer)
    error = (master.double() - value).abs()
    if dtype is torch.bfloat16:
        assert error.eq(0).all()
        return
    magnitude = param.detach().double().abs()
    from_half_way = (2.0**-25 - (value - param.detach().double()).abs()).abs()
    assert error[(magnitude > 2**-17) & (from_half_way > 0)].eq(0).all()
    assert error[magnitude > 2**-16].eq(0).all()
    assert error[from_half_way > 2**-41].max() == 2**-41
    assert error.max() == 2**-40


@on_devices
@pytest.mark.parametrize("dtype", HALF)
def test_weights_that_are_not_finite_are_their_own_masters(device, dtype):
    nans = torch.tensor([0x7FFF8001, 0x7FC0FFFF, 0x7F80FFFF, -0x7FFF], dtype=torch.int32)
    overflow = [torch.inf, -torch.inf, 3.4e38, -3.4e38]
    values = torch.cat([nans.view(torch.float32), torch.tensor(overflow)]).to(device)
    param, optimizer = step_to(values, dtype)
    assert param[:4].isnan().all()
    assert param[4:].isinf().all()
    assert_same_bits(masters(optimizer)[0].isnan(), param.isnan())
    assert_same_bits(masters(optimizer)[0][4:], param[4:].float())
    assert optimizer.state[param]["master_remainder"].eq(0).all()


@on_devices
@pytest.mark.parametrize("hyperparameters", HYPERPARAMETERS, ids=str)
@pytest.mark.parametrize("scaled", [True, False])
def test_every_hyperparameter_combination(device, hyperparameters, scaled):
    """fp32, fp16 and bf16 in one group, with skipped steps."""
    ours = make_optimizer(device, DTYPES, **hyperparameters)
    twin = torch_twin(ours)
    our_scaler, torch_scaler = scaler_pair(device, enabled=scaled)
    generator = torch.Generator().manual_seed(1)
    overflows = [scaled, False, scaled, False, False]
    steps = random_steps(generator, params_of(ours), overflows, scale=10.0 if scaled else 0.01)
    train(ours, our_scaler, steps)
    train(twin, torch_scaler, upcast(steps))
    assert_same_masters(ours, twin)


@on_devices
@pytest.mark.parametrize("hyperparameters", HYPERPARAMETERS[::3], ids=str)
def test_thousand_steps_with_schedule_and_overflows(device, hyperparameters):
    ours = make_optimizer(device, DTYPES, (67,), **hyperparameters)
    starts = [param.detach().clone() for param in params_of(ours)]
    twin = torch_twin(ours)
    generator = torch.Generator().manual_seed(2)
    overflows = (torch.rand(1000, generator=generator) < 0.05).tolist()
    scalers = scaler_pair(device, growth_factor=1.001, backoff_factor=0.99)  # the scale stays near
    steps = random_steps(generator, params_of(ours), overflows, scale=20.0)
    for optimizer, scaler, grads in zip((ours, twin), scalers, (steps, upcast(steps)), strict=True):
        schedule = torch.optim.lr_scheduler.OneCycleLR(
            optimizer, 0.01, 1000, cycle_momentum=hyperparameters["momentum"] > 0
        )
        train(optimizer, scaler, grads, after_step=schedule.step)
    assert_same_masters(ours, twin)
    for param, start in zip(params_of(ours), starts, strict=True):
        assert (param != start).any()


@on_devices
@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_float64_bounds_tiny_float16_weights(device, momentum):
    """Around 2^-17 and below each step may add 2^-40 to the error of fp32's arithmetic."""
    generator, count = torch.Generator().manual_seed(3), 100
    value = torch.randn(1001, generator=generator) * 2.0**-18
    param = torch.nn.Parameter(value.to(device, torch.float16))
    optimizer = mixprec.SGD([param], lr=1e-3, momentum=momentum, store_param_remainders=True)
    steps = random_steps(generator, [param], [False] * count, scale=2.0**-14)
    start = param.detach().cpu().double().numpy()
    for grads in steps:
        set_grads(optimizer, grads)
        optimizer.step()
    weight, _ = oracle.sgd(
        start,
        [(g.cpu().double().numpy(), 1.0) for (g,) in steps],
        lr=1e-3,
        momentum=momentum,
        dampening=0,
        nesterov=False,
        weight_decay=0,
        maximize=False,
        scale=1.0,
    )
    bound = oracle.Bounded(weight.value, weight.error + count * 2.0**-40)
    assert bound.holds(masters(optimizer)[0])
    assert not bound.holds(param)  # which the remainders refine
    assert not bound.holds(torch.from_numpy(start))


@on_devices
@pytest.mark.parametrize("dtype", HALF)
def test_fp32_gradients_on_half_parameters(device, dtype):
    if not hasattr(torch.Tensor, "grad_dtype"):
        pytest.skip(f"torch {torch.__version__} has no Tensor.grad_dtype")
    ours = make_optimizer(device, [dtype], lr=0.01, momentum=0.9)
    (param,) = params_of(ours)
    param.grad_dtype = torch.float32
    twin = torch_twin(ours)
    generator = torch.Generator().manual_seed(5)
    steps = random_steps(generator, params_of(twin), [True, False, False, False], scale=10.0)
    for optimizer, scaler in zip((ours, twin), scaler_pair(device), strict=True):
        train(optimizer, scaler, steps)
    assert param.grad.dtype is torch.float32
    assert_same_masters(ours, twin)


@on_devices
def test_clipping(device):
    ours = make_optimizer(device, DTYPES, lr=0.01, momentum=0.9)
    twin, unclipped = copy.deepcopy(ours), copy.deepcopy(ours)
    twin.store_param_remainders = False
    generator = torch.Generator().manual_seed(6)
    steps = random_steps(generator, params_of(ours), [False, True, False], scale=1e3)
    for optimizer, max_norm in ((ours, 0.5), (twin, 0.5), (unclipped, 1e6)):
        scaler = mixprec.GradScaler(device, 1000.0)
        for grads in steps:
            set_grads(optimizer, grads)
            scaler.scale(torch.zeros((), device=device))
            scaler.clip_grad_norm_(optimizer, max_norm)
            scaler.step(optimizer)
            scaler.update()
    for param, master, other in zip(params_of(ours), masters(ours), params_of(twin), strict=True):
        assert_same_bits(master, twin.state[other].get("master", other).detach())
        assert_same_bits(param, rounded(master, param.dtype) if param.dtype in HALF else master)
    for master, other in zip(masters(ours), masters(unclipped), strict=True):
        assert (master != other).any()


@on_devices
def test_skipped_step_changes_nothing(device):
    optimizer = make_optimizer(device, DTYPES, lr=0.01, momentum=0.9)
    scaler = mixprec.GradScaler(device, 1000.0)
    generator = torch.Generator().manual_seed(7)
    good, bad = random_steps(generator, params_of(optimizer), [False, True], scale=10.0)
    train(optimizer, scaler, [bad])
    for param in params_of(optimizer)[1:]:
        assert optimizer.state[param]["master_remainder"].eq(0).all()
    train(optimizer, scaler, [good])

    def everything():
        params = params_of(optimizer)
        return [*params, *(value for p in params for value in optimizer.state[p].values())]

    before = [tensor.detach().clone() for tensor in everything()]
    train(optimizer, scaler, [bad])
    for tensor, expected in zip(everything(), before, strict=True):
        assert_same_bits(tensor, expected)


@on_devices
def test_edited_weights_win(device):
    """A load, pruning, a change of scale and of sign, over the remainders of a training."""
    edits = [
        lambda weight, other: weight.copy_(other),
        lambda weight, other: weight.masked_fill_(other > 1.5, 0.0),
        lambda weight, other: weight.mul_(3.0),
        lambda weight, other: weight.neg_(),
    ]
    for dtype in HALF:
        optimizer = make_optimizer(device, [dtype], lr=0.01, momentum=0.9)
        (param,) = params_of(optimizer)
        generator = torch.Generator().manual_seed(8)
        for edit in edits:
            steps = random_steps(generator, [param], [False, False], scale=10.0)
            train(optimizer, mixprec.GradScaler(device, 1000.0), steps)
            edit(param.data, away_from_zero(generator, param.shape, dtype, device))
            edited = param.detach().clone()
            assert optimizer.state[param]["master_remainder"].ne(0).any()
            assert_same_bits(rounded(masters(optimizer)[0], dtype), edited)
            optimizer.state[param]["momentum_buffer"].zero_()
            param.grad.zero_()
            optimizer.step()
            assert_same_bits(param, edited)


@on_devices
def test_state_bytes(device):
    optimizer = make_optimizer(device, DTYPES, lr=0.01, momentum=0.9)
    set_grads(optimizer, [torch.ones_like(param) for param in params_of(optimizer)])
    optimizer.step()
    for param in params_of(optimizer):
        state = optimizer.state[param]
        size = sum(value.numel() * value.element_size() for value in state.values())
        assert size == param.numel() * (6 if param.dtype in HALF else 4)
