"""A rank that dies, or hangs: the other ends with an error in time, and the checkpoint is whole."""

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from fsdp_jobs import OPTIONS, make_model, tensors_of
from fsdp_state_jobs import continued, load
from helpers import assert_same_bits
from rank_deaths import train

import mixprec


@pytest.mark.filterwarnings("ignore:torch.distributed is")
@pytest.mark.parametrize("ending", ["dies", "hangs"])
def test_other_rank_ends_with_an_error(tmp_path, ending):
    if not dist.is_available():
        pytest.skip("this torch has no distributed package")
    mp.spawn(train, (str(tmp_path), ending), nprocs=2)
    message, unchanged = torch.load(tmp_path / "seen")
    assert message and unchanged
    assert not (tmp_path / "left").exists()
    never_stopped = mixprec.SGD(make_model(torch.device("cpu")).parameters(), **OPTIONS)
    continued(never_stopped, range(5))
    loaded = load(make_model(torch.device("cpu")), tmp_path / "checkpoint")
    for mine, other in zip(loaded, tensors_of(never_stopped), strict=True):
        assert_same_bits(mine, other)
