"""The whole training step as one replay of a CUDA graph, its batches copied one ahead.

Use it on a GPU where the host launches kernels slower than the GPU runs them: small models and
small batches gain most. On a CPU the decorated function is the plain one.
"""

import time

import torch
from torch import nn

import mixprec

device = "cuda" if torch.cuda.is_available() else "cpu"
half = torch.float16 if device == "cuda" else torch.bfloat16
torch.manual_seed(0)
inputs = torch.randn(4096, 64)
labels = (inputs @ torch.randn(64, 10)).argmax(1)
batches = list(zip(inputs.split(256), labels.split(256), strict=True))  # or a DataLoader


def train(enabled: bool) -> str:
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Dropout(0.1), nn.Linear(256, 10))
    model = mixprec.half_weights(model.to(device), half)
    optimizer = mixprec.SGD(model.parameters(), lr=0.1, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 5)
    scaler = mixprec.GradScaler()

    @mixprec.graphed(enabled=enabled)
    def train_step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        with mixprec.autocast():
            loss = nn.functional.cross_entropy(model(x), y)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        return loss

    losses, seconds = [], []
    for _ in range(5):
        began = time.perf_counter()
        for x, y in mixprec.prefetch(batches):
            loss = train_step(x, y)
        losses.append(loss.item())  # waits for the GPU: once an epoch, outside of the step
        seconds.append(time.perf_counter() - began)
        scheduler.step()  # outside too: a replay runs no Python
    return (
        f"first loss {losses[0]:.3f}, last loss {losses[-1]:.3f}, "
        f"{min(seconds) / len(batches) * 1000:.2f} ms a step"
    )


print("plain:", train(enabled=False))
print("graphed:", train(enabled=True))
