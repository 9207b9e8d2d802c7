"""Training in resnet_cifar.py: the one loop that trains, records and times every mode."""

from __future__ import annotations

import gc
import os
import signal
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import _ranks
import torch
from _batches import random_crops
from _config import BenchmarkError, Config
from _modes import build
from torch.optim.lr_scheduler import CosineAnnealingLR

WARM_UP = 20  # untimed iterations: cuDNN's search, compilation, and a graph's capture by the 6th
REPORT_SECONDS = 0.5  # how often the loop reads a loss back, which waits for the device


class Clock:
    """Times iterations by marks between them: on CUDA events, so that none waits for the device."""

    def __init__(self, device_type: str):
        self.cuda = device_type == "cuda"
        self.marks: list[Any] = []

    def mark(self) -> None:
        if self.cuda:
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            self.marks.append(event)
        else:
            self.marks.append(time.perf_counter())

    def laps(self) -> list[float]:
        """Milliseconds between the marks, which are then forgotten."""
        marks, self.marks = self.marks, []
        if not self.cuda:
            return [(end - start) * 1e3 for start, end in pairwise(marks)]
        torch.cuda.synchronize()
        return [start.elapsed_time(end) for start, end in pairwise(marks)]


class StopFlag:
    """The first Ctrl-C lets the iteration in hand finish and be saved; the second kills at once."""

    requested = False

    def __enter__(self) -> StopFlag:
        self.previous = {signal.SIGINT: signal.signal(signal.SIGINT, self.request)}
        if _ranks.is_on():  # torchrun sends this where it is told to end, and kills after 30 s
            self.previous[signal.SIGTERM] = signal.signal(signal.SIGTERM, self.request)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self.previous.items():
            signal.signal(number, handler)

    def request(self, *_: object) -> None:
        self.requested = True
        if not _ranks.is_on():  # torchrun passes on the Ctrl-C that the terminal has sent as well
            signal.signal(signal.SIGINT, signal.SIG_DFL)


class Training:
    """One mode with one seed: trains it, and can be saved and restored after any iteration."""

    plain_state = ("step", "checked", "accuracies", "laps_ms", "train_seconds", "peak_memory")

    def __init__(self, mode: str, seed: int, config: Config, data: dict, num_classes: int):
        self.mode, self.seed, self.config, self.data = mode, seed, config, data
        self.device = torch.device(config.device)
        # The ragged last batch is left out: every iteration timed has the same size.
        self.steps_per_epoch = len(data["train"]) // config.global_batch_size
        total_steps = config.epochs * self.steps_per_epoch
        # On a CPU, where an iteration is slow and nothing is captured, a short run is timed too.
        self.warm_up = WARM_UP if self.device.type == "cuda" else min(WARM_UP, total_steps // 4)
        self.untimed = self.warm_up  # of it, what is still to come

        gc.collect()  # what the mode before left behind
        if self.device.type == "cuda":
            # cuBLAS's workspaces live until the process ends: without this the first mode would pay
            # for those of all.
            torch._C._cuda_clearCublasWorkspaces()
            torch.cuda.empty_cache()
            self.memory_before = torch.cuda.memory_allocated()
        self.setup = build(mode, seed, num_classes, config)
        self.setup.forward = _ranks.replicated(self.setup.forward)
        # Loss and scale of every step stay on the device until somebody looks.
        self.losses = torch.zeros(total_steps, device=self.device)
        self.scales = torch.zeros(total_steps, device=self.device)
        self.place = torch.zeros(1, dtype=torch.int64, device=self.device)  # `step`, on the device
        self.one = torch.ones(1, device=self.device)
        self.run_step = self.setup.capture(self.recorded_step)
        self.schedule = CosineAnnealingLR(self.setup.optimizer, T_max=config.epochs)
        self.first_scale = self.setup.scaler.get_scale()
        self.step = self.checked = 0
        self.accuracies: list[float] = []
        self.laps_ms: list[float] = []
        self.train_seconds = 0.0
        self.peak_memory = 0

    def state_dict(self) -> dict:
        setup = self.setup
        state = {name: getattr(self, name) for name in self.plain_state}
        state |= {
            "losses": self.losses.cpu(),
            "scales": self.scales.cpu(),
            "rng_cpu": torch.get_rng_state(),
            "model": setup.model.state_dict(),
            "optimizer": setup.optimizer.state_dict(),
            "scaler": setup.scaler.state_dict(),
            "schedule": self.schedule.state_dict(),
        }
        if self.device.type == "cuda":
            state["rng_cuda"] = torch.cuda.get_rng_state()
        return state

    def load_state_dict(self, state: dict) -> None:
        for name in self.plain_state:
            setattr(self, name, state[name])
        self.place.fill_(self.step)
        self.losses.copy_(state["losses"])
        self.scales.copy_(state["scales"])
        self.setup.model.load_state_dict(state["model"])
        self.setup.optimizer.load_state_dict(state["optimizer"])
        for group in self.setup.optimizer.param_groups:
            if torch.is_tensor(group["lr"]):  # came from the file to the CPU
                group["lr"] = group["lr"].to(self.device)
        self.setup.scaler.load_state_dict(state["scaler"])
        self.schedule.load_state_dict(state["schedule"])
        torch.set_rng_state(state["rng_cpu"])
        if self.device.type == "cuda":
            torch.cuda.set_rng_state(state["rng_cuda"])

    def recorded_step(self, x: torch.Tensor, y: torch.Tensor) -> None:
        """One update, and its record.

        Here, where a graph captures that too: launched one by one after each replay, these few
        kernels would take the host longer than the replay.
        """
        loss = self.setup.train_step(x, y)
        self.losses.index_copy_(0, self.place, loss.view(1))
        self.scales.index_copy_(0, self.place, self.setup.scaler.scale(self.one))
        self.place += 1

    def iterate(self, x: torch.Tensor, y: torch.Tensor) -> None:
        self.run_step(x, y)
        self.step += 1

    def train_epoch(self, stop: StopFlag, report: Callable[[Training], None]) -> bool:
        """Train to the end of the epoch; False if stopped before it."""
        config, clock, setup = self.config, Clock(self.device.type), self.setup
        epoch, start = divmod(self.step, self.steps_per_epoch)
        if epoch > len(self.accuracies):  # stopped between the epoch's last step and its end
            return True
        # Drawn for the whole epoch, so that a resumed one goes on with the same images.
        generator = torch.Generator().manual_seed((self.seed << 20) + epoch)
        count = len(self.data["train"])
        size = config.global_batch_size
        taken = slice(start * size, self.steps_per_epoch * size)
        order = _ranks.share(torch.randperm(count, generator=generator)[taken], config.batch_size)
        crops = None
        if config.augment:
            crops = _ranks.share(random_crops(count, generator)[:, taken], config.batch_size)
        first_step = self.step
        next_report = began = time.perf_counter()
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        clock.mark()
        for x, y in self.data["train"](order, config.batch_size, setup.memory_format, crops):
            self.iterate(x, y)
            clock.mark()
            if _ranks.any_stops(stop.requested, self.step):
                break
            if self.untimed == self.warm_up and len(clock.marks) == 2 and clock.cuda:
                # cuDNN's search for algorithms is over. A graph's capture is still to come, and has
                # to be seen: its replays allocate nothing.
                torch.cuda.reset_peak_memory_stats()
            if time.perf_counter() >= next_report:
                self.check()
                report(self)
                next_report = time.perf_counter() + REPORT_SECONDS
        laps = clock.laps()
        self.train_seconds += time.perf_counter() - began
        self.laps_ms += laps[self.untimed :]
        self.untimed = max(0, self.untimed - len(laps))
        if clock.cuda:
            peak = torch.cuda.max_memory_allocated() - self.memory_before
            self.peak_memory = max(self.peak_memory, peak)
        _ranks.summed(self.losses[first_step : self.step]).div_(config.processes)
        self.check()
        report(self)
        return not _ranks.any_stops(stop.requested)

    @torch.no_grad()
    def evaluate(self, stop: StopFlag) -> bool:
        """Accuracy on the test set in percent, under the mode's autocast; False if stopped."""
        model, count = self.setup.model.eval(), len(self.data["test"])
        _ranks.equal_buffers(model)
        own = torch.arange(count)[_ranks.rank() :: _ranks.world_size()]
        correct = torch.zeros((), dtype=torch.int64, device=self.device)
        for x, y in self.data["test"](own, self.config.batch_size, self.setup.memory_format):
            with self.setup.autocast():
                correct += (model(x).argmax(1) == y).sum()
            if stop.requested and not _ranks.is_on():
                return False
        model.train()
        self.accuracies.append(100 * _ranks.summed(correct).item() / count)
        self.schedule.step()
        return True

    def check(self) -> None:
        """Stop at a loss that is not finite, or a scale under 1: gradients overflow unscaled."""
        new = slice(self.checked, self.step)
        losses, scales = self.losses[new], self.scales[new]
        bad = torch.nonzero(~losses.isfinite() | (scales < 1))
        if len(bad):
            index = int(bad[0])
            raise Diverged(self, self.checked + index, losses[index].item(), scales[index].item())
        self.checked = self.step

    def result(self) -> dict:
        scales = self.scales.tolist()
        return {
            "mode": self.mode,
            "seed": self.seed,
            "warm_up": self.warm_up,
            "laps_ms": self.laps_ms,
            "train_seconds": self.train_seconds,
            "peak_memory": self.peak_memory or None,
            "accuracies": self.accuracies,
            "final_scale": scales[-1],
            # A scaler lowers its scale exactly when it skips a step.
            "steps_skipped": sum(
                after < before for before, after in pairwise([self.first_scale, *scales])
            ),
            "losses": self.losses.tolist(),
            "scales": scales,
        }


class Diverged(BenchmarkError):
    def __init__(self, training: Training, step: int, loss: float, scale: float):
        config, epoch = training.config, step // training.steps_per_epoch + 1
        scaled = training.setup.scaler.is_enabled()
        super().__init__(
            f"{training.mode}, seed {training.seed}: training broke down at step {step + 1} "
            f"(epoch {epoch}): loss {loss:g}, scale {scale:g}. "
            f"Try a smaller --lr (it is {config.lr:g}) or --clip-norm 1"
            + (", or --dtype bf16" if scaled and config.dtype == "fp16" else "")
        )


def save_atomically(path: Path, content: Any) -> None:
    """A reader, or a kill in between, finds the old file or the new one whole."""
    temporary = path.with_name(path.name + ".tmp")
    torch.save(content, temporary)
    os.replace(temporary, path)
