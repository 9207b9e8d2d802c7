"""mixprec.prefetch: the loader's batches, in order, on the device."""

import collections

import pytest
import torch
from helpers import assert_same_bits, needs_cuda, on_devices

import mixprec

Pair = collections.namedtuple("Pair", "x y")


@on_devices
def test_batches_in_order_and_in_their_structure(device):
    loader = [{"pair": Pair(torch.full((3,), float(i)), [i, "name"])} for i in range(5)]
    batches = mixprec.prefetch(loader, device)
    for _ in range(2):  # as often as the loader
        result = list(batches)
        assert len(result) == len(batches) == 5
        for i, batch in enumerate(result):
            assert isinstance(batch["pair"], Pair)
            assert batch["pair"].x.device.type == device
            assert_same_bits(batch["pair"].x, loader[i]["pair"].x)
            assert batch["pair"].y == [i, "name"]


@on_devices
@pytest.mark.parametrize("count", [0, 1, 2])
def test_short_loaders(device, count):
    assert len(list(mixprec.prefetch([torch.ones(2)] * count, device))) == count


@on_devices
def test_error_comes_in_its_batchs_place(device):
    def loader():
        yield torch.zeros(1)
        yield torch.ones(1)
        raise KeyError("third")

    batches = iter(mixprec.prefetch(loader(), device))
    assert [next(batches).item(), next(batches).item()] == [0, 1]
    with pytest.raises(KeyError, match="third"):
        next(batches)


@needs_cuda
def test_busy_streams_read_whole_batches():
    """The consumer is late, on streams that change, and drops batches at once."""
    loader = [torch.full((1 << 20,), i, dtype=torch.int32).pin_memory() for i in range(20)]
    sums, streams = [], [torch.cuda.Stream(), torch.cuda.current_stream()]
    batches = iter(mixprec.prefetch(loader))
    for i in range(20):
        with torch.cuda.stream(streams[i % 2]):
            batch = next(batches)
            torch.cuda._sleep(1_000_000)
            sums.append(batch.sum())
            del batch
    torch.cuda.synchronize()
    assert [int(total) for total in sums] == [i << 20 for i in range(20)]


@needs_cuda
def test_no_sync():
    loader = [torch.ones(1000).pin_memory() for _ in range(4)]
    list(mixprec.prefetch(loader))
    torch.cuda.set_sync_debug_mode("error")
    try:
        assert len(list(mixprec.prefetch(loader))) == 4
    finally:
        torch.cuda.set_sync_debug_mode("default")


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
    loader = torch.utils.data.DataLoader(data, 1, pin_memory=True)
    sums = [step(x) for x in mixprec.prefetch(loader)]
    assert torch.stack(sums).tolist() == data.sum(1).tolist()
