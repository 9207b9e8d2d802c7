"""What the processes of test_ddp.py run; see workers.py."""

import contextlib

import torch
import torch.distributed as dist
from helpers import assert_same_training, scaler_pair, torch_twin
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import mixprec
from mixprec import _C
from mixprec._found import Found

OVERFLOWS = (21, 100)  # iterations in which one rank's inputs give gradients that are inf or NaN


def make_model(rank, device, half):
    """Every rank draws other weights: DDP makes them equal when it wraps."""
    torch.manual_seed(rank)
    model = nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.ReLU(), nn.Linear(16, 4))
    model = model.to(device)
    return mixprec.half_weights(model, half) if half else model


def train(rank, device, half, iterations):
    """Twice accumulated, clipped steps beside torch's on fp32 copies of weights and gradients.

    Returns weights, state and the scaler's history at the end, and the overflows that were seen.
    """
    model = make_model(rank, device, half)
    ddp = DistributedDataParallel(model, gradient_as_bucket_view=True, static_graph=True)
    optimizer = mixprec.SGD(ddp.parameters(), lr=0.05, momentum=0.9, weight_decay=0.01)
    twin = torch_twin(optimizer)
    scaler, twin_scaler = scaler_pair(device.type, growth_interval=50)
    autocast = torch.autocast(device.type, half or torch.bfloat16)
    generator = torch.Generator().manual_seed(rank)  # every rank has data of its own
    skipped = []
    for i in range(iterations):
        optimizer.zero_grad()
        for micro in range(2):
            x = torch.randn(5, 8, generator=generator).to(device)
            if i in OVERFLOWS and rank == i % dist.get_world_size():
                x[0, 0] = torch.inf
            # A static graph is learned from the first backward pass, which has to synchronise.
            with ddp.no_sync() if i > 0 and micro == 0 else contextlib.nullcontext():
                with autocast:
                    loss = ddp(x).square().mean()
                scaler.scale(loss).backward()
        assert all(p.grad._is_view() for p in model.parameters())  # of a bucket
        for ours, theirs in zip(ddp.parameters(), twin.param_groups[0]["params"], strict=True):
            theirs.grad = ours.grad.to(torch.float32, copy=True)
        twin_scaler.scale(torch.zeros((), device=device))
        scaler.step(optimizer)
        twin_scaler.step(twin)
        scaler.update()
        twin_scaler.update()
        if scaler.last_step_skipped:
            skipped.append(i)
    assert_same_training(optimizer, twin)
    assert scaler.get_scale() == twin_scaler.get_scale()
    state = [tensor.cpu() for values in optimizer.state.values() for tensor in values.values()]
    return [p.detach().cpu() for p in ddp.parameters()] + state, scaler.get_scale(), skipped


def fp32_under_ddp(rank, device):
    return train(rank, device, None, 200)


def bf16_under_ddp(rank, device):
    return train(rank, device, torch.bfloat16, 200)


def fp16_under_ddp(rank, device):
    return train(rank, device, torch.float16, 200)


def four_replicas(rank, device):
    return train(rank, device, torch.bfloat16, OVERFLOWS[-1] + 5)


def clipped_norm_under_ddp(rank, device):
    """Norms before clipping, which need no reduction: all ranks have the same gradients."""
    ddp = DistributedDataParallel(make_model(rank, device, torch.bfloat16))
    optimizer, scaler = mixprec.SGD(ddp.parameters(), lr=0.1), mixprec.GradScaler(device.type)
    norms = []
    for i in range(3):
        optimizer.zero_grad()
        with torch.autocast(device.type, torch.bfloat16):
            loss = ddp(torch.full((5, 8), rank + i + 1.0, device=device)).square().mean()
        scaler.scale(loss).backward()
        norms.append(scaler.clip_grad_norm_(optimizer, 0.01).item())
        scaler.step(optimizer)
        scaler.update()
    return norms, [p.detach().cpu() for p in ddp.parameters()]


def half_weights_after_wrapping(rank, device):
    """The module shows no sign of its wrapper, in whose buckets the gradients would be lost."""
    model = make_model(rank, device, None)
    before = [(p.data_ptr(), p.dtype) for p in model.parameters()]
    ddp = DistributedDataParallel(model)
    messages = []
    for wrapped in (ddp, model, nn.Sequential(model)):
        try:
            mixprec.half_weights(wrapped)
        except RuntimeError as error:
            messages.append(str(error))
    unchanged = before == [(p.data_ptr(), p.dtype) for p in model.parameters()]
    del ddp, wrapped
    mixprec.half_weights(model)
    return messages, unchanged, model[0].weight.dtype == torch.float16


def graphs_of_ddp(rank, device):
    """Whether and why graphed refuses a DDP model, and one without; how many forms it takes."""
    ddp = DistributedDataParallel(nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8)).to(device))
    refusals = [Found([model]).refusal() for model in (ddp, ddp.module)]
    forms, found = set(), Found([ddp])
    for _ in range(3):
        ddp(torch.ones(4, 8, device=device)).sum().backward()
        forms.add(_C.fingerprint(found.watched)[0])
    return refusals, dist.get_backend(), len(forms)


def trained_by_whole_steps(rank, device, graph):
    """Weights, state and loss scale after 30 steps, one of them with an overflow on one rank."""
    model, ran = make_model(rank, device, torch.float16), []
    model.append(nn.BatchNorm1d(4).to(device))  # its buffers are broadcast
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):
        ddp = DistributedDataParallel(model, gradient_as_bucket_view=True, static_graph=True)
    torch.cuda.synchronize()
    optimizer = mixprec.SGD(ddp.parameters(), lr=0.05, momentum=0.9)
    optimizer.register_step_pre_hook(lambda *_: ran.append(None))  # not called by replays
    scaler = mixprec.GradScaler()

    @mixprec.graphed(enabled=graph)
    def step(x):
        optimizer.zero_grad()
        with mixprec.autocast():
            loss = ddp(x).square().mean()
        scaler.scale(loss).backward()
        scaler.clip_grad_norm_(optimizer, 1.0)
        scaler.step(optimizer)
        scaler.update()
        return loss

    generator = torch.Generator().manual_seed(rank)
    for i in range(30):
        x = torch.randn(5, 8, generator=generator)
        if i == 20 and rank == dist.get_world_size() - 1:
            x[0, 0] = torch.inf
        step(x.to(device))
    assert len(ran) == (12 if graph else 30)  # eleven calls and the capture
    assert scaler.steps_skipped == 1
    state = [tensor for values in optimizer.state.values() for tensor in values.values()]
    scale = torch.tensor(scaler.get_scale())
    return [t.detach().cpu() for t in (*ddp.parameters(), *state, scale)]


def whole_step_in_a_graph(rank, device):
    """Without and with the graph."""
    if "nccl" not in dist.get_backend():
        return "skip: a graph needs NCCL"
    return [trained_by_whole_steps(rank, device, graph) for graph in (False, True)]


JOBS = {
    2: [
        fp32_under_ddp,
        bf16_under_ddp,
        fp16_under_ddp,
        clipped_norm_under_ddp,
        half_weights_after_wrapping,
        graphs_of_ddp,
        whole_step_in_a_graph,
    ],
    4: [four_replicas],
}
