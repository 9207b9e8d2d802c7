"""Options of resnet_cifar.py: one dataclass, filled from the command line or from a checkpoint."""

from __future__ import annotations

import argparse
import difflib
import math
import os
from dataclasses import dataclass, field
from pathlib import Path

import _ranks
import torch
import torchvision
from _modes import DEFAULT_MODES, MODES

DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}


class BenchmarkError(Exception):
    """A failure that the user can act on: printed as one line, exit code 2."""


@dataclass
class Config:
    """What a run depends on. None means: decided by `resolve_device_defaults` or by the data."""

    modes: list[str] = field(default_factory=lambda: list(DEFAULT_MODES))
    seeds: list[int] = field(default_factory=lambda: [0])
    model: str = "resnet18"
    epochs: int | None = None
    batch_size: int | None = None
    lr: float = 0.01
    momentum: float = 0.9
    weight_decay: float = 0.0
    clip_norm: float | None = None
    device: str | None = None
    dtype: str | None = None
    channels_last: bool | None = None
    compile: bool = False
    graph: bool = True
    deterministic: bool = False
    data: str | None = None
    loader: str | None = None
    workers: int = 2
    augment: bool = False
    train_limit: int | None = None
    image_size: int | None = None
    tensorboard: bool = False
    processes: int = 1  # torchrun's

    @property
    def device_type(self) -> str:
        return torch.device(self.device).type

    @property
    def global_batch_size(self) -> int:
        return self.batch_size * self.processes

    @property
    def half_dtype(self) -> torch.dtype:
        return DTYPES[self.dtype]

    @property
    def sgd_options(self) -> dict[str, float]:
        return {"lr": self.lr, "momentum": self.momentum, "weight_decay": self.weight_decay}


class Parser(argparse.ArgumentParser):
    def parse_args(self, *arguments) -> argparse.Namespace:
        options = super().parse_args(*arguments)
        if "all" in getattr(options, "modes", ()):
            options.modes = list(MODES)
        return options

    def error(self, message: str):
        raise BenchmarkError(f"{message} (--help lists the options)")


def at_least(minimum: int):
    def integer(text: str) -> int:
        value = int(text)
        if value < minimum:
            raise argparse.ArgumentTypeError(f"{value} is less than {minimum}")
        return value

    return integer


def not_negative(text: str) -> float:
    value = float(text)
    if not 0 <= value < math.inf:
        raise argparse.ArgumentTypeError(f"{text} is not a finite number from 0 on")
    return value


def data_option(text: str) -> str | None:
    if text in ("cifar10", "synthetic"):
        return text
    return None if text == "auto" else str(Path(text).resolve())


def build_parser() -> Parser:
    # Options that were not given stay absent, so that --resume can tell them from defaults.
    parser = Parser(
        description="Train ResNet-18 on CIFAR-10 in fp32, with torch's AMP and with mixprec, from "
        "the same initial weights and in the same order; compare time, memory and accuracy.",
        argument_default=argparse.SUPPRESS,
    )
    add = parser.add_argument_group("what is compared").add_argument
    add(
        "--modes",
        nargs="+",
        choices=[*MODES, "all"],
        metavar="MODE",
        help="; ".join(f"{name}: {mode.summary}" for name, mode in MODES.items())
        + f"; all: all of them (default: {' '.join(DEFAULT_MODES)})",
    )
    add(
        "--seeds",
        nargs="+",
        type=at_least(0),
        metavar="N",
        help="train every mode once for each seed; the table gives mean and deviation (default: 0)",
    )
    add("--model", metavar="NAME", help="any torchvision classifier (default: resnet18)")
    add("--device", help="cpu, cuda or cuda:N (default: cuda where there is one)")
    add(
        "--dtype",
        choices=list(DTYPES),
        help="of amp, amp-best and mixprec (default: fp16 on CUDA, bf16 on a CPU)",
    )
    add(
        "--channels-last",
        action=argparse.BooleanOptionalAction,
        help="memory format of every mode (default: contiguous, but see --modes)",
    )
    add(
        "--compile",
        action="store_true",
        help="torch.compile the model, in every mode (default: only in amp-best on CUDA)",
    )
    add(
        "--graph",
        action=argparse.BooleanOptionalAction,
        help="of mixprec on CUDA: the training step as one CUDA graph, by mixprec.graphed; "
        "--no-graph: eager (default: --graph; amp-best always has one, no other mode has)",
    )
    add(
        "--deterministic",
        action="store_true",
        help="on CUDA, take cuDNN's deterministic algorithms and do not search for the fastest "
        "(cudnn.benchmark), so that a run repeats bit for bit, resumed or not; a CPU's always does",
    )

    add = parser.add_argument_group("training").add_argument
    add("--epochs", type=at_least(1), metavar="N", help="(default: 10, on a CPU 2)")
    add(
        "--batch-size",
        type=at_least(1),
        metavar="N",
        help="of each process, where torchrun starts several (default: 256, on a CPU 16)",
    )
    add(
        "--lr",
        type=not_negative,
        help="learning rate of the first epoch, from which it falls along a cosine, epoch by epoch "
        "(default: 0.01)",
    )
    add("--momentum", type=not_negative, help="(default: 0.9)")
    add("--weight-decay", type=not_negative, help="(default: 0)")
    add(
        "--clip-norm",
        type=not_negative,
        metavar="NORM",
        help="clip the gradients' norm (default: off)",
    )

    add = parser.add_argument_group("data").add_argument
    add(
        "--data",
        type=data_option,
        metavar="auto|cifar10|synthetic|DIR",
        help="cifar10: torchvision's, in ./data, downloaded at first use; synthetic: ten learnable "
        "classes made on the spot; DIR: an ImageFolder tree with train/ and test/, or a folder "
        "that holds torchvision's CIFAR-10; auto: cifar10 if it is or can be had, else synthetic "
        "(default: auto)",
    )
    add(
        "--loader",
        choices=("device", "torch"),
        help="device: all images on the device as uint8, normalised there; torch: a DataLoader "
        "with ToTensor and Normalize, copied ahead by mixprec.prefetch where that is installed "
        "(default: device where the data fits)",
    )
    add("--workers", type=at_least(0), metavar="N", help="processes of --loader torch (default: 2)")
    add(
        "--augment",
        action="store_true",
        help="crop training images at random from a border of 4 pixels, and flip every other one; "
        "every mode and a resumed run see the same",
    )
    add(
        "--train-limit",
        type=at_least(0),
        metavar="N",
        help="use N training images and at most as many test images; 0: all (default: all; on a "
        "CPU what about two minutes allow, found by timing an iteration of each mode)",
    )
    add(
        "--image-size",
        type=at_least(1),
        metavar="N",
        help="resize images to N x N (default: as they are)",
    )

    add = parser.add_argument_group("output").add_argument
    add(
        "--out",
        metavar="DIR",
        help="results.json, results.png, weights, checkpoint (default: runs/resnet_cifar-TIME)",
    )
    add(
        "--tensorboard",
        action="store_true",
        help="also write TensorBoard events to DIR/tensorboard",
    )
    add("--resume", metavar="DIR", help="go on with the interrupted run in DIR, with its options")
    return parser


def changed_options(given: dict, stored: Config) -> list[str]:
    """Options given beside --resume that are not what the run was started with."""
    return [
        "--" + name.replace("_", "-")
        for name, value in given.items()
        if value is not None and value != getattr(stored, name, None)
    ]


def resolve_device_defaults(config: Config) -> None:
    """Fill in what depends on the device, and refuse what cannot run, before anything slow."""
    config.device = config.device or ("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(config.device)
    except RuntimeError:
        device = None
    if device is None or device.type not in ("cpu", "cuda"):
        raise BenchmarkError(f"--device {config.device}: expected cpu, cuda or cuda:N")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise BenchmarkError(
            f"--device {config.device}: torch sees {torch.cuda.device_count()} CUDA devices here"
        )
    on_cuda = device.type == "cuda"
    if on_cuda and _ranks.is_on():
        processes = int(os.environ["LOCAL_WORLD_SIZE"])
        if device.index is not None or processes > torch.cuda.device_count():
            raise BenchmarkError(
                f"{processes} processes on {torch.cuda.device_count()} CUDA devices: torchrun "
                "needs one for each, and no --device cuda:N (or --device cpu)"
            )
    config.dtype = config.dtype or ("fp16" if on_cuda else "bf16")
    config.epochs = config.epochs or (10 if on_cuda else 2)
    config.batch_size = config.batch_size or (256 if on_cuda else 16)
    config.modes = list(dict.fromkeys(config.modes))
    config.seeds = list(dict.fromkeys(config.seeds))

    names = torchvision.models.list_models(module=torchvision.models)
    if config.model not in names:
        close = difflib.get_close_matches(config.model, names)
        raise BenchmarkError(
            f"--model {config.model}: torchvision has no such classifier"
            + (f"; did you mean {', '.join(close)}?" if close else "")
        )
    if "mixprec" in config.modes:
        try:
            import mixprec  # noqa: F401
        except ImportError as error:
            raise BenchmarkError(
                f"mode mixprec: {error}; install it with 'pip install .', or leave it out: "
                "--modes fp32 amp"
            ) from None
    if config.tensorboard:
        try:
            from torch.utils import tensorboard  # noqa: F401
        except ImportError:
            raise BenchmarkError(
                "--tensorboard: the package is missing: pip install tensorboard"
            ) from None
