"""mixprec in torchvision's reference training loop and in Hugging Face's Trainer."""

import math

import pytest
import torch
from helpers import on_devices
from torch import nn
from trainers import (
    HALF,
    OVERFLOWS,
    SCALER,
    Run,
    assert_close_run,
    assert_same_run,
    loss_of,
    make_batches,
    ours,
    schedule_for,
    torchs,
    trained,
)

import mixprec


def torchvision_epoch(run, batches, clip_grad_norm=None):
    """The calls of torchvision's references/classification/train.py in their order."""
    model, optimizer, scaler = run
    device = next(model.parameters()).device
    model.train()
    for batch in batches:
        image, target = (tensor.to(device, non_blocking=True) for tensor in batch)
        with torch.amp.autocast(device.type, HALF[device.type]):
            loss = loss_of(model, image, target)
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        if clip_grad_norm is not None:
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), clip_grad_norm)
        scaler.step(optimizer)
        scaler.update()
    return run
