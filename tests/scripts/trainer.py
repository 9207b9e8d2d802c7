"""A class, an early return, a closure, a graphed step, bf16 without a scaler."""

import torch
from torch import nn
from torch.nn import functional as F

import mixprec


class Trainer:
    def __init__(self, model, use_amp):
        self.model, self.use_amp = model, use_amp
        self.optimizer = mixprec.SGD(model.parameters(), lr=0.1)
        self.scheduler = torch.optim.lr_scheduler.OneCycleLR(self.optimizer, 0.1, 100)
        self.scaler = mixprec.GradScaler(enabled=use_amp)

    def backward(self, loss):
        self.optimizer.zero_grad()
        self.scaler.scale(loss).backward()

    def step(self):
        self.scaler.unscale_(self.optimizer)
        torch.nn.utils.clip_grad_value_(self.model.parameters(), 1.0)
        self.scaler.step(self.optimizer)
        self.scaler.update()

    def train_step(self, x, y):
        with mixprec.autocast(enabled=self.use_amp):
            loss = F.cross_entropy(self.model(x), y)
        if not self.use_amp:
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
            return loss.detach()
        self.backward(loss)
        self.step()
        return loss.detach()

    def fit(self, loader):
        losses = []
        for x, y in loader:
            losses.append(self.train_step(x, y))
            if self.scaler.last_step_skipped:
                continue
            self.scheduler.step()
        return torch.stack(losses).mean().item()


@mixprec.graphed
def bf16_step(model, optimizer, x, y):
    optimizer.zero_grad()
    with torch.autocast("cuda", dtype=torch.bfloat16):
        loss = F.cross_entropy(model(x), y)
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    return loss


def second_order(model, x, y):
    optimizer = torch.optim.LBFGS(model.parameters())

    def closure():
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        return loss

    for _ in range(3):
        optimizer.step(closure)
    embedding = model(x).half()
    return embedding.cpu()
