"""A small transformer, and training by the loop that torch documents for AMP."""

import torch
from torch import nn

VOCABULARY, LENGTH, WIDTH = 17, 6, 16


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norms = nn.ModuleList([nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)])
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 32), nn.GELU(), nn.Linear(32, WIDTH, bias=False))

    def forward(self, x):
        q, k, v = self.qkv(self.norms[0](x)).chunk(3, -1)
        attention = (q @ k.transpose(-2, -1) * WIDTH**-0.5).softmax(-1)
        x = x + self.out(attention @ v)
        return x + self.mlp(self.norms[1](x))


class Transformer(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.position = nn.Parameter(torch.randn(LENGTH, WIDTH) / 10)
        self.blocks = nn.Sequential(Block(), Block())
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, x):
        return self.head(self.norm(self.blocks(self.tokens(x) + self.position)))


def train(model, optimizer, scaler, batches, autocast):
    """The losses of each iteration."""
    losses = []
    for x, y in batches:
        optimizer.zero_grad()
        with autocast:
            output = model(x)
            loss = nn.functional.cross_entropy(output.flatten(0, -2), y.flatten())
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        losses.append(loss.detach())
    return torch.stack(losses)
