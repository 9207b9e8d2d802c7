"""half_weights: what it converts, that nothing is lost, and that training has plain AMP's bits."""

import copy
import weakref

import pytest
import torch
from helpers import HALF, assert_same_bits, on_devices
from torch import nn

import mixprec


class Everything(nn.Module):
    """A module of each kind; `expected` names what is cast."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(3, 4)
        self.without_bias = nn.Linear(3, 4, bias=False)
        self.tied = nn.Linear(3, 4, bias=False)
        self.tied.weight = self.without_bias.weight
        self.conv = nn.ModuleList([nn.Conv1d(2, 2, 1), nn.Conv2d(2, 2, 1), nn.Conv3d(2, 2, 1)])
        self.up = nn.ModuleList(
            [nn.ConvTranspose1d(2, 2, 1), nn.ConvTranspose2d(2, 2, 1), nn.ConvTranspose3d(2, 2, 1)]
        )
        self.embedding = nn.Embedding(4, 3)
        self.head = nn.Linear(3, 4)
        self.head.weight = self.embedding.weight
        self.norms = nn.ModuleList(
            [
                nn.BatchNorm2d(2),
                nn.LayerNorm(2),
                nn.GroupNorm(1, 2),
                nn.InstanceNorm1d(2, affine=True),
            ],
        )
        self.bare = nn.Parameter(torch.randn(3))
        self.linear.extra = nn.Parameter(torch.randn(3))
        self.register_buffer("buffer", torch.randn(3))
        self.recurrent = nn.LSTM(2, 2)
        self.double = nn.Linear(2, 2, dtype=torch.float64)
        layers = ("linear", "conv.0", "conv.1", "conv.2", "up.0", "up.1", "up.2")
        self.expected = {f"{name}.{kind}" for name in layers for kind in ("weight", "bias")}
        self.expected |= {"without_bias.weight", "tied.weight", "head.bias"}


@on_devices
@pytest.mark.parametrize("dtype", HALF)
def test_what_is_converted(device, dtype):
    model = Everything().to(device)
    params, before = dict(model.named_parameters()), copy.deepcopy(model.state_dict())
    assert mixprec.half_weights(model, dtype) is model
    converted = {name for name, value in model.state_dict().items() if value.dtype is dtype}
    assert converted == model.expected
    for name, value in model.state_dict().items():
        assert_same_bits(value, before[name].to(value.dtype), name)
    assert all(param is params[name] for name, param in model.named_parameters())
    assert model.tied.weight is model.without_bias.weight


@on_devices
@pytest.mark.parametrize(
    ("dtype", "value"),
    [
        (torch.float16, 65520.0),  # half-way to what would be the next number: rounds to inf
        (torch.float16, -1e6),
        (torch.float16, torch.nan),
        (torch.bfloat16, 3.4e38),
    ],
)
def test_weight_out_of_range_is_named_and_nothing_changes(device, dtype, value):
    model = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.Conv2d(1, 1, 1)), nn.Linear(2, 2))
    model.to(device)[1][0].weight.data.fill_(value)
    model[0].weight.grad = torch.ones(2, 2, device=device)
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(ValueError, match=r"1\.0\.weight"):
        mixprec.half_weights(model, dtype)
    for name, tensor in model.state_dict().items():
        assert_same_bits(tensor, before[name])
    assert model[0].weight.grad is not None
    optimizer = mixprec.SGD([model[0].weight], lr=0.1)
    optimizer.step()
    assert "master" not in optimizer.state[model[0].weight]


def test_largest_weights_are_kept():
    model = nn.Linear(1, 2, bias=False)
    model.weight.data = torch.tensor([[65519.0], [-65504.0]])
    mixprec.half_weights(model)
    assert model.weight.tolist() == [[65504.0], [-65504.0]]


@on_devices
@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("channels_last", [False, True])
def test_first_masters_are_exact(device, dtype, channels_last):
    model = nn.Conv2d(5, 7, 3).to(device)
    exact = copy.deepcopy(model.state_dict())
    mixprec.half_weights(model, dtype)
    if channels_last:
        model.to(memory_format=torch.channels_last)
    optimizer = mixprec.SGD(model.parameters(), lr=0.1)
    for param in model.parameters():
        param.grad = torch.zeros_like(param)
    optimizer.step()
    for name, param in model.named_parameters():
        assert_same_bits(optimizer.state[param]["master"], exact[name])
        assert optimizer.state[param]["master"].stride() == param.stride()


@pytest.mark.parametrize("load_first", [False, True])
def test_exact_values_are_freed_once_there_is_a_master(load_first):
    """They take as much memory as the masters do."""
    models = [mixprec.half_weights(nn.Linear(3, 4)) for _ in range(2)]
    optimizers = [mixprec.SGD(model.parameters(), lr=0.1, momentum=0.9) for model in models]
    kept = [weakref.ref(param._mixprec_exact) for param in models[load_first].parameters()]
    for param in models[0].parameters():
        param.grad = torch.zeros_like(param)
    optimizers[0].step()
    if load_first:
        assert all(exact() is not None for exact in kept)
        optimizers[1].load_state_dict(optimizers[0].state_dict())
    assert all(exact() is None for exact in kept)


def test_arguments():
    for dtype in (torch.float32, torch.float64, "half", torch.float8_e4m3fn):
        with pytest.raises(ValueError, match="dtype must be"):
            mixprec.half_weights(nn.Linear(2, 2), dtype)
    for grad_dtype in (torch.float64, torch.bfloat16):
        with pytest.raises(ValueError, match="grad_dtype must be"):
            mixprec.half_weights(nn.Linear(2, 2), grad_dtype=grad_dtype)


@on_devices
@pytest.mark.parametrize("dtype", HALF)
def test_grad_dtype_accumulates_in_fp32(device, dtype):
    if not hasattr(torch.Tensor, "grad_dtype"):
        with pytest.raises(RuntimeError, match="grad_dtype"):
            mixprec.half_weights(nn.Linear(2, 2), grad_dtype=torch.float32)
        pytest.skip(f"torch {torch.__version__} has no Tensor.grad_dtype")
    model = mixprec.half_weights(nn.Linear(1, 1), dtype, grad_dtype=torch.float32).to(device)
    for value in (1.0, 2.0**-13):
        x = torch.full((1, 1), value, device=device)
        with torch.autocast(device, dtype):
            model(x).float().sum().backward()
    assert model.weight.grad.dtype is torch.float32
    assert model.weight.grad.item() == 1 + 2.0**-13
    mixprec.SGD(model.parameters(), lr=0.1).step()


@on_devices
@pytest.mark.parametrize("dtype", HALF)
def test_full_precision_state_dict(device, dtype):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)).to(device)
    exact = copy.deepcopy(model.state_dict())
    mixprec.half_weights(model, dtype)
    optimizer = mixprec.SGD(model.parameters(), lr=0.1, momentum=0.9)

    def full():
        result = mixprec.full_precision_state_dict(model, optimizer)
        assert list(result) == list(exact)
        return result

    for name, value in full().items():
        assert_same_bits(value, exact[name])
    for param in model.parameters():
        param.grad = torch.ones_like(param)
    optimizer.step()
    masters = {n: optimizer.state[p].get("master", p) for n, p in model.named_parameters()}
    for name, master in masters.items():
        assert_same_bits(full()[name], master.detach())
    nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)).load_state_dict(full(), strict=True)
    full()["0.weight"].fill_(7)  # not the optimizer's memory
    assert not masters["0.weight"].eq(7).any()
    model[0].weight.data[0] = 0.25
    edited = full()["0.weight"]
    assert edited[0].eq(0.25).all()
    assert_same_bits(edited[1:], masters["0.weight"][1:])
