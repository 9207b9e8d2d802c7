"""DistributedDataParallel: replicas stay equal to the bit, and equal to torch's step."""

import pytest
from ddp_jobs import OVERFLOWS
from helpers import assert_same_bits

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
