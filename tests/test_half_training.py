"""Half weights under autocast train with the bits of plain AMP on fp32 weights."""

import copy

import models
import pytest
import torch
from helpers import assert_same_bits, on_devices

import mixprec

SGD_OPTIONS = {"lr": 0.001, "momentum": 0.9, "weight_decay": 1e-3, "nesterov": True}
STEPS = 50


@pytest.fixture(autouse=True)
def _deterministic():
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def transformer(generator):
    tokens = [
        torch.randint(models.VOCABULARY, (STEPS, 4, models.LENGTH), generator=generator)
        for _ in range(2)
    ]
    return models.Transformer(), list(zip(*tokens, strict=True))


def resnet(generator):
    torchvision = pytest.importorskip("torchvision")
    images = torch.randn((STEPS, 2, 3, 16, 16), generator=generator)
    labels = torch.randint(10, (STEPS, 2), generator=generator)
    model = torchvision.models.resnet18(num_classes=10)
    model.maxpool = torch.nn.Identity()  # for small images; its backward adds atomically on CUDA
    return model, list(zip(images, labels, strict=True))


@on_devices
@pytest.mark.parametrize("make", [transformer, resnet])
@pytest.mark.parametrize("channels_last", [False, True])
def test_equals_plain_amp(device, make, channels_last):
    if channels_last and make is transformer:
        pytest.skip("a transformer has no channels")
    torch.manual_seed(0)
    model, batches = make(torch.Generator().manual_seed(1))
    batches = [(x.to(device), y.to(device)) for x, y in batches]
    plain = model.to(device)
    if channels_last:
        plain.to(memory_format=torch.channels_last)
    half = copy.deepcopy(plain)
    dtype = torch.float16 if device == "cuda" else torch.bfloat16
    mixprec.half_weights(half, dtype)
    losses, scales = [], []
    for each, sgd, scaler, autocast in (
        (plain, torch.optim.SGD, torch.amp.GradScaler(device), torch.autocast(device, dtype)),
        (half, mixprec.SGD, mixprec.GradScaler(device), mixprec.autocast(device)),
    ):
        optimizer = sgd(each.parameters(), foreach=False, **SGD_OPTIONS)
        losses.append(models.train(each, optimizer, scaler, batches, autocast))
        scales.append(scaler.get_scale())
    assert_same_bits(losses[1], losses[0], "losses")
    assert scales[0] == scales[1]
    assert losses[0].isfinite().all()
    full = mixprec.full_precision_state_dict(half, optimizer)
    assert any(value.dtype is dtype for value in half.state_dict().values())
    for name, value in plain.state_dict().items():
        assert_same_bits(full[name], value, name)
        assert_same_bits(half.state_dict()[name], value.to(half.state_dict()[name].dtype), name)
