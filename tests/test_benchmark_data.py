"""benchmarks/resnet_cifar.py: where images come from, and what a batch of them is."""

import hashlib
import io
import pickle
import tarfile
import time

import numpy as np
import pytest
import torch
from benchmark_runs import (
    SMALL,
    TINY,
    Tiny,
    _batches,
    _config,
    _data,
    resnet_cifar,
    results,
    weights,
    write_folder,
)
from helpers import on_devices
from torchvision import transforms
from torchvision.datasets import CIFAR10, ImageFolder
from torchvision.transforms import functional


def test_synthetic_is_deterministic_and_learnable(run, tiny_model, tmp_path):
    first, second = (_data.synthetic(None).load("train", torch.arange(64)) for _ in range(2))
    assert np.array_equal(first.images, second.images)
    assert not np.array_equal(
        first.images, _data.synthetic(None).load("test", torch.arange(64)).images
    )
    run(TINY, "--train-limit 1000 --epochs 3 --modes fp32 --lr 0.02 --out out")
    accuracy = results(tmp_path / "out")["summary"][0]["accuracy"]["mean"]
    assert accuracy > 40  # chance is 10

    # It is the accuracy of the weights that were saved, in evaluation mode, on all test images.
    model = Tiny(10).eval()
    model.load_state_dict(weights(tmp_path / "out")["weights-fp32-seed0.pt"])
    test = _data.synthetic(None).load("test", _batches.pick(10_000, 1000))
    batches = _batches.DeviceBatches(test, torch.device("cpu"), resnet_cifar.Console())
    ((x, y),) = batches(torch.arange(1000), 1000, torch.contiguous_format)
    assert accuracy == pytest.approx(
        100 * (model(x).argmax(1) == y).float().mean().item(), abs=0.15
    )


def test_limited_data_has_all_classes():
    assert _batches.pick(50_000, 100).div(5000, rounding_mode="floor").unique().numel() == 10


@pytest.mark.parametrize("workers", [None, 0, 2])
def test_image_folder(tmp_path, workers):
    root = write_folder(tmp_path / "tree")
    config = _config.Config(
        data=str(root),
        device="cpu",
        batch_size=4,
        workers=workers or 0,
        loader="device" if workers is None else "torch",
    )
    console = resnet_cifar.Console(file=io.StringIO())
    source = _data.open_source(config, console)
    assert source.num_classes == 2 and str(root) in source.name
    order = torch.tensor([7, 0, 11, 3, 4])
    for split, picked in (("train", order), ("test", order[order < 6])):
        batches = _batches.load_splits(source, config, console)[split]
        transform = transforms.Compose(
            [transforms.ToTensor(), transforms.Normalize(_batches.MEAN, _batches.STD)]
        )
        expected = ImageFolder(root / split, transform)
        x, y = zip(*batches(picked, 4, torch.channels_last), strict=True)
        assert x[0].is_contiguous(memory_format=torch.channels_last)
        assert torch.cat(y).tolist() == [expected[i][1] for i in picked]
        torch.testing.assert_close(
            torch.cat(x), torch.stack([expected[i][0] for i in picked]), rtol=1e-5, atol=1e-5
        )


@on_devices
@pytest.mark.parametrize("size", [(12, 12), (12, 9)])
def test_augmented_batches(tmp_path, device, size):
    """Both loaders make torchvision's padded crops and flips of the numbers that were drawn."""
    root = write_folder(tmp_path / "tree", sizes=(size[::-1],))
    order, batches = torch.tensor([7, 0, 11, 3, 4, 7]), []
    crops = _batches.random_crops(6, torch.Generator().manual_seed(0))
    crops[:, 0], crops[:, 1] = torch.tensor([0, 8, 1]), torch.tensor([8, 0, 0])  # the corners
    assert 0 < crops[2].sum() < 6
    for loader in ("device", "torch"):
        config = _config.Config(
            data=str(root), device=device, batch_size=4, workers=0, loader=loader, augment=True
        )
        console = resnet_cifar.Console(file=io.StringIO())
        split = _batches.load_splits(_data.open_source(config, console), config, console)["train"]
        x, y = zip(*split(order, 4, torch.channels_last, crops), strict=True)
        assert x[0].device.type == device
        assert x[0].is_contiguous(memory_format=torch.channels_last)
        batches.append((torch.cat(x).cpu(), torch.cat(y).cpu()))
    folder, expected = ImageFolder(root / "train"), []
    for image, (top, left, flip) in zip(order, crops.T.tolist(), strict=True):
        cropped = functional.crop(functional.pad(folder[image][0], 4), top, left, *size)
        pixels = functional.to_tensor(functional.hflip(cropped) if flip else cropped)
        expected.append(functional.normalize(pixels, _batches.MEAN, _batches.STD))
    for x, y in batches:
        torch.testing.assert_close(x, torch.stack(expected), rtol=1e-5, atol=1e-5)
        assert y.tolist() == [folder[image][1] for image in order]


@on_devices
def test_loaders_feed_the_same_augmented_images(run, tiny_model, tmp_path, device):
    losses = []
    for number, variant in enumerate(("--augment", "--augment --loader torch", "")):
        options = f"--device {device} --deterministic {SMALL} --modes fp32 --out {number} {variant}"
        assert run(options)[0] == 0
        losses.append(results(tmp_path / str(number))["runs"][0]["losses"])
    assert losses[1] == pytest.approx(losses[0], rel=1e-3)
    assert losses[2] != pytest.approx(losses[0], rel=1e-3)


def test_image_folder_run(run, tiny_model, tmp_path):
    write_folder(tmp_path / "tree")
    code, out, err = run(
        *[
            "--device",
            "cpu",
            "--data",
            "tree",
            "--image-size",
            "32",
            "--batch-size",
            "2",
            "--epochs",
            "1",
            "--modes",
            "fp32",
        ],
        *["--train-limit", "8", "--out", "out"],
    )
    assert code == 0, err
    data = results(tmp_path / "out")["data"]
    assert (
        data["name"] == f"ImageFolder {tmp_path / 'tree'}"
        and data["classes"] == 2
        and data["train"] == 8
    )
    assert data["name"] in " ".join(out.split()) and data["test"] == 6


def fake_cifar10(folder, monkeypatch):
    """An archive like CIFAR-10's, 20 images a file, where torchvision is told to expect it."""

    def add(archive, name, content):
        data = pickle.dumps(content)
        entry = tarfile.TarInfo(f"{CIFAR10.base_folder}/{name}")
        entry.size = len(data)
        archive.addfile(entry, io.BytesIO(data))
        return hashlib.md5(data).hexdigest()

    generator, path = np.random.default_rng(0), folder / "archive.tar.gz"
    with tarfile.open(path, "w:gz") as archive:
        for attribute in ("train_list", "test_list"):
            monkeypatch.setattr(
                CIFAR10,
                attribute,
                [
                    [
                        name,
                        add(
                            archive,
                            name,
                            {
                                "data": generator.integers(0, 256, (20, 3072), dtype=np.uint8),
                                "labels": generator.integers(0, 10, 20).tolist(),
                            },
                        ),
                    ]
                    for name, _ in getattr(CIFAR10, attribute)
                ],
            )
        md5 = add(archive, "batches.meta", {"label_names": list("abcdefghij")})
        monkeypatch.setattr(CIFAR10, "meta", {**CIFAR10.meta, "md5": md5})
    monkeypatch.setattr(CIFAR10, "url", path.as_uri())
    monkeypatch.setattr(CIFAR10, "tgz_md5", hashlib.md5(path.read_bytes()).hexdigest())


def test_cifar10_is_downloaded_once(run, tiny_model, tmp_path, monkeypatch):
    fake_cifar10(tmp_path, monkeypatch)
    options = "--device cpu --batch-size 50 --epochs 1 --modes fp32 --train-limit 0"
    assert run(options, "--out out")[0] == 0
    assert (
        results(tmp_path / "out")["data"]["name"] == "CIFAR-10"
        and results(tmp_path / "out")["data"]["train"] == 100
    )
    monkeypatch.setattr(CIFAR10, "url", "file:///nowhere")
    assert run(options, "--out again --data cifar10")[0] == 0


@pytest.mark.parametrize("answer", ["hangs", "fails", "lies"])
def test_download_is_given_up(run, tiny_model, tmp_path, monkeypatch, answer):
    fake_cifar10(tmp_path, monkeypatch)
    monkeypatch.setattr(_data, "STALL_SECONDS", 0.3)
    if answer == "hangs":
        monkeypatch.setattr("urllib.request.urlopen", lambda *args, **options: time.sleep(60))
    elif answer == "fails":
        monkeypatch.setattr(CIFAR10, "url", "file:///nowhere")
    else:
        monkeypatch.setattr(CIFAR10, "tgz_md5", "0" * 32)
    options = TINY.replace("--data synthetic", "--modes fp32")
    code, out, _ = run(options, "--out out")
    assert (
        code == 0
        and "synthetic data" in out
        and results(tmp_path / "out")["data"]["name"] == "synthetic data"
    )
    code, _, err = run(options, "--out strict --data cifar10")
    assert code == 2 and "could not be downloaded" in err and err.count("\n") == 1
