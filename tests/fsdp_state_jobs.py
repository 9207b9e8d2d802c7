"""More of what the processes of test_fsdp.py run: checkpoints and errors; see workers.py."""

import contextlib

import torch
import torch.distributed as dist
from fsdp_jobs import OPTIONS, set_grads, sharded_model, spoil, tensors_of, whole
from helpers import params_of, random_tensor
from torch import nn

import mixprec
from mixprec._found import Found

with contextlib.suppress(ImportError):  # a torch without distributed
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import (
        DTensor,
        Partial,
        Replicate,
        Shard,
        distribute_tensor,
        init_device_mesh,
    )


def checkpoint_saved(rank, device):
    """Three steps, a checkpoint, two more: what another number of processes has to continue to."""
    model = sharded_model(device, (2,))
    optimizer = mixprec.SGD(model.parameters(), **OPTIONS)
    continued(optimizer, range(3))
    save(model, optimizer)
    continued(optimizer, range(3, 5))
    return tensors_of(optimizer)


def save(model, optimizer):
    model_state, optimizer_state = get_state_dict(model, optimizer)
    dcp.save({"model": model_state, "optimizer": optimizer_state}, checkpoint_id="checkpoint")


def continued(optimizer, seeds):
    for seed in seeds:
        set_grads(optimizer, seed, 1.0)
        optimizer.step()
    return tensors_of(optimizer)


def load(model, folder="checkpoint"):
    optimizer = mixprec.SGD(model.parameters(), lr=1.0, momentum=0.1)
    model_state, optimizer_state = get_state_dict(model, optimizer)
    dcp.load({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=folder)
    set_state_dict(model, optimizer, model_state_dict=model_state, optim_state_dict=optimizer_state)
    return continued(optimizer, range(3, 5))


def checkpoint_loaded(rank, device):
    return load(sharded_model(device, (dist.get_world_size(),)))


def refusals(rank, device):
    """Messages of what can't work, each before anything changes."""
    world = dist.get_world_size()
    model = sharded_model(device, (world,))
    optimizer = mixprec.SGD(model.parameters(), **OPTIONS)
    before = tensors_of(optimizer)
    mesh = init_device_mesh(device.type, (world,))
    other_mesh = init_device_mesh(device.type, (world, 1))
    last = params_of(optimizer)[-1]
    partial = DTensor.from_local(torch.ones(5, device=device), mesh, [Partial()])
    ones = torch.ones(4, device=device)
    foreign = nn.Parameter(distribute_tensor(ones, other_mesh, [Shard(0), Replicate()]))
    messages = []

    def refused(function, *args):
        try:
            function(*args)
        except (RuntimeError, ValueError) as error:
            messages.append(str(error))

    refused(mixprec.half_weights, model)
    set_grads(optimizer, seed=0, scale=1.0)
    last.grad = partial
    refused(optimizer.step)
    set_grads(optimizer, seed=0, scale=1.0)
    optimizer.add_param_group({"params": [foreign]})
    foreign.grad = foreign.detach().clone()
    scaler = mixprec.GradScaler(device.type)
    scaler.scale(torch.zeros((), device=device))
    refused(scaler.step, optimizer)
    del optimizer.param_groups[1]
    same = all(map(torch.equal, before, tensors_of(optimizer)))
    return messages, same and not optimizer.state, Found([model]).refusal()


def norm_beyond_fp32(rank, device):
    """Finite gradients whose squares are not: that skips the step too, and the norm is inf."""
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    param = nn.Parameter(distribute_tensor(torch.ones(2, device=device), mesh, [Shard(0)]))
    optimizer, scaler = mixprec.SGD([param], lr=1.0), mixprec.GradScaler(device.type, 1.0)
    param.grad = distribute_tensor(torch.full((2,), 3e38, device=device), mesh, [Shard(0)])
    scaler.scale(torch.zeros((), device=device))
    norm = scaler.clip_grad_norm_(optimizer, 1.0)
    scaler.step(optimizer)
    scaler.update()
    return norm.item(), param.full_tensor().tolist(), scaler.steps_skipped


def gradient_on_one_rank(rank, device):
    """The other joins the all-reduce, whatever gradients it has, and its state has the same keys.

    Its shard of the one row is empty besides; the first of two steps is skipped.
    """
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    param = nn.Parameter(distribute_tensor(torch.ones(1, 3, device=device), mesh, [Shard(0)]))
    optimizer = mixprec.SGD([param], lr=1.0, momentum=0.9)
    scaler = mixprec.GradScaler(device.type, 4.0)
    grad = distribute_tensor(torch.full((1, 3), torch.inf, device=device), mesh, [Shard(0)])
    param.grad = grad if rank == 0 else None
    scaler.scale(torch.zeros((), device=device))
    scaler.step(optimizer)
    scaler.update()
    skipped = scaler.get_scale()
    param.grad = grad
    scaler.step(optimizer)
    scaler.update()
    return skipped, scaler.get_scale(), sorted(optimizer.state_dict()["state"].get(0, {}))


def full_precision_of_shards(rank, device):
    """bf16 weights without a policy: masters or remainders as DTensors, and whole, in fp32."""
    found = []
    for remainders in (False, True):
        torch.manual_seed(0)
        model = nn.Linear(8, 5).to(device, torch.bfloat16)
        fully_shard(model, mesh=init_device_mesh(device.type, (dist.get_world_size(),)))
        optimizer = mixprec.SGD(model.parameters(), store_param_remainders=remainders, **OPTIONS)
        generator = torch.Generator().manual_seed(0)
        for _ in range(3):
            for param in model.parameters():
                grad = random_tensor(generator, param.shape, torch.bfloat16, device, scale=1.0)
                param.grad = distribute_tensor(grad, param.device_mesh, param.placements)
            optimizer.step()
        full = mixprec.full_precision_state_dict(model, optimizer)
        found.append({name: whole(value) for name, value in full.items()})
    return found


def report_of_one_rank(rank, device):
    """Names what this rank's shards hold, without a collective for the others to join."""
    model = sharded_model(device, (dist.get_world_size(),))
    optimizer = mixprec.SGD(model.named_parameters(), **OPTIONS)
    scaler = mixprec.GradScaler(device.type)
    set_grads(optimizer, seed=0, scale=1.0)
    if rank == 1:
        spoil(optimizer, index=0)
    scaler.scale(torch.zeros((), device=device))
    scaler.step(optimizer)
    return [str(scaler.report_overflow())] if rank == 1 else []


JOBS = {
    2: [
        checkpoint_saved,
        refusals,
        norm_beyond_fp32,
        gradient_on_one_rank,
        full_precision_of_shards,
        report_of_one_rank,
    ],
    4: [checkpoint_loaded],
}
