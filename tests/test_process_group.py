"""Several processes: steps are skipped together, and masters of replicas are equal."""

import pytest
import torch
import torch.multiprocessing as mp
import workers


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """What each job of workers.py returned, by rank; a process takes seconds to import torch."""
    if not torch.distributed.is_available():
        pytest.skip("this torch has no distributed package")
    folder = tmp_path_factory.mktemp("processes")
    mp.spawn(workers.worker, (str(folder),), nprocs=workers.WORLD_SIZE)
    return [torch.load(folder / f"results-{rank}") for rank in range(workers.WORLD_SIZE)]


def test_all_ranks_skip_together(results):
    first, second = (result["step_with_group"] for result in results)
    assert first == second
    seen, scale, steps_skipped = first
    assert [found_inf for found_inf, _ in seen] == [0.0, 1.0, 0.0, 0.0]
    assert seen[1][1] == seen[0][1] == 0.875
    assert seen[3][1] < seen[2][1] < seen[1][1]
    assert (scale, steps_skipped) == (2.0, 1)


def test_rank_without_gradients(results):
    assert [result["without_gradients_on_one_rank"] for result in results] == [(1.0, 2.0)] * 2


def test_without_group_each_decides_alone(results):
    alone = [result["skipping_without_group"] for result in results]
    assert alone == [(0.875, 4.0), (1.0, 2.0)]


def test_the_rank_that_overflowed_has_it_on_record(results):
    records = [result["records_with_group"] for result in results]
    assert records == [(1, []), (1, [(3, 0, 0.0, 1, 1)])]


def test_masters_are_the_broadcast_weights(results):
    first, second = (result["masters_after_broadcast"] for result in results)
    for a, b in zip(first, second, strict=True):
        assert torch.equal(a, b)
