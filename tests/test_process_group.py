"""Several processes: steps are skipped together, and masters of replicas are equal."""

import torch


def test_all_ranks_skip_together(processes):
    first, second = processes(2, "step_with_group")
    assert first == second
    seen, scale, steps_skipped = first
    assert [found_inf for found_inf, _ in seen] == [0.0, 1.0, 0.0, 0.0]
    assert seen[1][1] == seen[0][1] == 0.875
    assert seen[3][1] < seen[2][1] < seen[1][1]
    assert (scale, steps_skipped) == (2.0, 1)


def test_rank_without_gradients(processes):
    assert processes(2, "without_gradients_on_one_rank") == [(1.0, 2.0)] * 2


def test_without_group_each_decides_alone(processes):
    assert processes(2, "skipping_without_group") == [(0.875, 4.0), (1.0, 2.0)]


def test_the_rank_that_overflowed_has_it_on_record(processes):
    assert processes(2, "records_with_group") == [(1, []), (1, [(3, 0, 0.0, 1, 1)])]


def test_masters_are_the_broadcast_weights(processes):
    first, second = processes(2, "masters_after_broadcast")
    for a, b in zip(first, second, strict=True):
        assert torch.equal(a, b)
