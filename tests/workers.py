"""What the processes of test_process_group.py run; a spawned process imports it by name."""

import os

import torch
import torch.distributed as dist
from torch import nn

import mixprec

WORLD_SIZE = 2


def worker(rank, folder):
    """Leaves what each job returned, by its name, in a file."""
    torch.set_num_threads(1)
    rendezvous = f"file://{folder}/rendezvous"
    dist.init_process_group("gloo", rendezvous, rank=rank, world_size=WORLD_SIZE)
    try:
        torch.save({job.__name__: job(rank) for job in JOBS}, f"{folder}/results-{rank}")
    finally:
        dist.destroy_process_group()
    # A thread of gloo may be about to free a broadcast's tensor: with the interpreter at its end,
    # torch aborts then.
    os._exit(0)


def step_with_group(rank):
    """One rank overflows, in the second iteration."""
    param = nn.Parameter(torch.ones(3))
    optimizer = mixprec.SGD([param], lr=0.5)
    scaler = mixprec.GradScaler("cpu", init_scale=4.0, process_group=dist.group.WORLD)
    seen = []
    for i in range(4):
        param.grad = torch.full((3,), torch.inf if (i, rank) == (1, 1) else 1.0)
        scaler.scale(torch.zeros(()))
        if i == 3:
            scaler.clip_grad_norm_(optimizer, 1.0)
        scaler.step(optimizer)
        (found_inf,) = scaler._found_inf_per_device(optimizer).values()
        seen.append((found_inf.item(), param[0].item()))
        scaler.update()
    return seen, scaler.get_scale(), scaler.steps_skipped


def without_gradients_on_one_rank(rank):
    """A rank without gradients takes part in the reduction too, else the others wait for ever."""
    param = nn.Parameter(torch.ones(3))
    scaler = mixprec.GradScaler("cpu", init_scale=4.0, process_group=dist.group.WORLD)
    optimizer = mixprec.SGD([param], lr=0.5)
    if rank == 0:
        param.grad = torch.full((3,), torch.inf)
    scaler.scale(torch.zeros(()))
    scaler.step(optimizer)
    scaler.update()
    return param[0].item(), scaler.get_scale()


def skipping_without_group(rank):
    param = nn.Parameter(torch.ones(3))
    optimizer, scaler = mixprec.SGD([param], lr=0.5), mixprec.GradScaler("cpu", init_scale=4.0)
    param.grad = torch.full((3,), torch.inf if rank == 1 else 1.0)
    scaler.scale(torch.zeros(()))
    scaler.step(optimizer)
    scaler.update()
    return param[0].item(), scaler.get_scale()


def records_with_group(rank):
    """All skip; the one whose gradient overflowed has it on record."""
    param = nn.Parameter(torch.ones(3))
    optimizer = mixprec.SGD([param], lr=0.5)
    scaler = mixprec.GradScaler("cpu", process_group=dist.group.WORLD, record_overflow=True)
    param.grad = torch.full((3,), torch.inf if rank == 1 else 1.0)
    scaler.scale(torch.zeros(()))
    scaler.step(optimizer)
    scaler.update()
    return scaler.steps_skipped, [row[3:] for row in scaler.report_overflow().rows]


def masters_after_broadcast(rank):
    """Replicas are initialised apart and made equal by a broadcast of their weights."""
    torch.manual_seed(rank)
    model = mixprec.half_weights(nn.Linear(9, 7))
    for param in model.parameters():
        dist.broadcast(param.data, 0)
    optimizer = mixprec.SGD(model.parameters(), lr=0.5)
    for param in model.parameters():
        param.grad = torch.zeros_like(param)
    optimizer.step()
    return [optimizer.state[param]["master"] for param in model.parameters()]


JOBS = (
    step_with_group,
    without_gradients_on_one_rank,
    skipping_without_group,
    records_with_group,
    masters_after_broadcast,
)
