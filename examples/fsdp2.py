"""fully_shard (FSDP2), and a checkpoint: torchrun --nproc-per-node 2 examples/fsdp2.py

For models that do not fit on one GPU. Each process steps on its shards; one scalar all-reduce tells
all of an overflow and of the norm. The checkpoint loads into any number of processes.
"""

import os

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn import functional as F

import mixprec

dist.init_process_group()
on_cuda = torch.cuda.is_available()
device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if on_cuda else torch.device("cpu")
if on_cuda:
    torch.cuda.set_device(device)
half = torch.float16 if on_cuda else torch.bfloat16

torch.manual_seed(0)  # fully_shard takes each rank's part of its own weights
model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10)).to(device)
policy = MixedPrecisionPolicy(param_dtype=half, reduce_dtype=torch.float32)  # no half_weights
for layer in (model[0], model[2], model):
    fully_shard(layer, mp_policy=policy)
optimizer = mixprec.SGD(model.parameters(), lr=0.1, momentum=0.9)
scaler = mixprec.GradScaler()

teacher = torch.randn(64, 10, generator=torch.Generator().manual_seed(0))
torch.manual_seed(dist.get_rank())  # each process has data of its own
losses = []
for _ in range(50):
    x = torch.randn(32, 64)
    x, y = x.to(device), (x @ teacher).argmax(1).to(device)
    optimizer.zero_grad()
    loss = F.cross_entropy(model(x).float(), y)
    scaler.scale(loss).backward()
    scaler.clip_grad_norm_(optimizer, 1.0)  # the norm over all ranks
    scaler.step(optimizer)
    scaler.update()
    losses.append(loss.detach())

weights, state = get_state_dict(model, optimizer)
dcp.save({"model": weights, "optimizer": state}, checkpoint_id="checkpoint")
dcp.load({"model": weights, "optimizer": state}, checkpoint_id="checkpoint")
set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=state)

if dist.get_rank() == 0:
    print(f"first loss {losses[0]:.3f}, last loss {losses[-1]:.3f}")
dist.destroy_process_group()
