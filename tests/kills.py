"""A training that is killed again and again: what test_kill.py runs in a process of its own.

It forks its trainings before torch has made a thread: imports alone would take most of the time.
"""

import os
import random
import signal
import sys
import time

import pytest
from benchmark_runs import SMALL, _train, overflow_at_label_2, resnet_cifar, use_tiny_model

KILLS = 30
OPTIONS = f"--device cpu {SMALL} --modes mixprec --epochs 60 --deterministic"


def die():
    os.kill(os.getpid(), signal.SIGKILL)


def die_in_a_save(patch, rng, where):
    """In one of the next saves: when half of the file is written, or all but it is not renamed."""
    left = rng.randint(1, 3)
    save, rename = _train.torch.save, _train.os.replace

    def count_down():
        nonlocal left
        left -= 1
        return left == 0

    def half_written(content, path):
        save(content, path)
        if where == "half written" and count_down():
            os.truncate(path, os.path.getsize(path) // 2)
            die()

    def not_renamed(*paths):
        if where == "not renamed" and count_down():
            die()
        rename(*paths)

    patch.setattr(_train.torch, "save", half_written)
    patch.setattr(_train.os, "replace", not_renamed)


def training(out, prepare):
    """The process of one, which goes on from the last one's checkpoint."""
    process = os.fork()
    if process:
        return process
    with pytest.MonkeyPatch.context() as patch:
        use_tiny_model(patch)
        overflow_at_label_2(patch)
        prepare(patch)
        exists = os.path.exists(f"{out}/checkpoint.pt")
        code = resnet_cifar.main(["--resume", out] if exists else [*OPTIONS.split(), "--out", out])
        os._exit(code)


def main(out):
    rng = random.Random(0)
    killed = 0
    for i in range(KILLS):
        where = ("anywhere", "half written", "not renamed")[i % 3]
        prepare = lambda patch, where=where: die_in_a_save(patch, rng, where)  # noqa: E731
        process = training(out, prepare)
        rng.random()  # the child's draws are its own
        if where == "anywhere":
            time.sleep(rng.uniform(0.05, 0.4))
            os.kill(process, signal.SIGKILL)
        _, status = os.waitpid(process, 0)
        assert os.WIFSIGNALED(status), f"training {i} ended by itself: {status}"
        killed += os.WTERMSIG(status) == signal.SIGKILL
    assert killed == KILLS
    _, status = os.waitpid(training(out, lambda patch: None), 0)
    assert status == 0
    print(f"{killed} killed")


if __name__ == "__main__":
    main(sys.argv[1])
