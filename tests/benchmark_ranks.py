"""What test_benchmark_ranks.py gives to torchrun: three runs of the benchmark, one interrupted."""

import os
import signal
import sys

import pytest
from benchmark_runs import _train, resnet_cifar, use_tiny_model

import _ranks  # isort: skip  # found by benchmark_runs

OPTIONS = (
    "--data synthetic --train-limit 320 --batch-size 8 --epochs 2 --augment --clip-norm 1 --lr 0.1"
)


def main(device):
    with pytest.MonkeyPatch.context() as patch:
        use_tiny_model(patch)
        run = f"--device {device} {OPTIONS} --modes amp mixprec --out".split()
        codes = [resnet_cifar.main([*run, "whole"])]
        iterate = _train.Training.iterate

        def interrupted(training, x, y):
            iterate(training, x, y)
            if (training.mode, training.step, _ranks.rank()) == ("mixprec", 5, 1):
                for _ in range(2):  # the terminal's and torchrun's
                    os.kill(os.getpid(), signal.SIGINT)

        patch.setattr(_train.Training, "iterate", interrupted)
        codes.append(resnet_cifar.main([*run, "stopped"]))
        patch.setattr(_train.Training, "iterate", iterate)
        codes.append(resnet_cifar.main(["--resume", "stopped"]))
    print(f"rank {_ranks.rank()}: {codes}", flush=True)
    _ranks.leave(0)


if __name__ == "__main__":
    main(sys.argv[1])
