"""What looks like a mistake and is none."""

import torch
from torch import nn

model, other = nn.Linear(8, 8).cuda(), nn.Linear(8, 8).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
optimizer_2 = torch.optim.SGD(other.parameters(), lr=0.1)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 10)


def plain_first(loader, scaler, amp):
    for x in loader:
        optimizer.zero_grad()
        loss = model(x).sum()
        if not amp:
            loss.backward()
        else:
            scaler.scale(loss).backward()
        if not amp:
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
        else:
            scaler.step(optimizer)
            scaler.update()


def disabled_scaler(loader, scaler, amp):
    for i, x in enumerate(loader):
        if i > 0:
            scheduler.step()
        optimizer.zero_grad()
        scaler.scale(model(x).sum()).backward()
        if amp:
            scaler.step(optimizer)
            scaler.update()
        else:
            optimizer.step()


def two_losses(x, scaler):
    scaler.scale(model(x).sum()).backward()
    other(x).sum().backward()
    nn.utils.clip_grad_norm_(other.parameters(), 1.0)
    optimizer_2.step()
    scaler.step(optimizer)
    scaler.update()


def backward_elsewhere(x, scaler, helper):
    scaler.scale(model(x).sum()).backward()
    scaler.step(optimizer)
    scaler.update()
    helper.backward(x)
    scaler.step(helper.optimizer)
    scaler.update()
    helper.backward_in_fp32(x)
    optimizer_2.step()
