"""More than 2^31 elements in one tensor, and byte offsets beyond 4 GiB."""

import pytest
import torch
from helpers import assert_same_bits, needs_cuda

import mixprec

SIZE = 2**31 + 4097  # the last chunk is ragged; in bytes over 2^32 for a half type


def free_gib():
    return torch.cuda.mem_get_info()[0] / 2**30 if torch.cuda.is_available() else 0


def needs_gib(gib):
    reason = f"needs a CUDA GPU with {gib} GiB free, there are {free_gib():.0f}"
    return pytest.mark.skipif(free_gib() < gib, reason=reason)


pytestmark = [pytest.mark.large, needs_cuda]


@pytest.fixture(autouse=True)
def _memory_given_back():
    yield
    torch.cuda.empty_cache()


@needs_gib(10)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_check_reads_the_last_element(dtype):
    param = torch.nn.Parameter(torch.empty(SIZE, dtype=dtype, device="cuda"), requires_grad=False)
    param.grad = param.data.zero_()  # the check does not read the parameter
    optimizer = mixprec.SGD([param], lr=0.1)
    scaler = mixprec.GradScaler("cuda", init_scale=1.0, min_scale=1.0)
    for place, value in ((SIZE - 1, torch.nan), (2**31, torch.inf), (0, 3.0), (SIZE - 1, 4.0)):
        param.grad[place] = value
        scaler.scale(torch.zeros((), device="cuda"))
        norm = scaler.clip_grad_norm_(optimizer, 1.0)
        scaler.update()
        finite = value in (3.0, 4.0)
        assert scaler.last_step_skipped is not finite
        assert not finite or norm.item() == (3.0 if place == 0 else 5.0)
        if not finite:
            param.grad[place] = 0


@needs_gib(32)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_step_updates_every_region(dtype):
    """Parameter, gradient, momentum and master: 12 bytes an element."""
    param = torch.nn.Parameter(torch.zeros(SIZE, dtype=dtype, device="cuda"))
    param.grad = torch.zeros(SIZE, dtype=dtype, device="cuda")
    places = torch.tensor([0, 2**30, 2**31 - 1, 2**31, 2**31 + 4095, SIZE - 1], device="cuda")
    values = torch.arange(1.0, 7.0, device="cuda")
    param.grad[places] = values.to(dtype)
    optimizer = mixprec.SGD([param], lr=0.5, momentum=0.5)
    optimizer.step()
    optimizer.step()
    assert_same_bits(param[places], (-0.5 * values - 0.75 * values).to(dtype))
    assert int(param.count_nonzero()) == len(places)
    assert_same_bits(optimizer.state[param]["momentum_buffer"][places], 1.5 * values)
