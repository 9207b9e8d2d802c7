"""Runs the jobs of the distributed tests: each world size is one spawn, for importing torch takes
seconds. A spawned process imports this by name."""

import importlib
import os
import traceback
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

MODULES = (
    "group_jobs",
    "ddp_jobs",
    "fsdp_jobs",
    "fsdp_state_jobs",
    "zero_jobs",
)  # JOBS of each: {world size: jobs}
# Of these on CUDA: a device mesh makes NCCL groups, and NCCL wants a GPU for each process.
NEED_NCCL = ("fsdp_jobs", "fsdp_state_jobs")


class Processes:
    """Call it with a world size and a job's name for what that job returned, by rank."""

    def __init__(self, folder, device_type):
        self.folder, self.device_type, self.results = folder, device_type, {}

    def __call__(self, world_size, name):
        for size in (2, world_size):  # two save a checkpoint that more of them load
            if size not in self.results:
                self.results[size] = [{}] * size  # where a process crashes
                mp.spawn(worker, (size, self.folder, self.device_type), nprocs=size)
                files = [self.folder / f"results-{rank}-{size}" for rank in range(size)]
                self.results[size] = [torch.load(file) for file in files]
        found = [result.get(name, "an earlier job failed") for result in self.results[world_size]]
        for result in found:
            if isinstance(result, str):
                (pytest.skip if result.startswith("skip") else pytest.fail)(result)
        return found


def worker(rank, world_size, folder, device_type):
    """Leaves what each job returned in a file; after a failure the ranks are no longer in step."""
    os.chdir(folder)
    torch.set_num_threads(1)
    device, backend = torch.device("cpu"), "gloo"
    if device_type == "cuda":
        gpus = torch.cuda.device_count()
        device = torch.device("cuda", rank % gpus)
        # Several processes on one GPU: NCCL from 2.30 on, if this allows it.
        has_nccl = gpus >= world_size or os.environ.get("NCCL_MULTI_RANK_GPU_ENABLE") == "1"
        backend = "cpu:gloo,cuda:nccl" if has_nccl else "gloo"
        torch.cuda.set_device(device)
    dist.init_process_group(
        backend,
        f"file://{folder}/rendezvous-{world_size}",
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=60),
    )
    results = {}
    modules = [importlib.import_module(name) for name in MODULES]
    for job in [job for module in modules for job in module.JOBS.get(world_size, ())]:
        if device.type == "cuda" and backend == "gloo" and job.__module__ in NEED_NCCL:
            results[job.__name__] = "skip: needs a GPU for each process"
            continue
        try:
            results[job.__name__] = job(rank, device)
        except Exception:
            results[job.__name__] = traceback.format_exc()
            break
    torch.save(results, f"results-{rank}-{world_size}")
    dist.destroy_process_group()
    # A thread of gloo may be about to free a broadcast's tensor: with the interpreter at its end,
    # torch aborts then.
    os._exit(0)
