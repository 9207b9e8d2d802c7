"""Gradient accumulation: one step for several micro-batches, whose gradients add up in fp32.

Use it where a batch does not fit into memory. Half weights have half gradients, and each sum of
those is rounded to half; with `grad_dtype=torch.float32` the sums are fp32 and only the
micro-batches' own gradients are rounded.
"""

import torch
from torch import nn

import mixprec

device = "cuda" if torch.cuda.is_available() else "cpu"
half = torch.float16 if device == "cuda" else torch.bfloat16
torch.manual_seed(0)
inputs = torch.randn(4096, 64, device=device)
labels = (inputs @ torch.randn(64, 10, device=device)).argmax(1)
MICRO_BATCHES = 8  # a step

grad_dtype = torch.float32 if hasattr(torch.Tensor, "grad_dtype") else None
if grad_dtype is None:
    print(f"torch {torch.__version__} has no Tensor.grad_dtype (2.10 has): sums are in {half}")

model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10)).to(device)
model = mixprec.half_weights(model, half, grad_dtype=grad_dtype)
optimizer = mixprec.SGD(model.parameters(), lr=0.2, momentum=0.9)
scaler = mixprec.GradScaler()

losses = []
for _ in range(5):
    for i, (x, y) in enumerate(zip(inputs.split(64), labels.split(64), strict=True)):
        if i % MICRO_BATCHES == 0:
            optimizer.zero_grad()
        with mixprec.autocast():
            loss = nn.functional.cross_entropy(model(x), y) / MICRO_BATCHES  # a mean over all
        scaler.scale(loss).backward()  # the scale may not change before the step
        losses.append(loss.detach() * MICRO_BATCHES)
        if i % MICRO_BATCHES == MICRO_BATCHES - 1:
            scaler.clip_grad_norm_(optimizer, 1.0)  # once a step, on the sum
            scaler.step(optimizer)
            scaler.update()
print(f"gradients of {model[0].weight.dtype} weights: {model[0].weight.grad.dtype}")
print(f"first loss {losses[0]:.3f}, last loss {losses[-1]:.3f}")
