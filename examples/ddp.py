"""Half weights under DistributedDataParallel: torchrun --nproc-per-node 2 examples/ddp.py

For models that fit on one GPU. mixprec communicates nothing here: after the backward pass all
processes have the same gradients, and so skip the same steps and clip by the same norm.
"""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

import mixprec

dist.init_process_group()
on_cuda = torch.cuda.is_available()
device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if on_cuda else torch.device("cpu")
if on_cuda:
    torch.cuda.set_device(device)
half = torch.float16 if on_cuda else torch.bfloat16

model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10)).to(device)
model = mixprec.half_weights(model, half)  # before DDP, whose buckets take the weights' dtype
model = DistributedDataParallel(model, gradient_as_bucket_view=True)
optimizer = mixprec.SGD(model.parameters(), lr=0.1, momentum=0.9)
scaler = mixprec.GradScaler()

teacher = torch.randn(64, 10, generator=torch.Generator().manual_seed(0))
torch.manual_seed(dist.get_rank())  # each process has data of its own
losses = []
for _ in range(50):
    x = torch.randn(32, 64)
    x, y = x.to(device), (x @ teacher).argmax(1).to(device)
    optimizer.zero_grad()
    with mixprec.autocast():
        loss = F.cross_entropy(model(x), y)
    scaler.scale(loss).backward()
    scaler.clip_grad_norm_(optimizer, 1.0)
    scaler.step(optimizer)
    scaler.update()
    losses.append(loss.detach())

if dist.get_rank() == 0:
    print(f"first loss {losses[0]:.3f}, last loss {losses[-1]:.3f}")
dist.destroy_process_group()
