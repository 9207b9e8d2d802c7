"""mixprec.timm.NativeScaler, timm's schedule and checkpoints, called as timm's train.py does."""

import pytest
import torch
from helpers import on_devices
from trainers import (
    HALF,
    SCALER,
    SGD,
    Run,
    assert_close_run,
    assert_same_run,
    loss_of,
    make_batches,
    make_model,
    ours,
    torchs,
    trained,
)

import mixprec

timm = pytest.importorskip("timm")
timm.scheduler = pytest.importorskip("timm.scheduler")
import mixprec.timm  # noqa: E402


def start(device, half=False):
    model = make_model().to(device)
    if half:
        mixprec.half_weights(model, HALF[device])
    optimizer = mixprec.SGD(model.parameters(), **SGD)
    return model, optimizer, mixprec.timm.NativeScaler(device, **SCALER)


def fit(model, optimizer, loss_scaler, batches, *, accumulate=1, **options):
    """The calls of timm's train.py in its order."""
    device = next(model.parameters()).device
    optimizer.zero_grad()
    for i, batch in enumerate(batches, 1):
        x, y = (tensor.to(device) for tensor in batch)
        with torch.autocast(device.type, HALF[device.type]):
            loss = loss_of(model, x, y)
        need_update = i % accumulate == 0
        loss_scaler(
            loss / accumulate,
            optimizer,
            parameters=timm.models.model_parameters(model),
            create_graph=False,
            need_update=need_update,
            **options,
        )
        if need_update:
            optimizer.zero_grad()
    return Run(model, optimizer, loss_scaler._scaler)


@on_devices
@pytest.mark.parametrize("half", [False, True])
def test_same_bits(device, half):
    """Autocast, loss scaling and skipped steps; half weights with masters of fp32 training."""
    run = fit(*start(device, half), make_batches())
    assert_same_run(run, trained(torchs(device), HALF[device], make_batches()))
    assert run.scaler.steps_skipped == 2


@on_devices
@pytest.mark.parametrize("half", [False, True])
def test_clips_norm(device, half):
    run = fit(*start(device, half), make_batches(), clip_grad=0.5)
    expected = ours(device, HALF[device] if half else None)
    assert_same_run(run, trained(expected, HALF[device], make_batches(), clip=0.5))
    assert_close_run(run, trained(torchs(device), HALF[device], make_batches(), clip=0.5))


@on_devices
@pytest.mark.parametrize("mode", ["value", "agc"])
def test_clips_value_and_agc_in_place(device, mode):
    model, optimizer, loss_scaler = start(device)
    run = fit(model, optimizer, loss_scaler, make_batches(), clip_grad=0.02, clip_mode=mode)
    theirs = timm.utils.NativeScaler(device)
    theirs._scaler = torch.amp.GradScaler(device, **SCALER)
    model, optimizer, _ = torchs(device)
    expected = fit(model, optimizer, theirs, make_batches(), clip_grad=0.02, clip_mode=mode)
    assert_same_run(run, expected)


@on_devices
@pytest.mark.parametrize("mode", ["value", "agc"])
def test_value_and_agc_refuse_fp16_gradients(device, mode):
    model, optimizer, loss_scaler = start(device)
    mixprec.half_weights(model, torch.float16)
    weights = [param.detach().clone() for param in model.parameters()]
    loss = sum(param.float().sum() for param in model.parameters())
    with pytest.raises(ValueError, match="unscale FP16 gradients"):
        loss_scaler(loss, optimizer, 0.02, mode, model.parameters())
    assert all(map(torch.equal, weights, model.parameters()))


@on_devices
@pytest.mark.parametrize("half", [False, True])
def test_accumulates(device, half):
    run = fit(*start(device, half), make_batches(), accumulate=2)
    expected = ours(device, HALF[device]) if half else torchs(device)
    assert_same_run(run, trained(expected, HALF[device], make_batches(), accumulate=2))


@on_devices
@pytest.mark.parametrize("half", [False, True])
def test_resumes(device, half, tmp_path):
    batches = make_batches()
    model, optimizer, loss_scaler = start(device, half)
    fit(model, optimizer, loss_scaler, batches[:5])
    saver = timm.utils.CheckpointSaver(
        model, optimizer, amp_scaler=loss_scaler, checkpoint_dir=tmp_path, recovery_dir=tmp_path
    )
    saver.save_checkpoint(0)
    model, optimizer, loss_scaler = start(device, half)
    assert timm.models.resume_checkpoint(model, tmp_path / "last.pth.tar", optimizer, loss_scaler)
    run = fit(model, optimizer, loss_scaler, batches[5:])
    assert_same_run(run, fit(*start(device, half), batches))


@on_devices
def test_schedule(device):
    def schedule_for(optimizer):
        return timm.scheduler.CosineLRScheduler(optimizer, 10, warmup_t=3, t_in_epochs=False)

    results = []
    for run in (ours(device), torchs(device)):
        schedule, updates = schedule_for(run.optimizer), 0
        loss_scaler = mixprec.timm.NativeScaler(device)
        loss_scaler._scaler = run.scaler
        for batch in make_batches():
            fit(run.model, run.optimizer, loss_scaler, [batch])
            schedule.step_update(updates := updates + 1)
        results.append(run)
    assert_same_run(*results)
