"""What resnet_cifar.py shows while it trains: a progress bar, TensorBoard events."""

from __future__ import annotations

import time
from pathlib import Path

from _train import Training
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeRemainingColumn


class TrainingBar(Progress):
    """Progress of one training, nothing where there is no terminal.

    The loop refreshes it: rich's own thread would take the time it draws from the loop's.
    """

    def __init__(self, name: str, training: Training, console: Console):
        super().__init__(
            "{task.description}",
            BarColumn(),
            MofNCompleteColumn(),
            "{task.fields[status]}",
            TimeRemainingColumn(),
            console=console,
            auto_refresh=False,
            transient=True,
            disable=not console.is_terminal,
        )
        self.bar = self.add_task(name, total=len(training.losses), status="")
        self.restart(training)

    def restart(self, training: Training) -> None:
        """Count images/s from here on: an evaluation has passed."""
        self.seen = training.step, time.perf_counter()

    def show(self, training: Training) -> None:
        if self.disable:
            return
        (step_before, time_before), self.seen = self.seen, (training.step, time.perf_counter())
        images = (training.step - step_before) * training.config.global_batch_size
        rate = images / (self.seen[1] - time_before)
        loss, scale = training.losses[training.step - 1], training.scales[training.step - 1]
        status = f"loss {loss:.4f}  scale {scale:g}  {rate:,.0f} images/s"
        self.update(self.bar, completed=training.step, status=status)
        self.refresh()


class TensorBoard:
    """Events of one training, written from its record at the end of each epoch."""

    def __init__(self, folder: Path, training: Training):
        from torch.utils.tensorboard import SummaryWriter

        self.written = len(training.accuracies) * training.steps_per_epoch
        # A killed run may have written more than its checkpoint knows.
        self.writer = SummaryWriter(str(folder), purge_step=self.written)

    def write(self, training: Training) -> None:
        for name, record in (("loss", training.losses), ("scale", training.scales)):
            values = record[self.written : training.step].tolist()
            for step, value in enumerate(values, self.written):
                self.writer.add_scalar(name, value, step)
        self.writer.add_scalar("test accuracy", training.accuracies[-1], training.step - 1)
        self.writer.flush()
        self.written = training.step
