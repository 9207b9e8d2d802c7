"""Hugging Face Accelerate with half weights, accumulation, clipping and a schedule that waits.

A scaler of mixprec.accelerate, set before prepare, is all that a loop needs; it tells Accelerate
of skipped steps, at one sync a step.
"""

import accelerate
import torch
from torch import nn
from torch.nn import functional as F

import mixprec.accelerate

torch.manual_seed(0)
half = torch.float16 if torch.cuda.is_available() else torch.bfloat16
precision = "fp16" if torch.cuda.is_available() else "bf16"
accelerator = accelerate.Accelerator(mixed_precision=precision, gradient_accumulation_steps=2)
accelerator.scaler = mixprec.accelerate.GradScaler()  # before prepare

model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10))
model = mixprec.half_weights(model, half)
optimizer = mixprec.SGD(model.parameters(), lr=0.1, momentum=0.9)
schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=50)
model, optimizer, schedule = accelerator.prepare(model, optimizer, schedule)

teacher = torch.randn(64, 10, device=accelerator.device)
losses = []
for _ in range(100):
    x = torch.randn(32, 64, device=accelerator.device)
    with accelerator.accumulate(model):
        loss = F.cross_entropy(model(x), (x @ teacher).argmax(1))
        accelerator.backward(loss)
        if accelerator.sync_gradients:
            accelerator.scaler.clip_grad_norm_(optimizer, 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    losses.append(loss.detach())
print(f"first loss {losses[0]:.3f}, last loss {losses[-1]:.3f}")
