"""Half weights and their remainders, for the tests of store_param_remainders."""

import torch
from helpers import HALF, assert_same_bits, params_of, random_tensor

import mixprec
from mixprec import _C


def every_weight(dtype, device="cpu"):
    return torch.arange(-(2**15), 2**15, dtype=torch.int16).view(dtype).to(device)


def rounded(master, dtype):
    """float16: to nearest even. bfloat16: to nearest, half-way away from zero."""
    if dtype is torch.float16:
        return master.to(dtype)
    truncated = master.contiguous().view(torch.int32) & -(2**16)
    inner, outer = (bits.view(torch.float32) for bits in (truncated, truncated + 2**16))
    nearer = (outer.double() - master).abs() <= (master - inner.double()).abs()
    return torch.where(nearer, outer, inner).to(dtype)


def masters(optimizer):
    """What each half parameter's remainder makes of it; other parameters as they are."""
    return [
        _C.to_master(param.detach(), optimizer.state[param]["master_remainder"])
        if param.dtype in HALF
        else param.detach()
        for param in params_of(optimizer)
    ]


def away_from_zero(generator, shape, dtype, device):
    """Weights between 1 and 2 of either sign, which float16's remainders hold exactly."""
    value = random_tensor(generator, shape)
    return (value.sign() * (1 + value.abs() % 1)).to(device, dtype)


def make_optimizer(device, dtypes, shape=(4099,), **options):
    generator = torch.Generator().manual_seed(0)
    values = [away_from_zero(generator, shape, dtype, device) for dtype in dtypes]
    params = [torch.nn.Parameter(value) for value in values]
    return mixprec.SGD(params, store_param_remainders=True, **options)


def assert_same_masters(ours, twin):
    """Masters, weights and momentum are those of an optimizer on fp32 masters."""
    for i, (param, master, expected) in enumerate(
        zip(params_of(ours), masters(ours), params_of(twin), strict=True)
    ):
        assert_same_bits(master, expected.detach(), f"master {i}")
        if param.dtype in HALF:
            assert expected.abs().min() > 2**-16 or param.dtype is torch.bfloat16
            assert_same_bits(param, rounded(expected.detach(), param.dtype), f"parameter {i}")
            assert "master" not in ours.state[param]
        momentum, other = (
            o.state[p].get("momentum_buffer") for o, p in ((ours, param), (twin, expected))
        )
        assert (momentum is None) is (other is None)
        if momentum is not None:
            assert_same_bits(momentum, other, f"momentum {i}")
