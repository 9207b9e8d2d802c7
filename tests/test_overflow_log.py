"""mixprec.OverflowLog, and records under mixprec.graphed: they name the layer that overflowed."""

import gc
import logging

import pytest
import torch
from helpers import needs_cuda, on_devices
from torch import nn

import mixprec

INF, NAN = float("inf"), float("nan")


class Trainer:
    """A step whose second input is added to the gradient of one layer's weight."""

    def __init__(self, device):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 6), nn.Linear(6, 2))
        self.model = model.to(device)
        self.optimizer = mixprec.SGD(model.named_parameters(), lr=0.01)
        self.scaler = mixprec.GradScaler(device, 16.0, record_overflow=True)
        self.x = torch.randn(3, 4, device=device)

    def plain_step(self, x, poison):
        self.optimizer.zero_grad()
        loss = self.model(x).square().mean() + (self.model[2].weight * poison).sum()
        self.scaler.scale(loss).backward()
        self.scaler.step(self.optimizer)
        self.scaler.update()

    step = mixprec.graphed(plain_step)

    def train(self, values, after_step=lambda: None):
        for value in values:
            self.step(self.x, torch.full((), value, device=self.x.device))
            after_step()


@on_devices
def test_log_names_the_layer(device, caplog, tmp_path):
    trainer = Trainer(device)
    log = mixprec.OverflowLog(trainer.scaler, every=4)
    trainer.train([0, 0, 0, 0, 0, INF, NAN, 0, 0, 0, 0, 0, 0, 0, 0, INF, 0], log.step)
    assert log.looks == [(4, {}), (8, {"2.weight": 2}), (12, {}), (16, {"2.weight": 1})]
    messages = [record.getMessage() for record in caplog.records]
    assert [record.levelno for record in caplog.records] == [logging.WARNING] * 2
    assert "2.weight ([6, 5], torch.float32): 0 inf, 30 NaN of 30" in messages[0]
    assert "30 inf, 0 NaN of 30, largest finite 0, in step 16; so far in 3 steps" in messages[1]
    trainer.optimizer.zero_grad()
    report = trainer.scaler.report_overflow()
    assert [row[0:1] + row[3:] for row in report.rows] == [("2.weight", 30, 0, 0.0, 3, 16)]
    if device == "cuda":
        assert any(vars(trainer)["_graphed_plain_step"].graphs.values())
    pytest.importorskip("rich")
    assert report.table().row_count == 1
    pytest.importorskip("matplotlib")
    for each in (log, mixprec.OverflowLog(trainer.scaler)):
        each.plot(tmp_path / "overflow.png")
        assert (tmp_path / "overflow.png").stat().st_size > 0


@needs_cuda
def test_no_sync_between_looks():
    trainer = Trainer("cuda")
    log = mixprec.OverflowLog(trainer.scaler, every=100)
    trainer.train([0, INF, 0, 0, 0, 0], log.step)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(5):
            trainer.step(trainer.x, torch.full((), INF, device="cuda"))
            trainer.plain_step(trainer.x, trainer.x[0, 0] * INF)
            log.step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    (row,) = trainer.scaler.report_overflow().rows
    assert (row.name, row.steps, row.last_step) == ("2.weight", 11, 16)


@needs_cuda
def test_one_more_launch():
    trainer = Trainer("cuda")
    trainer.plain_step(trainer.x, trainer.x[0, 0])
    torch.cuda.synchronize()
    with torch.profiler.profile() as profile:
        trainer.scaler.step(trainer.optimizer)
        trainer.scaler.update()
        torch.cuda.synchronize()
    names = [event.name for event in profile.events() if "mixprec" in event.name]
    assert len(names) == 4, names
    assert "record_overflow_kernel" in names[1]


def test_log_after_an_optimizer_is_dropped(caplog):
    """The other keeps its name, and what was logged is not logged anew."""
    params = [nn.Parameter(torch.ones(2)) for _ in range(2)]
    first, second = (mixprec.SGD([("w", param)], lr=0.1) for param in params)
    scaler = mixprec.GradScaler("cpu", record_overflow=True)
    log = mixprec.OverflowLog(scaler, every=1)
    scaler.scale(torch.zeros(()))
    for param, optimizer in zip(params, (first, second), strict=True):
        param.grad = torch.full((2,), INF)
        scaler.step(optimizer)
    scaler.update()
    log.step()
    del first, optimizer
    gc.collect()
    log.step()
    assert log.looks == [(1, {"w": 1, "w of optimizer 1": 1}), (2, {})]
    scaler.record_overflow = False
    with pytest.raises(ValueError, match="record_overflow=True"):
        log.step()


def test_arguments_of_the_log():
    with pytest.raises(ValueError, match="record_overflow=True"):
        mixprec.OverflowLog(mixprec.GradScaler("cpu"))
    with pytest.raises(ValueError, match="at least 1, got 0"):
        mixprec.OverflowLog(mixprec.GradScaler("cpu", record_overflow=True), every=0)
