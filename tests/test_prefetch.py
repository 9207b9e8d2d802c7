"""mixprec.prefetch: batches arrive whole, in order, on the device, and without a sync."""

import collections
import gc
import importlib
import weakref

import pytest
import torch
from helpers import needs_cuda, on_devices
from torch.utils.data import DataLoader, TensorDataset

import mixprec

Point = collections.namedtuple("Point", "x y")
BUSY_CYCLES = 20_000_000  # about 10 ms of a GPU's time, thousands of times a small copy's


def numbered(count, size=1 << 16):
    return [torch.full((size,), float(number)) for number in range(count)]


@on_devices
def test_nested_batches(device):
    a, b, c = torch.arange(3), torch.rand(2, 3), torch.rand(2, 3, 4, 4)
    c = c.to(memory_format=torch.channels_last)
    batch = {"point": Point(a, [b, "name"]), "rest": (c, None, 7)}
    (moved,) = mixprec.prefetch([batch], device)
    assert type(moved["point"]) is Point and type(moved["rest"]) is tuple
    assert moved["point"].y[1] == "name" and moved["rest"][1:] == (None, 7)
    tensors = moved["point"].x, moved["point"].y[0], moved["rest"][0]
    for tensor, original in zip(tensors, (a, b, c), strict=True):
        assert tensor.device.type == device and tensor.stride() == original.stride()
        assert torch.equal(tensor.cpu(), original)
    assert batch["point"].x is a  # the loader's own batch is left alone


@on_devices
def test_loader_in_order_and_again(device):
    loader = DataLoader(TensorDataset(torch.arange(10), -torch.arange(10)), batch_size=4)
    batches = mixprec.prefetch(loader, device)
    assert len(batches) == 3
    for _ in range(2):
        assert [(x.tolist(), y.tolist()) for x, y in batches] == [
            ([0, 1, 2, 3], [0, -1, -2, -3]),
            ([4, 5, 6, 7], [-4, -5, -6, -7]),
            ([8, 9], [-8, -9]),
        ]
    assert list(mixprec.prefetch([], device)) == []


def test_length_and_device_are_the_obvious_ones():
    with pytest.raises(TypeError, match=r"no len\(\)"):
        len(mixprec.prefetch(iter([])))
    expected = "cuda" if torch.cuda.is_available() else "cpu"
    assert next(iter(mixprec.prefetch([torch.zeros(1)]))).device.type == expected


@on_devices
@pytest.mark.parametrize("good", [0, 1, 3])
def test_error_comes_where_its_batch_would(device, good):
    class Loader:
        def __iter__(self):
            yield from numbered(good, 1)
            raise KeyError("broken")

    seen = []
    with pytest.raises(KeyError, match="broken"):
        for batch in mixprec.prefetch(Loader(), device):
            seen.append(batch.item())
    assert seen == list(range(good))


@on_devices
@pytest.mark.parametrize("fails", [False, True])
def test_nothing_is_held_afterwards(device, fails):
    """An abandoned loader, or one that failed, frees its workers at once, not when gc runs."""

    class Loader:
        def __iter__(self):
            yield from numbered(2, 1)
            if fails:
                raise KeyError("broken")
            yield from numbered(3, 1)

    gc.disable()
    try:
        loader = Loader()
        alive = weakref.ref(loader)
        batches = iter(mixprec.prefetch(loader, device))
        next(batches), next(batches)
        if fails:
            with pytest.raises(KeyError):
                next(batches)
        del batches, loader
        assert alive() is None
    finally:
        gc.enable()


@needs_cuda
@pytest.mark.parametrize("pinned", [False, True])
@pytest.mark.parametrize("busy", ["copies", "loop"])
def test_values_under_a_busy_stream(pinned, busy):
    """Whichever of the two streams is late, the loop sees whole batches."""
    copies = importlib.import_module("mixprec.prefetch")._copy_stream(torch.cuda.current_device())
    source = [batch.pin_memory() if pinned else batch for batch in numbered(20)]
    batches, sums = iter(mixprec.prefetch(source, "cuda")), []
    for _ in source:
        with torch.cuda.stream(copies if busy == "copies" else torch.cuda.current_stream()):
            torch.cuda._sleep(BUSY_CYCLES)
        sums.append(next(batches).sum())
    assert torch.stack(sums).tolist() == [number * 2.0**16 for number in range(20)]


@needs_cuda
def test_memory_freed_early_is_not_overwritten():
    """Kernels still read a batch that the loop has dropped when the next copies are made."""
    sums = []
    for batch in mixprec.prefetch([batch.pin_memory() for batch in numbered(20)], "cuda"):
        torch.cuda._sleep(BUSY_CYCLES)
        sums.append(batch.sum())
        del batch
    assert torch.stack(sums).tolist() == [number * 2.0**16 for number in range(20)]


@needs_cuda
def test_loop_that_changes_its_stream():
    streams, sums = [torch.cuda.Stream() for _ in range(3)], []
    batches = iter(mixprec.prefetch([batch.pin_memory() for batch in numbered(21)], "cuda"))
    for step in range(21):
        with torch.cuda.stream(streams[step % 3]):
            batch = next(batches)
            torch.cuda._sleep(BUSY_CYCLES)
            sums.append(batch.sum())
            del batch
    torch.cuda.synchronize()
    assert torch.stack(sums).tolist() == [number * 2.0**16 for number in range(21)]


@needs_cuda
def test_no_sync_and_one_batch_ahead():
    """Pinned batches cost the host no wait, and the next one is copied beside the current work."""
    source = [batch.pin_memory() for batch in numbered(4)]
    drawn = []
    batches = iter(mixprec.prefetch((drawn.append(1) or batch for batch in source), "cuda"))
    torch.cuda.set_sync_debug_mode("error")
    try:
        for step in range(4):
            batch = next(batches)
            assert len(drawn) == min(step + 2, 4)
            torch.cuda._sleep(BUSY_CYCLES)
            batch.add_(1)
        assert next(batches, None) is None
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert (batch == 4).all()


@needs_cuda
def test_dataloader_into_graph():
    model = torch.nn.Linear(4, 2).cuda()
    optimizer, scaler = mixprec.SGD(model.parameters(), lr=0.1), mixprec.GradScaler()

    @mixprec.graphed
    def step(x):
        optimizer.zero_grad()
        scaler.scale(model(x).square().mean()).backward()
        scaler.step(optimizer)
        scaler.update()
        return x.sum()

    data = torch.arange(64.0).view(16, 4)
    loader = DataLoader(data, 1, pin_memory=True)
    sums = [step(x) for x in mixprec.prefetch(loader)]
    assert torch.stack(sums).tolist() == data.sum(1).tolist()
