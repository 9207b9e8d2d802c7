"""DistributedDataParallel: replicas stay equal to the bit, and equal to torch's step."""

import pytest
import torch
import torch.distributed as dist
from ddp_jobs import OVERFLOWS, make_model
from helpers import assert_same_bits, needs_cuda
from torch.nn.parallel import DistributedDataParallel

import mixprec

RUNS = ["fp32_under_ddp", "bf16_under_ddp", "fp16_under_ddp"]


def assert_replicas_agree(results):
    (tensors, scale, skipped), *others = results
    assert tuple(skipped) == OVERFLOWS
    for other_tensors, *others_scaler in others:
        assert others_scaler == [scale, skipped]
        for mine, other in zip(tensors, other_tensors, strict=True):
            assert_same_bits(other, mine)


@pytest.mark.parametrize("run", RUNS)
def test_replicas_stay_equal(processes, run):
    """Ranks begin with other seeds; one rank's overflow skips the step of all."""
    assert_replicas_agree(processes(2, run))


def test_four_replicas_stay_equal(processes):
    assert_replicas_agree(processes(4, "four_replicas"))


def test_norm_needs_no_reduction(processes):
    (norms, weights), (other_norms, other_weights) = processes(2, "clipped_norm_under_ddp")
    assert norms == other_norms and min(norms) > 0.01
    for mine, other in zip(weights, other_weights, strict=True):
        assert_same_bits(other, mine)


def test_half_weights_after_wrapping_is_refused(processes):
    for messages, unchanged, works_without_wrapper in processes(2, "half_weights_after_wrapping"):
        assert len(messages) == 3 and unchanged and works_without_wrapper
        assert all("DistributedDataParallel(half_weights(model))" in m for m in messages)


def test_graph_of_ddp_needs_nccl(processes):
    for (of_ddp, without), backend in processes(2, "graphs_of_ddp"):
        assert without is None
        assert of_ddp is None if "nccl" in backend else "gloo; a graph needs NCCL" in of_ddp


def weights_after_steps(enabled):
    device, ran = torch.device("cuda"), []
    model = make_model(0, device, torch.float16)
    with torch.cuda.stream(torch.cuda.Stream()):
        ddp = DistributedDataParallel(model, gradient_as_bucket_view=True, static_graph=True)
    optimizer = mixprec.SGD(ddp.parameters(), lr=0.05, momentum=0.9)
    scaler = mixprec.GradScaler()

    @mixprec.graphed(enabled=enabled)
    def step(x):
        ran.append(None)
        optimizer.zero_grad()
        with mixprec.autocast():
            loss = ddp(x).square().mean()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        return loss

    generator = torch.Generator().manual_seed(0)
    for i in range(30):
        x = torch.randn(5, 8, generator=generator)
        x[0, 0] = torch.inf if i == 20 else x[0, 0]
        step(x.to(device))
    assert len(ran) == (12 if enabled else 30)  # eleven calls and the capture
    return [*(p.detach().clone() for p in model.parameters()), torch.tensor(scaler.get_scale())]


@needs_cuda
def test_whole_step_with_nccl_in_a_graph(tmp_path):
    """In a world of one process the reducer and NCCL are in the graph all the same."""
    dist.init_process_group("nccl", f"file://{tmp_path}/rendezvous", rank=0, world_size=1)
    try:
        for plain, graph in zip(*map(weights_after_steps, (False, True)), strict=True):
            assert_same_bits(graph, plain)
    finally:
        dist.destroy_process_group()
