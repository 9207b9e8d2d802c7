"""What the processes of test_zero.py run; see workers.py."""

import torch
from ddp_jobs import make_model
from helpers import assert_same_bits
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import mixprec

OPTIONS = {"lr": 0.05, "momentum": 0.9, "weight_decay": 0.01}


def zero_optimizer(model):
    from torch.distributed.optim import ZeroRedundancyOptimizer

    return ZeroRedundancyOptimizer(model.parameters(), optimizer_class=mixprec.SGD, **OPTIONS)


def train(model, rank, device):
    """Beside mixprec.SGD on copies of all parameters, with the same gradients; to the bit.

    Returns for how many parameters this rank holds state, and the steps skipped.
    """
    ddp = DistributedDataParallel(model)
    optimizer = zero_optimizer(ddp)
    copies = [nn.Parameter(p.detach().clone()) for p in ddp.parameters()]
    whole = mixprec.SGD(copies, **OPTIONS)
    scalers = [mixprec.GradScaler(device.type, init_scale=1000.0) for _ in range(2)]
    generator = torch.Generator().manual_seed(rank)
    for i in range(12):
        optimizer.zero_grad()
        x = torch.randn(5, 8, generator=generator).to(device)
        if (i, rank) == (5, 1):
            x[0, 0] = torch.inf
        with torch.autocast(device.type, torch.bfloat16):
            loss = ddp(x).square().mean()
        scalers[0].scale(loss).backward()
        scalers[1].scale(loss)
        for copy, param in zip(copies, ddp.parameters(), strict=True):
            copy.grad = param.grad.clone()
        scalers[0].step(optimizer)
        scalers[1].step(whole)
        for scaler in scalers:
            scaler.update()
        for copy, param in zip(copies, ddp.parameters(), strict=True):
            assert_same_bits(param, copy)
    return len(optimizer.optim.state), scalers[0].steps_skipped


def fp32_with_zero(rank, device):
    return train(make_model(rank, device, None), rank, device)


def refused_by_zero(rank, device):
    """half_weights leaves norms in fp32; without norms, fp16 gradients can't be unscaled."""
    model = make_model(rank, device, torch.float16)
    messages = []
    try:
        zero_optimizer(model)
    except ValueError as error:
        messages.append(str(error))
    model = DistributedDataParallel(model[:1])
    optimizer, scaler = zero_optimizer(model), mixprec.GradScaler(device.type)
    before = [p.detach().clone() for p in model.parameters()]
    with torch.autocast(device.type, torch.float16):
        loss = model(torch.ones(5, 8, device=device)).sum()
    scaler.scale(loss).backward()
    try:
        scaler.step(optimizer)
    except ValueError as error:
        messages.append(str(error))
    return messages, all(map(torch.equal, before, model.parameters()))


JOBS = {2: [fp32_with_zero, refused_by_zero]}
