"""What the processes of test_rank_death.py run; a spawned process imports it by name."""

import os
import time
from datetime import timedelta

import torch
import torch.distributed as dist
from fsdp_jobs import OPTIONS, set_grads, sharded_model
from fsdp_state_jobs import continued, save
from torch.distributed.device_mesh import DeviceMesh

import mixprec

TIMEOUT = 5  # seconds
PATIENCE = 60  # of the rank that hangs: it leaves before the other has ended, if that takes longer


def train(rank, folder, ending):
    torch.set_num_threads(1)
    os.chdir(folder)
    dist.init_process_group(
        "gloo",
        f"file://{folder}/rendezvous",
        rank=rank,
        world_size=2,
        timeout=timedelta(seconds=TIMEOUT),
    )
    # With a GPU init_device_mesh would make a group of its own, without this timeout.
    mesh = DeviceMesh.from_group(dist.group.WORLD, "cpu")
    model = sharded_model(torch.device("cpu"), mesh=mesh)
    optimizer, scaler = mixprec.SGD(model.parameters(), **OPTIONS), mixprec.GradScaler("cpu")
    continued(optimizer, range(3))
    save(model, optimizer)
    set_grads(optimizer, 3, 1.0)
    before = [p.to_local().clone() for p in model.parameters()]
    scaler.scale(torch.zeros(()))
    dist.barrier()
    if rank == 1:
        if ending == "hangs":
            for _ in range(PATIENCE * 10):
                if os.path.exists("seen"):
                    break
                time.sleep(0.1)
            else:
                open("left", "w").close()
        os._exit(0)
    try:
        scaler.step(optimizer)  # waits for the other's found_inf
    except RuntimeError as error:
        unchanged = all(map(torch.equal, before, (p.to_local() for p in model.parameters())))
        torch.save([str(error), unchanged], "seen.tmp")
        os.rename("seen.tmp", "seen")
    os._exit(0)
