"""Batches for resnet_cifar.py: from images on the device, or by torch's DataLoader."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch
from _config import BenchmarkError, Config
from _data import ImageSet, Source, progress_bar
from rich.console import Console
from torch.nn import functional as F
from torch.utils.data import DataLoader
from torchvision import transforms

try:
    from mixprec import prefetch
except ImportError:  # the modes of torch alone run without it

    def prefetch(loader: DataLoader, device: torch.device) -> Iterator:
        for x, y in loader:
            yield x.to(device, non_blocking=True), y.to(device, non_blocking=True)


MAX_SHIFT = 4  # pixels, of --augment
MEAN, STD = (0.4914, 0.4822, 0.4465), (0.2023, 0.1994, 0.2010)


class DeviceBatches:
    """All images on the device as uint8; a batch is gathered and normalised in two kernels."""

    def __init__(self, split: ImageSet, device: torch.device, console: Console):
        images = np.empty((len(split), *split.size, 3), np.uint8)
        with ThreadPoolExecutor() as pool, progress_bar(console) as progress:
            bar = progress.add_task("reading images", total=len(split))
            for index, pixels in enumerate(pool.map(split.pixels, range(len(split)))):
                images[index] = pixels
                if index % 500 == 0:
                    progress.update(bar, completed=index)
        self.images = torch.from_numpy(images).to(device)  # NHWC
        self.labels = split.labels.to(device)
        self.rows, self.columns = (torch.arange(n, device=device) for n in split.size)
        mean, std = (torch.tensor(each, device=device).view(3, 1, 1) for each in (MEAN, STD))
        self.scale, self.shift = 1 / (255 * std), -mean / std

    def __len__(self) -> int:
        return len(self.labels)

    def __call__(
        self,
        order: torch.Tensor,
        batch_size: int,
        memory_format: torch.memory_format,
        shifts: torch.Tensor | None = None,
    ) -> Iterator:
        if shifts is not None:
            shifts = shifts.to(self.images.device)
        order = order.to(self.images.device)
        batches = zip(order.split(batch_size), self.labels[order].split(batch_size), strict=True)
        for indices, y in batches:
            pixels = self.images[indices]
            if shifts is not None:
                pixels = self.shifted(pixels, shifts[indices])
            pixels = pixels.permute(0, 3, 1, 2)
            # Straight into the mode's layout, so that no mode pays for a conversion.
            x = torch.empty(pixels.shape, device=pixels.device, memory_format=memory_format)
            yield torch.addcmul(self.shift, pixels, self.scale, out=x), y

    def shifted(self, pixels: torch.Tensor, shifts: torch.Tensor) -> torch.Tensor:
        """Each image moved and mirrored, black where it moved away from, by one gather."""
        down, right, mirrored = (column[:, None] for column in shifts.unbind(1))
        columns = torch.where(mirrored.bool(), self.columns.flip(0), self.columns)
        rows = (self.rows - down + MAX_SHIFT)[:, :, None]
        columns = (columns - right + MAX_SHIFT)[:, None, :]
        padded = F.pad(pixels, (0, 0, *(MAX_SHIFT,) * 4))
        return padded[torch.arange(len(pixels), device=pixels.device)[:, None, None], rows, columns]


class LoaderBatches:
    """torch's DataLoader as the tutorials use it."""

    def __init__(self, split: ImageSet, device: torch.device, workers: int):
        split.transform = transforms.Compose(
            [transforms.ToTensor(), transforms.Normalize(MEAN, STD)]
        )
        self.split, self.device, self.workers = split, device, workers

    def __len__(self) -> int:
        return len(self.split)

    def __call__(
        self,
        order: torch.Tensor,
        batch_size: int,
        memory_format: torch.memory_format,
        shifts: torch.Tensor | None = None,
    ) -> Iterator:
        self.split.shifts = shifts
        loader = DataLoader(
            self.split,
            batch_size,
            sampler=order.tolist(),
            num_workers=self.workers,
            pin_memory=self.device.type == "cuda",
            # A fork inherits the loop's handler, and so outlives the Ctrl-C that reaches it too.
            multiprocessing_context="fork" if self.workers and sys.platform == "linux" else None,
            # Without its own, the loader draws a seed from the training's random state.
            generator=torch.Generator().manual_seed(0),
        )
        try:
            for x, y in prefetch(loader, self.device):
                yield x.contiguous(memory_format=memory_format), y
        except BenchmarkError as error:  # a worker's comes with its traceback in the text
            # The frames hold the loader in a cycle, and one freed by gc waits 10 s for its workers.
            traceback.clear_frames(error.__traceback__)
            raise BenchmarkError(str(error).rpartition("BenchmarkError: ")[2]) from None


def pick(count: int, limit: int) -> torch.Tensor:
    """`limit` of `count` images, over all classes: an ImageFolder lists class after class."""
    if limit >= count:
        return torch.arange(count)
    return torch.randperm(count, generator=torch.Generator().manual_seed(0))[:limit].sort().values


def load_splits(source: Source, config: Config, console: Console) -> dict:
    """Batch makers for "train" and "test", by the loader that fits."""
    limit = config.train_limit or source.counts["train"]
    splits = {
        split: source.load(split, pick(count, limit)) for split, count in source.counts.items()
    }
    if config.batch_size > len(splits["train"]):
        raise BenchmarkError(
            f"--batch-size {config.batch_size} is more than the {len(splits['train'])} "
            "training images"
        )
    device = torch.device(config.device)
    if config.loader is None:
        needed = sum(map(len, splits.values())) * source.size[0] * source.size[1] * 3
        config.loader = "device" if needed < memory_for_images(device) else "torch"
        if config.loader == "torch":
            console.print(f"{needed / 2**30:.1f} GiB of images do not fit: using --loader torch.")
    if config.loader == "torch":
        return {
            name: LoaderBatches(split, device, config.workers) for name, split in splits.items()
        }
    return {name: DeviceBatches(split, device, console) for name, split in splits.items()}


def memory_for_images(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0] // 2
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 4
