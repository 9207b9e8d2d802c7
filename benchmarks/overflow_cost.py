"""What GradScaler(record_overflow=True) costs: off and on, taking turns in one run.

    python benchmarks/overflow_cost.py

Medians over rounds, of ResNet-18: scaler.step + update alone, of good steps and of skipped ones, on
a GPU as a graph of steps (its kernels) and eager (the host); then a whole training iteration,
graphed, on random images of CIFAR-10's size. On a CPU a small size, to try it.
"""

import argparse
import statistics
import time
from collections.abc import Callable

import torch
import torchvision
from optimizer_step import make_params
from rich.console import Console
from rich.table import Table
from torch.nn import functional as F

import mixprec

ON_CUDA = torch.cuda.is_available()
DEVICE = "cuda" if ON_CUDA else "cpu"
HALF = torch.float16 if ON_CUDA else torch.bfloat16
STEPS = 50 if ON_CUDA else 3  # in a graph


def steps(record_overflow: bool, overflow: bool) -> Callable[[], None]:
    params = make_params("resnet18", "Linear/Conv half", HALF, DEVICE)
    if overflow:
        params[0].grad.view(-1)[0] = torch.inf
    optimizer = mixprec.SGD(params, lr=1e-6, momentum=0.9)
    scaler = mixprec.GradScaler(init_scale=1.0, record_overflow=record_overflow)
    scaler.scale(torch.zeros((), device=DEVICE))

    def call() -> None:
        for _ in range(STEPS):
            scaler.step(optimizer)
            scaler.update()

    call()
    return call


def graph_of(call: Callable[[], None]) -> Callable[[], None]:
    """As long as `call` lives, which holds the graph's tensors."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph.replay


def iteration(record_overflow: bool, batch_size: int) -> Callable[[], None]:
    torch.manual_seed(0)
    model = torchvision.models.resnet18(num_classes=10)
    model = mixprec.half_weights(model.to(DEVICE, memory_format=torch.channels_last), HALF)
    optimizer = mixprec.SGD(model.named_parameters(), lr=0.01, momentum=0.9)
    scaler = mixprec.GradScaler(record_overflow=record_overflow)
    x = torch.randn(batch_size, 3, 32, 32, device=DEVICE).to(memory_format=torch.channels_last)
    y = torch.randint(10, (batch_size,), device=DEVICE)

    @mixprec.graphed
    def train_step(x: torch.Tensor, y: torch.Tensor) -> None:
        optimizer.zero_grad()
        with mixprec.autocast():
            loss = F.cross_entropy(model(x), y)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()

    for _ in range(5):
        train_step(x, y)
    return lambda: train_step(x, y)


def microseconds(call: Callable[[], None], repeats: int, wait: bool) -> float:
    """One call's, of several; `wait`: until the GPU is done, else until the host is."""
    synchronize = torch.cuda.synchronize if ON_CUDA else lambda: None
    synchronize()
    start = time.perf_counter()
    for _ in range(repeats):
        call()
    if wait:
        synchronize()
    seconds = time.perf_counter() - start
    synchronize()
    return 1e6 * seconds / repeats


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=50 if ON_CUDA else 3)
    parser.add_argument("--batch-size", type=int, default=256 if ON_CUDA else 8)
    args = parser.parse_args()
    both = (False, True)
    good, skipped = ([steps(on, overflow) for on in both] for overflow in both)
    cases = {  # two calls, how often in a round, whether to wait for the GPU, what a call holds
        "good step, host": (good, 1, False, STEPS),
        "skipped step, host": (skipped, 1, False, STEPS),
    }
    if ON_CUDA:
        cases["good step, GPU"] = ([graph_of(call) for call in good], 10, True, STEPS)
        cases["skipped step, GPU"] = ([graph_of(call) for call in skipped], 10, True, STEPS)
    whole = [iteration(on, args.batch_size) for on in both]
    cases[f"iteration, batch {args.batch_size}"] = (whole, 50 if ON_CUDA else 1, True, 1)

    table = Table(title=torch.cuda.get_device_name() if ON_CUDA else "CPU")
    for column in ("microseconds", "off", "on", "on / off"):
        table.add_column(column, justify="right" if table.columns else "left")
    for name, (calls, repeats, wait, parts) in cases.items():
        times: tuple[list[float], list[float]] = ([], [])
        for i in range(args.rounds):
            for which in (0, 1) if i % 2 else (1, 0):
                times[which].append(microseconds(calls[which], repeats, wait) / parts)
        off, on = map(statistics.median, times)
        table.add_row(name, f"{off:.2f}", f"{on:.2f}", f"{on / off:.4f}")
    Console().print(table)


if __name__ == "__main__":
    main()
