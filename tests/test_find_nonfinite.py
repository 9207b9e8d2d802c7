"""mixprec.find_nonfinite names the module in which inf or NaN came up, and leaves no trace."""

from dataclasses import dataclass
from typing import NamedTuple

import pytest
import torch
from helpers import on_devices
from torch import nn
from torch.utils._pytree import register_pytree_node

import mixprec


class Pair(NamedTuple):
    a: torch.Tensor
    b: torch.Tensor


@dataclass
class Output:
    logits: torch.Tensor
    extra: object = None


class Bad(nn.Module):
    """Overflows, and gives its output in a container."""

    def __init__(self, wrap=lambda x: x, value=torch.inf):
        super().__init__()
        self.wrap, self.value = wrap, value

    def forward(self, x):
        return self.wrap(x * self.value)


class Between(nn.Module):
    """What overflows is no module of its own: it comes between two."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        return self.second(self.first(x) / 0)


WRAPS = {
    "tensor": (lambda x: x, "output holds"),
    "tuple": (lambda x: (1, x), "output[1]"),
    "namedtuple": (lambda x: Pair(torch.ones(1), x), "output.b"),
    "dict": (lambda x: {"loss": x}, "output['loss']"),
    "dataclass": (lambda x: Output(torch.ones(1), [x]), "output.extra[0]"),
    "nested": (lambda x: {"a": [torch.arange(3), Output(x)]}, "output['a'][1].logits"),
}


@on_devices
@pytest.mark.parametrize("wrap", WRAPS)
def test_names_the_innermost_module(device, wrap):
    function, where = WRAPS[wrap]
    inner = nn.Sequential(nn.Linear(4, 4), Bad(function))
    model = nn.Sequential(nn.Linear(4, 4), nn.Sequential(inner)).to(device)
    found = mixprec.find_nonfinite(model, torch.ones(2, 4, device=device))
    assert found.name == "1.0.1"
    assert str(found).startswith("1.0.1 (Bad): its ")
    assert where in str(found)
    assert "8 inf, 0 NaN of 8 (torch.float32), and its input is finite" in str(found)
    assert "already" not in str(found)


@on_devices
def test_first_in_the_order_of_execution(device):
    model = nn.Sequential(nn.Linear(4, 4), Bad(value=torch.nan), nn.Linear(4, 4), Bad()).to(device)
    found = mixprec.find_nonfinite(model, torch.ones(1, 4, device=device))
    assert found.name == "1"
    assert "0 inf, 4 NaN" in str(found)


@on_devices
def test_what_is_computed_between_modules_is_their_parents(device):
    model = nn.Sequential(nn.ReLU(), Between()).to(device)
    found = mixprec.find_nonfinite(model, torch.ones(1, 4, device=device))
    assert found.name == "1"
    assert "1 (Between): what it hands to 1.second (Linear) as input[0]" in str(found)


@on_devices
def test_input_of_the_model(device):
    class Keywords(nn.Linear):
        def forward(self, x, *, mask):
            return super().forward(x).masked_fill(mask.isinf(), 0)

    model = Keywords(4, 4).to(device)
    mask = torch.full((4,), torch.inf, device=device)
    found = mixprec.find_nonfinite(model, torch.ones(1, 4, device=device), mask=mask)
    assert found.name == ""
    assert "the model (Keywords): its own input['mask'] holds 4 inf" in str(found)


@on_devices
def test_names_the_parameter_and_the_buffer(device):
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)).to(device).eval()
    with torch.no_grad():
        model[0].bias[1] = torch.nan
    x = torch.ones(2, 4, device=device)
    found = mixprec.find_nonfinite(model, x)
    assert found.name == "0"
    assert "already before: bias holds 0 inf, 1 NaN of 4" in str(found)
    nn.init.zeros_(model[0].bias)
    model[1].running_var[0] = torch.inf
    model[1].running_mean[0] = torch.inf
    found = mixprec.find_nonfinite(model, x)
    assert found.name == "1"
    assert "running_mean holds 1 inf, 0 NaN of 4" in str(found)


@on_devices
@pytest.mark.parametrize("overflow", [False, True])
@pytest.mark.parametrize("training", [False, True])
def test_leaves_no_trace(device, training, overflow):
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), Bad() if overflow else nn.ReLU())
    model = model.to(device).train(training)
    x = torch.randn(8, 4, device=device)
    model(x)
    buffers = dict(model.named_buffers())
    values = {name: buffer.clone() for name, buffer in buffers.items()}
    versions = {name: buffer._version for name, buffer in buffers.items()}
    assert (mixprec.find_nonfinite(model, x) is not None) == overflow
    assert model.training == training
    for name, buffer in model.named_buffers():
        assert buffer is buffers[name]
        assert torch.equal(buffer, values[name])
        assert training or buffer._version == versions[name]
    assert hooks_of(model) == 0


class Replaces(nn.Module):
    """Counts its calls in a buffer that is new each time."""

    def __init__(self):
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x):
        self.calls = self.calls + 1
        if x.isnan().any():
            raise ValueError("NaN came in")
        return x


def hooks_of(model):
    return sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules())


def test_exceptions_of_the_model():
    model = nn.Sequential(Replaces(), nn.Linear(4, 4))
    buffer = model[0].calls
    with pytest.raises(RuntimeError, match="mat1 and mat2"):
        mixprec.find_nonfinite(model, torch.ones(1, 3))
    assert hooks_of(model) == 0
    assert model[0].calls is buffer
    assert buffer == 0
    model = nn.Sequential(Bad(value=torch.nan), Replaces())  # raises after NaN was found
    assert mixprec.find_nonfinite(model, torch.ones(1, 4)).name == "0"
    assert hooks_of(model) == 0


@on_devices
def test_runs_under_the_callers_autocast(device):
    """The product is beyond fp16, not beyond fp32."""
    model = nn.Sequential(nn.Linear(4, 4, bias=False)).to(device)
    nn.init.constant_(model[0].weight, 200.0)
    x = torch.full((1, 4), 200.0, device=device)
    assert mixprec.find_nonfinite(model, x) is None
    with torch.autocast(device, torch.float16):
        found = mixprec.find_nonfinite(model, x)
    assert found.name == "0"
    assert "torch.float16" in str(found)


def test_attention_masks_are_no_finding():
    model = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0)
    x, mask = torch.randn(4, 1, 8), nn.Transformer.generate_square_subsequent_mask(4)
    assert mixprec.find_nonfinite(model, x, src_mask=mask) is None
    x[0, 0, 0] = torch.nan
    assert "input" in mixprec.find_nonfinite(model, x, src_mask=mask).message


class Unnamed:
    """Registered without names of its parts."""

    def __init__(self, part):
        self.part = part


def test_container_without_names_of_its_parts():
    register_pytree_node(Unnamed, lambda u: ([u.part], None), lambda parts, _: Unnamed(*parts))
    found = mixprec.find_nonfinite(nn.Sequential(Bad(Unnamed)), torch.ones(3))
    assert found.name == "0"
