"""Runs of benchmarks/resnet_cifar.py inside the test's process, with a model that is fast."""

import json
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

for package in ("torchvision", "rich", "matplotlib"):
    pytest.importorskip(package)

import numpy as np  # noqa: E402
from PIL import Image  # noqa: E402

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))
# Tests import these from here, after what skips them where a package is missing.
import _batches  # noqa: E402, F401
import _config  # noqa: E402, F401
import _data  # noqa: E402, F401
import _graph  # noqa: E402, F401
import _modes  # noqa: E402
import _train  # noqa: E402, F401
import resnet_cifar  # noqa: E402, F401

SMALL = "--data synthetic --train-limit 32 --batch-size 8 --epochs 2"
TINY = f"--device cpu {SMALL}"


class Tiny(nn.Sequential):
    """Fast, and with what a resumed run can get wrong: batch norm, dropout, convolution."""

    def __init__(self, num_classes: int):
        super().__init__(
            nn.Conv2d(3, 16, 5, stride=4),
            nn.BatchNorm2d(16),
            nn.ReLU(),
            nn.Dropout(0.1),
            nn.Flatten(),
            nn.Linear(16 * 49, num_classes),
        )


def use_tiny_model(patch):
    patch.setattr(
        "torchvision.models.get_model", lambda name, weights, num_classes: Tiny(num_classes)
    )


def overflow_at_label_2(patch):
    """NaN gradients of a finite loss where a batch starts with class 2: TINY's steps 1 and 7."""
    cross_entropy = _modes.F.cross_entropy

    def overflowing(x, y):
        other = (y[0] != 2).float()  # no branch: a CUDA graph has to capture it
        return cross_entropy(x, y) + ((other + 0 * x.sum()).sqrt() - other)  # sqrt'(0) is inf

    patch.setattr(_modes.F, "cross_entropy", overflowing)


def results(out):
    return json.loads((out / "results.json").read_text())


def weights(out):
    return {path.name: torch.load(path, weights_only=True) for path in out.glob("weights-*.pt")}


def assert_same_training(out, reference):
    ours, theirs = weights(out), weights(reference)
    assert ours.keys() == theirs.keys() and ours
    for name in ours:
        assert ours[name].keys() == theirs[name].keys()
        assert all(torch.equal(ours[name][key], theirs[name][key]) for key in ours[name]), name
    for one, other in zip(results(out)["runs"], results(reference)["runs"], strict=True):
        for key in ("mode", "seed", "losses", "scales", "accuracies", "steps_skipped"):
            assert one[key] == other[key], key


def write_folder(root, sizes=((12, 12),), classes=("ant", "bee")):
    """An ImageFolder tree of random images, lossless, so that pixels can be compared."""
    generator = np.random.default_rng(0)
    for split, count in (("train", 6), ("test", 3)):
        for name in classes:
            (root / split / name).mkdir(parents=True)
            for index in range(count):
                width, height = sizes[index % len(sizes)]
                pixels = generator.integers(0, 256, (height, width, 3), dtype=np.uint8)
                Image.fromarray(pixels).save(root / split / name / f"{index}.png")
    return root
