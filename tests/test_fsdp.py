"""FSDP2: steps on shards are those on whole tensors, and all ranks skip and clip together."""

import pytest
import torch
from fsdp_jobs import make_model
from fsdp_state_jobs import load
from helpers import assert_same_bits

WORLD_SIZES = pytest.mark.parametrize("world_size", [2, 4])


@WORLD_SIZES
def test_training_on_shards(processes, world_size):
    """The job compares bits with torch on the same DTensors and with mixprec on whole tensors."""
    for skipped, scales in processes(world_size, "fsdp_training"):
        assert skipped == 2
        assert len(set(scales)) == 1


@WORLD_SIZES
def test_overflow_in_one_shard_skips_all(processes, world_size):
    for seen, same in processes(world_size, "overflow_in_one_shard"):
        assert len(seen) >= 3 * 3 * world_size
        assert all(each == (1.0, 1, True) for each in seen)  # one all-reduce a step
        assert same


NORMS = [
    (2, "fsdp_norms", 1),
    (4, "fsdp_norms", 1),
    (4, "hsdp_norms", 1),
    (4, "mixed_placement_norms", 2),
]


@pytest.mark.parametrize("world_size, job, all_reduces", NORMS)
def test_norm_over_the_mesh(processes, world_size, job, all_reduces):
    results = processes(world_size, job)
    for (l2, expected_l2, calls), (inf, expected_inf, _) in results:
        assert l2 == pytest.approx(expected_l2, rel=2**-22)
        assert inf == expected_inf and calls == all_reduces
    assert results == [results[0]] * world_size  # the same bits on every rank


@pytest.fixture
def saved(processes):
    return processes(2, "checkpoint_saved")


def assert_continues(tensors, saved):
    for mine, other in zip(tensors, saved[0], strict=True):
        assert_same_bits(mine, other)


def test_checkpoint_of_two_in_four_processes(processes, saved):
    for tensors in processes(4, "checkpoint_loaded"):
        assert_continues(tensors, saved)


@pytest.mark.filterwarnings("ignore:torch.distributed is")
def test_checkpoint_of_two_in_one_process(processes, saved):
    device = torch.device(processes.device_type)
    assert_continues(load(make_model(device), processes.folder / "checkpoint"), saved)


def test_refused_before_anything_changes(processes):
    for messages, unchanged, no_graph in processes(2, "refusals"):
        half_weights, partial, meshes = messages
        assert "leave half_weights out" in half_weights
        assert "redistribute() the gradient" in partial and "parameter 3 of group 0" in partial
        assert "another device mesh" in meshes and "parameter 0 of group 1" in meshes
        assert unchanged and "fully_shard" in no_graph


def test_norm_beyond_fp32_skips(processes):
    assert processes(2, "norm_beyond_fp32") == [(torch.inf, [1.0, 1.0], 1)] * 2


def test_gradient_on_one_rank(processes):
    assert processes(2, "gradient_on_one_rank") == [(2.0, 1.0, ["momentum_buffer"])] * 2


def test_full_precision_of_half_shards(processes):
    for masters, remainders in processes(2, "full_precision_of_shards"):
        assert list(masters) == ["weight", "bias"]
        for name, value in masters.items():
            assert value.dtype is torch.float32 and (value != value.bfloat16().float()).any()
            assert_same_bits(remainders[name], value)


def test_report_on_one_rank(processes):
    line = "0.weight ([9, 8], torch.float32): 1 inf, 0 NaN of 72, largest finite "
    nothing, (report,) = processes(2, "report_of_one_rank")
    assert not nothing and report.startswith(line) and "\n" not in report
