"""What the processes of test_process_group.py run; see workers.py."""

import torch
import torch.distributed as dist
from torch import nn

import mixprec


def step_with_group(rank, device):
    """One rank overflows, in the second iteration."""
    param = nn.Parameter(torch.ones(3, device=device))
    optimizer = mixprec.SGD([param], lr=0.5)
    scaler = mixprec.GradScaler(device.type, init_scale=4.0, process_group=dist.group.WORLD)
    seen = []
    for i in range(4):
        param.grad = torch.full_like(param, torch.inf if (i, rank) == (1, 1) else 1.0)
        scaler.scale(torch.zeros((), device=device))
        if i == 3:
            scaler.clip_grad_norm_(optimizer, 1.0)
        scaler.step(optimizer)
        (found_inf,) = scaler._found_inf_per_device(optimizer).values()
        seen.append((found_inf.item(), param[0].item()))
        scaler.update()
    return seen, scaler.get_scale(), scaler.steps_skipped


def without_gradients_on_one_rank(rank, device):
    """A rank without gradients takes part in the reduction too, else the others wait for ever."""
    param = nn.Parameter(torch.ones(3, device=device))
    scaler = mixprec.GradScaler(device.type, init_scale=4.0, process_group=dist.group.WORLD)
    optimizer = mixprec.SGD([param], lr=0.5)
    if rank == 0:
        param.grad = torch.full_like(param, torch.inf)
    scaler.scale(torch.zeros((), device=device))
    scaler.step(optimizer)
    scaler.update()
    return param[0].item(), scaler.get_scale()


def skipping_without_group(rank, device):
    param = nn.Parameter(torch.ones(3, device=device))
    optimizer, scaler = (
        mixprec.SGD([param], lr=0.5),
        mixprec.GradScaler(device.type, init_scale=4.0),
    )
    param.grad = torch.full_like(param, torch.inf if rank == 1 else 1.0)
    scaler.scale(torch.zeros((), device=device))
    scaler.step(optimizer)
    scaler.update()
    return param[0].item(), scaler.get_scale()


def records_with_group(rank, device):
    """All skip; the one whose gradient overflowed has it on record."""
    param = nn.Parameter(torch.ones(3, device=device))
    optimizer = mixprec.SGD([param], lr=0.5)
    scaler = mixprec.GradScaler(device.type, process_group=dist.group.WORLD, record_overflow=True)
    param.grad = torch.full_like(param, torch.inf if rank == 1 else 1.0)
    scaler.scale(torch.zeros((), device=device))
    scaler.step(optimizer)
    scaler.update()
    return scaler.steps_skipped, [row[3:] for row in scaler.report_overflow().rows]


def masters_after_broadcast(rank, device):
    """Replicas are initialised apart and made equal by a broadcast of their weights."""
    torch.manual_seed(rank)
    model = mixprec.half_weights(nn.Linear(9, 7, device=device))
    for param in model.parameters():
        dist.broadcast(param.data, 0)
    optimizer = mixprec.SGD(model.parameters(), lr=0.5)
    for param in model.parameters():
        param.grad = torch.zeros_like(param)
    optimizer.step()
    return [optimizer.state[param]["master"].cpu() for param in model.parameters()]


JOBS = {
    2: [
        step_with_group,
        without_gradients_on_one_rank,
        skipping_without_group,
        records_with_group,
        masters_after_broadcast,
    ]
}
