"""Arguments that make no sense are refused at once."""

import copy
import math

import pytest
import torch
from helpers import on_devices

import mixprec


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lr": -0.1}, "learning rate"),
        ({"momentum": -0.1}, "momentum"),
        ({"weight_decay": -0.1}, "weight_decay"),
        ({"nesterov": True}, "Nesterov"),
        ({"nesterov": True, "momentum": 0.9, "dampening": 0.1}, "Nesterov"),
        ({"differentiable": True}, "differentiable"),
        ({"foreach": True, "fused": True}, "cannot be `True` together"),
    ],
)
def test_hyperparameters(options, message):
    with pytest.raises((ValueError, RuntimeError), match=message):
        mixprec.SGD([torch.nn.Parameter(torch.ones(3))], **options)


@on_devices
@pytest.mark.parametrize("norm_type", [1.0, 0.0, -math.inf, math.nan])
def test_norm_type(device, norm_type):
    optimizer, scaler = (
        mixprec.SGD([torch.nn.Parameter(torch.ones(3, device=device))]),
        mixprec.GradScaler(device),
    )
    scaler.scale(torch.zeros((), device=device))
    with pytest.raises(ValueError, match="norm_type must be"):
        scaler.clip_grad_norm_(optimizer, 1.0, norm_type)


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"growth_factor": 1.0}, AssertionError),
        ({"backoff_factor": 1.0}, AssertionError),
        *(({"init_scale": value}, ValueError) for value in (0.0, -1.0, math.inf, math.nan)),
        ({"min_scale": 0.0}, ValueError),
        ({"min_scale": 2.0**17}, ValueError),
        ({"max_scale": 1.0}, ValueError),
        ({"hysteresis": 0}, ValueError),
    ],
)
def test_arguments_of_the_scaler(options, error):
    with pytest.raises(error):
        mixprec.GradScaler("cpu", **options)
    mixprec.GradScaler("cpu", enabled=False, **options)


@on_devices
@pytest.mark.parametrize("value", [0.0, -1.0, math.inf, math.nan])
def test_new_scale(device, value):
    scaler = mixprec.GradScaler(device)
    scaler.scale(torch.zeros((), device=device))
    with pytest.raises(ValueError, match="new_scale must be positive and finite"):
        scaler.update(value)
    assert scaler.get_scale() == 2.0**16


def test_loading_an_empty_state():
    scaler = mixprec.GradScaler("cpu")
    before = copy.copy(scaler.state_dict())
    with pytest.raises(RuntimeError, match="empty"):
        scaler.load_state_dict(mixprec.GradScaler("cpu", enabled=False).state_dict())
    assert scaler.state_dict() == before


@on_devices
@pytest.mark.filterwarnings("ignore:optimizer contains a parameter group with duplicate")
def test_parameter_twice(device):
    param = torch.nn.Parameter(torch.ones(3, device=device))
    with pytest.raises(ValueError, match="twice"):
        mixprec.SGD([param, param], lr=0.1)
    optimizer = mixprec.SGD([param], lr=0.1)
    other = torch.nn.Parameter(torch.ones(3, device=device))
    for group in ([other, other], [param]):
        with pytest.raises(ValueError, match=r"twice|more than one"):
            optimizer.add_param_group({"params": group})
    assert [group["params"] for group in optimizer.param_groups] == [[param]]
