"""DistributedDataParallel: replicas stay equal to the bit, and equal to torch's step."""

import pytest
import torch
import torch.distributed as dist
from ddp_jobs import OVERFLOWS, whole_step_in_a_graph
from helpers import assert_same_bits, needs_cuda

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
    for (of_ddp, without), backend, forms in processes(2, "graphs_of_ddp"):
        assert without is None and forms == 1  # which a graph would have to hold
        assert of_ddp is None if "nccl" in backend else "gloo; a graph needs NCCL" in of_ddp


def test_whole_step_in_a_graph(processes):
    """Bits of training without the graph; one rank's overflow skips the step of all in it too."""
    plain, *others = [run for runs in processes(2, "whole_step_in_a_graph") for run in runs]
    for other in others:
        for mine, expected in zip(other, plain, strict=True):
            assert_same_bits(mine, expected)


@needs_cuda
def test_whole_step_in_a_graph_of_one_process(tmp_path):
    """The reducer and NCCL are in it all the same."""
    dist.init_process_group("nccl", f"file://{tmp_path}/rendezvous", rank=0, world_size=1)
    try:
        plain, graph = whole_step_in_a_graph(0, torch.device("cuda"))
        for mine, expected in zip(graph, plain, strict=True):
            assert_same_bits(mine, expected)
    finally:
        dist.destroy_process_group()
