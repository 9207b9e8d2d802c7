"""Data of resnet_cifar.py: CIFAR-10, an ImageFolder tree or a synthetic set."""

from __future__ import annotations

import os
import threading
import time
import urllib.request
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from _config import BenchmarkError, Config
from PIL import Image
from rich.console import Console
from rich.progress import BarColumn, Progress, TimeRemainingColumn
from torch.utils.data import Dataset
from torchvision.datasets import CIFAR10, ImageFolder
from torchvision.datasets.utils import check_integrity
from torchvision.transforms import functional

BORDER = 4  # black pixels around an image that a random crop may reach into
CIFAR_ROOT = Path("data")  # where torch's tutorials put it
STALL_SECONDS = 8.0  # a download that brings less than STALL_BYTES in this time is given up
STALL_BYTES = 1 << 18


class ImageSet(Dataset):
    """Labelled images, in memory or in files; `transform` as in torchvision's data sets."""

    def __init__(
        self,
        images: np.ndarray | Sequence[str],
        labels: Sequence[int],
        size: tuple[int, int],
        resize: bool,
    ):
        self.images = images  # uint8 [N, height, width, 3], or N paths
        self.labels = torch.as_tensor(labels)
        self.size = size  # height, width that `open` returns
        self.resize = resize
        self.transform: Callable | None = None

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, item: tuple[int, tuple[int, int, int] | None]):
        """Image and label of an index; cropped and flipped as `random_crops` says, if it does."""
        index, crop = item
        image = self.open(index)
        if crop:
            top, left, flip = crop
            image = functional.crop(image, top - BORDER, left - BORDER, *self.size)
            image = functional.hflip(image) if flip else image
        return self.transform(image) if self.transform else image, self.labels[index]

    def open(self, index: int) -> Image.Image:
        item = self.images[index]
        image = Image.fromarray(item) if isinstance(item, np.ndarray) else open_image(item)
        height, width = self.size
        if self.resize:
            return image.resize((width, height))
        if image.size != (width, height):
            raise BenchmarkError(
                f"{item} has {image.width}x{image.height} pixels, the first image "
                f"{width}x{height}: give one --image-size for all"
            )
        return image


def open_image(path: str) -> Image.Image:
    try:
        with Image.open(path) as image:
            return image.convert("RGB")
    except OSError as error:
        raise BenchmarkError(f"{path}: not a readable image ({error})") from None


@dataclass
class Source:
    """A data set before it is read: `load(split, indices)` reads part of one."""

    kind: str  # the --data option that gives it again
    name: str  # for people
    num_classes: int
    size: tuple[int, int]  # height, width
    counts: dict[str, int]  # images in "train" and "test"
    load: Callable[[str, torch.Tensor], ImageSet]


def open_source(config: Config, console: Console) -> Source:
    if config.data == "synthetic":
        return synthetic(config.image_size)
    if config.data not in (None, "cifar10"):
        root = Path(config.data)
        if (root / CIFAR10.base_folder).is_dir():
            return cifar10(root, config)
        return image_folder(root, config)
    try:
        return cifar10(CIFAR_ROOT, config)
    except RuntimeError:  # torchvision's word for: not there, or damaged
        pass
    try:
        download_cifar10(console)
        return cifar10(CIFAR_ROOT, config)
    except (OSError, RuntimeError) as error:
        if config.data == "cifar10":
            raise BenchmarkError(
                f"CIFAR-10 is not in {CIFAR_ROOT.resolve()} and could not be downloaded ({error}): "
                f"put {CIFAR10.filename} there, or use --data DIR or --data synthetic"
            ) from None
        console.print(
            f"CIFAR-10 is not in ./{CIFAR_ROOT} and could not be downloaded ({error}): "
            "[bold]training on synthetic data[/bold].",
            soft_wrap=True,
        )
        return synthetic(config.image_size)


def download_cifar10(console: Console) -> None:
    """Fetch the archive that torchvision then unpacks: its own download has no time limit.

    In a thread, because a name look-up can hang where no timeout reaches it.
    """
    archive = CIFAR_ROOT / CIFAR10.filename
    if not check_integrity(archive, CIFAR10.tgz_md5):
        partial = archive.with_suffix(".part")
        received, failure = [0, 0], []

        def fetch() -> None:
            try:
                with urllib.request.urlopen(CIFAR10.url, timeout=STALL_SECONDS) as response:
                    received[1] = int(response.headers.get("Content-Length", 0))
                    CIFAR_ROOT.mkdir(exist_ok=True)
                    with open(partial, "wb") as file:
                        while chunk := response.read(1 << 16):
                            received[0] += file.write(chunk)
            except Exception as error:
                failure.append(error)

        thread = threading.Thread(target=fetch, daemon=True)
        thread.start()
        before, deadline = 0, time.monotonic() + STALL_SECONDS
        with progress_bar(console) as progress:
            bar = progress.add_task("downloading CIFAR-10", total=None)
            while thread.is_alive():
                thread.join(0.2)
                progress.update(bar, completed=received[0], total=received[1] or None)
                if time.monotonic() > deadline:
                    if received[0] - before < STALL_BYTES:
                        raise OSError(f"no answer, or too slow, within {STALL_SECONDS:.0f} s")
                    before, deadline = received[0], time.monotonic() + STALL_SECONDS
        if failure:
            raise OSError(str(getattr(failure[0], "reason", failure[0])))
        if not check_integrity(partial, CIFAR10.tgz_md5):
            raise OSError("what came is not the archive: checksum differs")
        os.replace(partial, archive)
    CIFAR10(CIFAR_ROOT, download=True)


def cifar10(root: Path, config: Config) -> Source:
    splits = {"train": CIFAR10(root, train=True), "test": CIFAR10(root, train=False)}
    size = (config.image_size,) * 2 if config.image_size else (32, 32)

    def load(split: str, indices: torch.Tensor) -> ImageSet:
        labels = torch.as_tensor(splits[split].targets)
        return ImageSet(
            splits[split].data[indices.numpy()], labels[indices], size, bool(config.image_size)
        )

    return Source(
        "cifar10" if root == CIFAR_ROOT else str(root),
        "CIFAR-10",
        10,
        size,
        {split: len(data) for split, data in splits.items()},
        load,
    )


def image_folder(root: Path, config: Config) -> Source:
    for folder in (root, root / "train", root / "test"):
        if not folder.is_dir():
            raise BenchmarkError(
                f"--data: there is no folder {folder} (an ImageFolder tree has train/ and test/)"
            )
    try:
        splits = {split: ImageFolder(str(root / split)) for split in ("train", "test")}
    except FileNotFoundError as error:
        raise BenchmarkError(f"--data {root}: {error}".splitlines()[0]) from None
    if splits["train"].classes != splits["test"].classes:
        raise BenchmarkError(f"--data {root}: train/ and test/ hold different classes")
    first = open_image(splits["train"].samples[0][0])
    size = (config.image_size,) * 2 if config.image_size else first.size[::-1]

    def load(split: str, indices: torch.Tensor) -> ImageSet:
        samples = [splits[split].samples[i] for i in indices.tolist()]
        return ImageSet(
            [path for path, _ in samples],
            [label for _, label in samples],
            size,
            bool(config.image_size),
        )

    return Source(
        str(root),
        f"ImageFolder {root}",
        len(splits["train"].classes),
        size,
        {split: len(data) for split, data in splits.items()},
        load,
    )


def synthetic(image_size: int | None) -> Source:
    """Ten smooth colour patterns, each image one of them, shifted, under another one and noise."""
    side = image_size or 32
    generator = torch.Generator().manual_seed(0)
    coarse = torch.rand(10, 3, 4, 4, generator=generator)
    patterns = torch.nn.functional.interpolate(coarse, size=(side, side), mode="bicubic").permute(
        0, 2, 3, 1
    )

    def load(split: str, indices: torch.Tensor) -> ImageSet:
        generator = torch.Generator().manual_seed({"train": 1, "test": 2}[split])
        labels = torch.arange(len(indices)) % 10
        images = np.empty((len(indices), side, side, 3), np.uint8)
        for start in range(0, len(indices), 1000):
            own = labels[start : start + 1000]
            other = (own + torch.randint(1, 10, own.shape, generator=generator)) % 10
            share = 0.45 * torch.rand(len(own), 1, 1, 1, generator=generator)
            mixed = (1 - share) * patterns[own] + share * patterns[other]
            shift = torch.randint(side, (2, len(own), 1), generator=generator)
            rows, columns = (torch.arange(side) + shift) % side
            shifted = mixed[
                torch.arange(len(own))[:, None, None], rows[:, :, None], columns[:, None, :]
            ]
            noise = torch.rand(mixed.shape, generator=generator) - 0.5
            mixed = 0.6 * shifted + 0.2 + 0.6 * noise
            images[start : start + 1000] = mixed.mul(255).clamp(0, 255).to(torch.uint8).numpy()
        return ImageSet(images, labels, (side, side), resize=False)

    return Source(
        "synthetic", "synthetic data", 10, (side, side), {"train": 50_000, "test": 10_000}, load
    )


def progress_bar(console: Console) -> Progress:
    return Progress(
        "{task.description}",
        BarColumn(),
        "{task.percentage:>3.0f} %",
        TimeRemainingColumn(),
        console=console,
        transient=True,
        disable=not console.is_terminal,
    )
