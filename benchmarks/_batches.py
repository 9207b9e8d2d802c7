"""Batches for resnet_cifar.py: from images on the device, or by torch's DataLoader."""

from __future__ import annotations

import functools
import math
import os
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator

import numpy as np
import torch
from _config import BenchmarkError, Config
from _data import BORDER, ImageSet, Source, progress_bar
from rich.console import Console
from torch.utils.data import DataLoader
from torchvision import transforms

READ_AT_ONCE = 500  # images that a process hands over
MEAN, STD = (0.4914, 0.4822, 0.4465), (0.2023, 0.1994, 0.2010)


def random_crops(count: int, generator: torch.Generator) -> torch.Tensor:
    """--augment: for each image the crop's top and left, in it with its border, and 1 for a flip.

    As numbers, so that every mode, loader and resumed run makes the same images of them.
    """
    corners = torch.randint(2 * BORDER + 1, (2, count), generator=generator)
    return torch.cat((corners, torch.randint(2, (1, count), generator=generator)))


class DeviceBatches:
    """All images on the device as uint8; a batch is gathered and normalised in two kernels.

    With random crops two more make their indices, and images need a `border`.
    """

    def __init__(self, split: ImageSet, device: torch.device, console: Console, border: int = 0):
        height, width = self.size = split.size
        images = np.zeros((len(split), height + 2 * border, width + 2 * border, 3), np.uint8)
        inside = images[:, border : border + height, border : border + width]
        split.transform = np.array
        everything = [(index, None) for index in range(len(split))]
        # Not threads: decoding small files, they mostly wait for each other's Python.
        workers = min(torch.get_num_threads(), len(split) // 2000)
        with progress_bar(console) as progress:
            bar = progress.add_task("reading images", total=len(split))
            done = 0
            for pixels, _ in load(split, READ_AT_ONCE, everything, workers):
                inside[done : done + len(pixels)] = pixels
                done += len(pixels)
                progress.update(bar, completed=done)
        self.images = torch.from_numpy(images).to(device)  # NHWC
        self.labels = split.labels.to(device)
        mean, std = (torch.tensor(each, device=device).view(3, 1, 1) for each in (MEAN, STD))
        self.scale, self.shift = 1 / (255 * std), -mean / std

    def __len__(self) -> int:
        return len(self.labels)

    def __call__(
        self,
        order: torch.Tensor,
        batch_size: int,
        memory_format: torch.memory_format,
        crops: torch.Tensor | None = None,
    ) -> Iterator:
        order = order.to(self.images.device)
        labels = self.labels[order].split(batch_size)
        for pixels, y in zip(self.gathered(order, batch_size, crops), labels, strict=True):
            # Straight into the mode's layout, so that no mode pays for a conversion.
            pixels = pixels.permute(0, 3, 1, 2)
            x = torch.empty(pixels.shape, device=pixels.device, memory_format=memory_format)
            yield torch.addcmul(self.shift, pixels, self.scale, out=x), y

    def gathered(
        self, order: torch.Tensor, batch_size: int, crops: torch.Tensor | None
    ) -> Iterator[torch.Tensor]:
        if crops is None:
            for images in order.split(batch_size):
                yield self.images.index_select(0, images)
            return
        down, across = (torch.arange(length, device=order.device) for length in self.size)
        tops, lefts, flips = crops.to(order.device)
        # A flipped row is read from its last pixel backwards.
        starts, directions = lefts + flips * (len(across) - 1), 1 - 2 * flips
        numbers = (each[:, None].split(batch_size) for each in (order, tops, starts, directions))
        for images, top, start, direction in zip(*numbers, strict=True):
            rows, columns = top + down, torch.addcmul(start, direction, across)
            yield self.images[images[:, None], rows[:, :, None], columns[:, None]]


class LoaderBatches:
    """torch's DataLoader as the tutorials use it, prefetched by mixprec where that is installed."""

    def __init__(self, split: ImageSet, device: torch.device, workers: int):
        split.transform = transforms.Compose(
            [transforms.ToTensor(), transforms.Normalize(MEAN, STD)]
        )
        self.split, self.device, self.workers = split, device, workers
        try:
            from mixprec import prefetch
        except ImportError:  # modes of plain torch run without it
            self.on_device = iter
        else:
            self.on_device = functools.partial(prefetch, device=device)

    def __len__(self) -> int:
        return len(self.split)

    def __call__(
        self,
        order: torch.Tensor,
        batch_size: int,
        memory_format: torch.memory_format,
        crops: torch.Tensor | None = None,
    ) -> Iterator:
        picked = [None] * len(order) if crops is None else crops.T.tolist()
        on_cuda = self.device.type == "cuda"
        items = list(zip(order.tolist(), picked, strict=True))
        for x, y in load(self.split, batch_size, items, self.workers, on_cuda, self.on_device):
            x = x.to(self.device, memory_format=memory_format, non_blocking=True)
            yield x, y.to(self.device, non_blocking=True)


def load(
    split: ImageSet,
    batch_size: int,
    items: list,
    workers: int,
    pin_memory: bool = False,
    wrapped: Callable[[DataLoader], Iterable] = iter,
) -> Iterator:
    """Batches of these items of `split`, by torch's DataLoader."""
    loader = DataLoader(
        split,
        batch_size,
        sampler=items,
        num_workers=workers,
        pin_memory=pin_memory,
        # A fork inherits the loop's handler, and so outlives the Ctrl-C that reaches it too.
        multiprocessing_context="fork" if workers and sys.platform == "linux" else None,
        # Without its own, the loader draws a seed from the training's random state.
        generator=torch.Generator().manual_seed(0),
    )
    try:
        yield from wrapped(loader)
    except BenchmarkError as error:  # a worker's comes with its traceback in the text
        # The frames hold the loader in a cycle, and one freed by gc waits 10 s for its workers.
        traceback.clear_frames(error.__traceback__)
        raise BenchmarkError(str(error).rpartition("BenchmarkError: ")[2]) from None


def batch(config: Config) -> str:
    if config.processes == 1:
        return str(config.batch_size)
    return (
        f"{config.batch_size} in each of {config.processes} processes "
        f"({config.global_batch_size} in all)"
    )


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
    if config.global_batch_size > len(splits["train"]):
        raise BenchmarkError(
            f"--batch-size {batch(config)} is more than the {len(splits['train'])} training images"
        )
    device = torch.device(config.device)
    borders = {"train": BORDER if config.augment else 0, "test": 0}
    if config.loader is None:
        needed = sum(
            3 * len(split) * math.prod(side + 2 * borders[name] for side in source.size)
            for name, split in splits.items()
        )
        config.loader = "device" if needed < memory_for_images(device) else "torch"
        if config.loader == "torch":
            console.print(f"{needed / 2**30:.1f} GiB of images do not fit: using --loader torch.")
    if config.loader == "torch":
        return {
            name: LoaderBatches(split, device, config.workers) for name, split in splits.items()
        }
    return {
        name: DeviceBatches(split, device, console, borders[name]) for name, split in splits.items()
    }


def memory_for_images(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0] // 2
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 4
