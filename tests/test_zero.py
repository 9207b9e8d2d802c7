"""ZeroRedundancyOptimizer around mixprec.SGD: fp32 parameters, and errors for the rest."""


def test_state_is_shared_out(processes):
    """The job compares bits with mixprec.SGD on all parameters after every step."""
    results = processes(2, "fp32_with_zero")
    assert [skipped for _, skipped in results] == [1, 1]
    held = [parameters for parameters, _ in results]
    assert sum(held) == 6 and min(held) > 0


def test_half_weights_are_refused(processes):
    for (mixed, fp16), unchanged in processes(2, "refused_by_zero"):
        assert "same dense type" in mixed  # torch's
        assert "Attempting to unscale FP16 gradients" in fp16 and unchanged
