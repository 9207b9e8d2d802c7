"""The AMP loop of torch's tutorials with only its imports changed: seconds, on CUDA or a CPU."""

import torch
from torch import nn

from mixprec import SGD, GradScaler, autocast  # instead of torch.optim, torch.amp and torch

device = "cuda" if torch.cuda.is_available() else "cpu"
torch.manual_seed(0)

# Ten classes: the label is the largest of ten hidden linear features of the input.
inputs = torch.randn(4096, 64, device=device)
labels = (inputs @ torch.randn(64, 10, device=device)).argmax(1)

model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10)).to(device)
loss_fn = nn.CrossEntropyLoss()
optimizer = SGD(model.parameters(), lr=0.1, momentum=0.9)
scaler = GradScaler()

for epoch in range(5):
    for input, label in zip(inputs.split(256), labels.split(256), strict=True):
        optimizer.zero_grad()
        with autocast(device):
            loss = loss_fn(model(input), label)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
    print(f"epoch {epoch + 1}: loss {loss.item():.3f}, scale {scaler.get_scale():g}")
