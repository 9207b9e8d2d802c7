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

import torch
from _batches import MAX_SHIFT
from _config import BenchmarkError, Config
from _modes import build

# Iterations until cuDNN's search for algorithms is over. A graph is captured after them: its memory
# counts as allocated then, and no longer while replays use it.
MEMORY_WARM_UP = 3
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
        self.previous = signal.signal(signal.SIGINT, self.request)
        return self

    def __exit__(self, *_: object) -> None:
        signal.signal(signal.SIGINT, self.previous)

    def request(self, *_: object) -> None:
        self.requested = True
        signal.signal(signal.SIGINT, signal.SIG_DFL)


class Training:
    """One mode with one seed: trains it, and can be saved and restored after any iteration."""

    plain_state = ("step", "checked", "accuracies", "laps_ms", "train_seconds", "peak_memory")

    def __init__(self, mode: str, seed: int, config: Config, data: dict, num_classes: int):
        self.mode, self.seed, self.config, self.data = mode, seed, config, data
        self.device = torch.device(config.device)
        # The ragged last batch is left out: every iteration timed has the same size.
        self.steps_per_epoch = len(data["train"]) // config.batch_size
        total_steps = config.epochs * self.steps_per_epoch
        self.warm_up = min(20, total_steps // 4)

        gc.collect()  # what the mode before left behind
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
            self.memory_before = torch.cuda.memory_allocated()
        if config.compile:
            torch.compiler.reset()
        self.setup = build(mode, seed, num_classes, config)
        # Loss and scale of every step stay on the device until somebody looks; those of the last
        # few steps in a list, since a launch for each would cost the host time.
        self.losses = torch.zeros(total_steps, device=self.device)
        self.scales = torch.zeros(total_steps, device=self.device)
        self.recent: list[torch.Tensor] = []
        self.first_scale = self.setup.scaler.get_scale()
        self.step = self.checked = 0
        self.accuracies: list[float] = []
        self.laps_ms: list[float] = []
        self.train_seconds = 0.0
        self.peak_memory = 0

    def record(self) -> None:
        if self.recent:
            steps = slice(self.step - len(self.recent), self.step)
            self.losses[steps], self.scales[steps] = torch.stack(self.recent).unbind(1)
            self.recent = []

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
        }
        if self.device.type == "cuda":
            state["rng_cuda"] = torch.cuda.get_rng_state()
        return state

    def load_state_dict(self, state: dict) -> None:
        for name in self.plain_state:
            setattr(self, name, state[name])
        self.losses.copy_(state["losses"])
        self.scales.copy_(state["scales"])
        self.setup.model.load_state_dict(state["model"])
        self.setup.optimizer.load_state_dict(state["optimizer"])
        self.setup.scaler.load_state_dict(state["scaler"])
        torch.set_rng_state(state["rng_cpu"])
        if self.device.type == "cuda":
            torch.cuda.set_rng_state(state["rng_cuda"])

    def train_epoch(self, stop: StopFlag, report: Callable[[Training], None]) -> bool:
        """Train to the end of the epoch; False if stopped before it."""
        config, clock, setup = self.config, Clock(self.device.type), self.setup
        epoch, start = divmod(self.step, self.steps_per_epoch)
        if epoch > len(self.accuracies):  # stopped between the epoch's last step and its end
            return True
        order = torch.randperm(
            len(self.data["train"]),
            generator=torch.Generator().manual_seed((self.seed << 20) + epoch),
        )
        order = order[: self.steps_per_epoch * config.batch_size][start * config.batch_size :]
        next_report = began = time.perf_counter()
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        clock.mark()
        for x, y in self.data["train"](
            order, config.batch_size, setup.memory_format, self.shifts(epoch)
        ):
            self.recent.append(setup.step(x, y))
            self.step += 1
            clock.mark()
            if stop.requested:
                break
            if len(clock.marks) - 1 == MEMORY_WARM_UP and self.device.type == "cuda":
                torch.cuda.reset_peak_memory_stats()
            if time.perf_counter() >= next_report:
                self.check()
                report(self)
                next_report = time.perf_counter() + REPORT_SECONDS
        laps = clock.laps()
        self.train_seconds += time.perf_counter() - began
        self.laps_ms += laps[self.warm_up :]
        if self.device.type == "cuda" and len(laps) > MEMORY_WARM_UP:
            peak = torch.cuda.max_memory_allocated() - self.memory_before
            self.peak_memory = max(self.peak_memory, peak)
        self.warm_up = max(0, self.warm_up - len(laps))
        self.check()
        report(self)
        return not stop.requested

    def shifts(self, epoch: int) -> torch.Tensor | None:
        """--augment: of each image, the pixels it moves down and right, and whether it is mirrored.

        The same for every mode and loader, and for a resumed run.
        """
        if not self.config.augment:
            return None
        generator = torch.Generator().manual_seed((self.seed << 20) + epoch)
        count = len(self.data["train"])
        moves = torch.randint(-MAX_SHIFT, MAX_SHIFT + 1, (count, 2), generator=generator)
        return torch.cat((moves, torch.randint(2, (count, 1), generator=generator)), 1)

    @torch.no_grad()
    def evaluate(self, stop: StopFlag) -> bool:
        """Accuracy on the test set in percent, under the mode's autocast; False if stopped."""
        model, count = self.setup.model.eval(), len(self.data["test"])
        correct = torch.zeros((), dtype=torch.int64, device=self.device)
        for x, y in self.data["test"](
            torch.arange(count), self.config.batch_size, self.setup.memory_format
        ):
            with self.setup.autocast():
                correct += (model(x).argmax(1) == y).sum()
            if stop.requested:
                return False
        model.train()
        self.accuracies.append(100 * correct.item() / count)
        return True

    def check(self) -> None:
        """Stop at a loss that is not finite, or a scale under 1: gradients overflow unscaled."""
        self.record()
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
        super().__init__(
            f"{training.mode}, seed {training.seed}: training broke down at step {step + 1} "
            f"(epoch {epoch}): loss {loss:g}, scale {scale:g}. "
            f"Try a smaller --lr (it is {config.lr:g}) or --clip-norm 1"
            + ("" if training.mode == "fp32" or config.dtype == "bf16" else ", or --dtype bf16")
        )


def save_atomically(path: Path, content: Any) -> None:
    """A reader, or a kill in between, finds the old file or the new one whole."""
    temporary = path.with_name(path.name + ".tmp")
    torch.save(content, temporary)
    os.replace(temporary, path)
