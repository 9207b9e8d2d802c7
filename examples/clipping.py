"""Clipping the gradients' norm, at no further pass over the gradients.

Use it where single batches have gradients far larger than the rest: recurrent networks,
transformers, data with outliers. `scaler.clip_grad_norm_` stands for `scaler.unscale_` and
`torch.nn.utils.clip_grad_norm_`, and also takes fp16 gradients, which `unscale_` refuses.
"""

import torch
from torch import nn

import mixprec

device = "cuda" if torch.cuda.is_available() else "cpu"
half = torch.float16 if device == "cuda" else torch.bfloat16
torch.manual_seed(0)
inputs = torch.randn(4096, 64, device=device)
targets = inputs @ torch.randn(64, 1, device=device) / 8
targets[torch.randperm(4096)[:8]] *= 1000  # outliers

model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 1)).to(device)
model = mixprec.half_weights(model, half)
optimizer = mixprec.SGD(model.parameters(), lr=0.05, momentum=0.9)
scaler = mixprec.GradScaler()

norms, losses = [], []
for _ in range(10):
    for x, y in zip(inputs.split(128), targets.split(128), strict=True):
        optimizer.zero_grad()
        with mixprec.autocast():
            output = model(x)
        # Outside of autocast, in fp32: the square of an outlier is beyond fp16.
        loss = nn.functional.mse_loss(output.float(), y)
        scaler.scale(loss).backward()
        norms.append(scaler.clip_grad_norm_(optimizer, 1.0))  # after backward, before step
        scaler.step(optimizer)
        scaler.update()
        losses.append(loss.detach())

norm = torch.stack(norms)  # of the unscaled gradients, before clipping
median = torch.stack(losses).view(10, -1).median(1).values  # without the batches of outliers
print(f"norm: median {norm.median():.3g}, largest {norm.max():.3g}")
print(f"clipped: {int((norm > 1).sum())} of {len(norm)} steps, skipped: {scaler.steps_skipped}")
print(f"first loss {median[0]:.3f}, last loss {median[-1]:.3f} (medians of an epoch)")
