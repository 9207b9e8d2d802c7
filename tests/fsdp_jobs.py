"""What the processes of test_fsdp.py run; see workers.py."""

import contextlib

import torch
import torch.distributed as dist
from helpers import assert_same_bits, counted_all_reduces, params_of, random_tensor
from torch import nn

import mixprec

with contextlib.suppress(ImportError):  # a torch without distributed
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
    from torch.distributed.tensor import (
        DTensor,
        Replicate,
        Shard,
        distribute_tensor,
        init_device_mesh,
    )

OPTIONS = {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01}


def make_model(device):
    """Rows that two and four ranks can't share out evenly: one has none of the last bias."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 18), nn.ReLU(), nn.Linear(18, 5)).to(device)


def sharded_model(device, shape=(), names=None, mesh=None):
    mesh = mesh or init_device_mesh(device.type, shape, mesh_dim_names=names)
    model = make_model(device)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for module in (model[0], model):
        fully_shard(module, mesh=mesh, mp_policy=policy)
    return model


def set_grads(optimizer, seed, scale, plain=False):
    """The same gradients, whole for plain parameters, and sharded as each DTensor is."""
    generator = torch.Generator().manual_seed(seed)
    for param in params_of(optimizer):
        grad = random_tensor(generator, param.shape, device=param.device, scale=scale)
        if isinstance(param, DTensor):
            grad = distribute_tensor(grad, param.device_mesh, param.placements)
        param.grad = grad


def whole(tensor):
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().cpu().clone()


def tensors_of(optimizer):
    """Weights and momentum, whole: the same on every rank."""
    momentum = [optimizer.state.get(p, {}).get("momentum_buffer") for p in params_of(optimizer)]
    return [whole(t) for t in [*params_of(optimizer), *momentum] if t is not None]


def assert_same(optimizer, expected):
    for mine, other in zip(tensors_of(optimizer), tensors_of(expected), strict=True):
        assert_same_bits(mine, other)


def spoil(optimizer, index, value=torch.inf):
    """In this rank's shard of a gradient alone."""
    shard = params_of(optimizer)[index].grad.to_local()
    if shard.numel():
        shard.view(-1)[-1] = value
    return shard.numel() > 0


def fsdp_training(rank, device):
    """Beside torch on the same DTensors, and beside mixprec on whole tensors, to the bit."""
    model = sharded_model(device, (dist.get_world_size(),))
    ours = mixprec.SGD(model.parameters(), **OPTIONS)
    copies = [nn.Parameter(p.detach().clone()) for p in model.parameters()]
    torchs = torch.optim.SGD(copies, foreach=False, **OPTIONS)
    unsharded = mixprec.SGD([nn.Parameter(p.full_tensor()) for p in model.parameters()], **OPTIONS)
    options = {"init_scale": 1000.0, "growth_interval": 3}
    scalers = [
        mixprec.GradScaler(device.type, **options),
        torch.amp.GradScaler(device.type, **options),
        mixprec.GradScaler(device.type, **options),
    ]
    generator = torch.Generator().manual_seed(rank)
    for i in range(20):
        if i == 10:  # each scaler with the other's optimizer
            scalers[:2] = scalers[1::-1]
        model.zero_grad()
        loss = model(torch.randn(6, 8, generator=generator).to(device)).square().mean()
        scaled = [scaler.scale(loss) for scaler in scalers]
        scaled[0].backward()
        if (i, rank) in ((5, 1), (15, 0)):
            spoil(ours, index=2)
        for optimizer in (torchs, unsharded):
            for param, p in zip(params_of(optimizer), params_of(ours), strict=True):
                is_whole = optimizer is unsharded
                param.grad = p.grad.full_tensor() if is_whole else p.grad.clone()
        for optimizer, scaler in zip((ours, torchs, unsharded), scalers, strict=True):
            scaler.step(optimizer)
            scaler.update()
    assert_same(ours, torchs)
    assert_same(ours, unsharded)
    assert all(type(ours.state[p]["momentum_buffer"]) is DTensor for p in params_of(ours))
    return scalers[1].steps_skipped, [scaler.get_scale() for scaler in scalers]


def overflow_in_one_shard(rank, device):
    """One rank or all overflow, in each parameter: what all find, and whether weights changed."""
    model = sharded_model(device, (dist.get_world_size(),))
    optimizer, scaler = mixprec.SGD(model.parameters(), **OPTIONS), mixprec.GradScaler(device.type)
    before = tensors_of(optimizer)
    seen = []
    for spoiled in (*range(dist.get_world_size()), "all"):
        for index in range(len(params_of(optimizer))):
            for value in (torch.inf, -torch.inf, torch.nan):
                set_grads(optimizer, seed=0, scale=1.0)
                expected = torch.tensor(spoiled in (rank, "all") and spoil(optimizer, index, value))
                expected = expected.to(device, torch.float32)
                dist.all_reduce(expected, dist.ReduceOp.MAX)
                if not expected:
                    continue
                scaler.scale(torch.zeros((), device=device))
                with counted_all_reduces() as calls:
                    kind = torch.inf if index == 2 else 2.0
                    norm = scaler.clip_grad_norm_(optimizer, 1.0, kind) if index else None
                    scaler.step(optimizer)
                (found_inf,) = scaler._found_inf_per_device(optimizer).values()
                seen.append((found_inf.item(), len(calls), norm is None or bool(norm.isnan())))
                scaler.update()
    same = all(map(torch.equal, before, tensors_of(optimizer)))
    return seen, same


def clipped(optimizer, scaler, max_norm, norm_type, set_gradients):
    """Norms that clip_grad_norm_ returned in two steps, and the all-reduces of the second one."""
    norms = []
    for seed in range(2):
        set_gradients(optimizer, seed, 8.0)
        scaler.scale(torch.zeros((), device=params_of(optimizer)[0].device))
        with counted_all_reduces() as calls:
            norms.append(scaler.clip_grad_norm_(optimizer, max_norm, norm_type).item())
            scaler.step(optimizer)
            scaler.update()
    return norms, len(calls)


def norms_of(params, device):
    """For L2 and inf: norms of DTensors, of the same whole tensors, and all-reduces a step."""
    seen = []
    for norm_type in (2.0, torch.inf):
        sharded = mixprec.SGD([nn.Parameter(p.detach().clone()) for p in params], **OPTIONS)
        plain = mixprec.SGD([nn.Parameter(whole(p).to(device)) for p in params], **OPTIONS)
        scalers = [mixprec.GradScaler(device.type, init_scale=8.0) for _ in range(2)]
        ours, calls = clipped(sharded, scalers[0], 0.5, norm_type, set_grads)
        expected, _ = clipped(plain, scalers[1], 0.5, norm_type, set_grads)
        if norm_type == torch.inf:  # an L2 norm may differ by the order of its sum
            assert_same(sharded, plain)
        seen.append((ours, expected, calls))
    return seen


def fsdp_norms(rank, device):
    return norms_of(list(sharded_model(device, (dist.get_world_size(),)).parameters()), device)


def hsdp_norms(rank, device):
    """A replicated dimension is not counted twice, and needs no all-reduce."""
    model = sharded_model(device, (2, 2), ("replicate", "shard"))
    return norms_of(list(model.parameters()), device)


def mixed_placement_norms(rank, device):
    """All that a mesh of FSDP and tensor parallelism can hold, and a plain tensor."""
    mesh = init_device_mesh(device.type, (2, 2), mesh_dim_names=("fsdp", "tp"))
    kinds = [
        (Shard(0), Shard(1)),
        (Shard(0), Shard(0)),
        (Replicate(), Shard(0)),
        (Shard(0), Replicate()),
        (Replicate(), Replicate()),
    ]
    generator = torch.Generator().manual_seed(0)
    values = [random_tensor(generator, (6, 5), device=device) for _ in range(6)]
    sharded = [distribute_tensor(v, mesh, kind) for v, kind in zip(values, kinds, strict=False)]
    return norms_of([*sharded, values[-1]], device)


FOR_ALL = [fsdp_training, overflow_in_one_shard, fsdp_norms]
JOBS = {
    2: FOR_ALL,
    4: [*FOR_ALL, hsdp_norms, mixed_placement_norms],
}
