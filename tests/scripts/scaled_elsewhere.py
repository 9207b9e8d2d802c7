"""A loss that arrives scaled."""

import torch
from torch import nn

model = nn.Linear(8, 8).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
scaler = torch.amp.GradScaler("cuda")


def scaled_loss(x):
    with torch.autocast("cuda"):
        return scaler.scale(model(x).sum())


for _ in range(10):
    optimizer.zero_grad()
    loss = scaled_loss(torch.randn(4, 8, device="cuda"))
    loss.backward()
    scaler.step(optimizer)
    scaler.update()
