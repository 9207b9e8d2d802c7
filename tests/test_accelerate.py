"""mixprec under Accelerate: the recipe of docs/trainers.md."""

import pytest
import torch
from helpers import needs_cuda, on_devices
from trainers import (
    HALF,
    OVERFLOWS,
    SCALER,
    Run,
    assert_close_run,
    assert_same_run,
    loss_of,
    make_batches,
    ours,
    schedule_for,
    torchs,
    trained,
)

import mixprec

accelerate = pytest.importorskip("accelerate")
import mixprec.accelerate  # noqa: E402


def start(device, half=False, run=None, enabled=True, **options):
    """An accelerator and what it has prepared: model, optimizer and schedule."""
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
    accelerate.state.GradientState._reset_state()
    precision = "fp16" if HALF[device] is torch.float16 and enabled else "bf16"
    accelerator = accelerate.Accelerator(mixed_precision=precision, cpu=device == "cpu", **options)
    accelerator.scaler = mixprec.accelerate.GradScaler(device, **SCALER, enabled=enabled)
    model, optimizer, _ = run or ours(device, HALF[device] if half else None)
    return accelerator, *accelerator.prepare(model, optimizer, schedule_for(optimizer))


def fit(accelerator, model, optimizer, schedule, batches, clip=None):
    for batch in batches:
        x, y = (tensor.to(accelerator.device) for tensor in batch)
        with accelerator.accumulate(model):
            accelerator.backward(loss_of(model, x, y))
            if accelerator.sync_gradients and clip is not None:
                accelerator.scaler.clip_grad_norm_(optimizer.optimizer, clip)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
    return Run(model, optimizer.optimizer, accelerator.scaler)


def plain(run, batches=None, **options):
    """The loop that Accelerate stands for: the schedule waits where a step was skipped."""
    device = next(run.model.parameters()).device.type
    schedule = schedule_for(run.optimizer)
    batches = batches or make_batches()
    return trained(run, HALF[device], batches, schedule=schedule, hold=True, **options)


@on_devices
@pytest.mark.parametrize("half", [False, True])
def test_same_bits(device, half):
    """Autocast, loss scaling, skipped steps and the schedule, which waits for them."""
    accelerator, model, optimizer, schedule = start(device, half)
    run = fit(accelerator, model, optimizer, schedule, make_batches())
    assert_same_run(run, plain(torchs(device)))
    assert run.scaler.steps_skipped == len(OVERFLOWS)
    assert schedule.scheduler.last_epoch == len(make_batches()) - len(OVERFLOWS)
    assert model[0].weight.dtype is (HALF[device] if half else torch.float32)


@on_devices
def test_tells_skipped_steps(device):
    accelerator, model, optimizer, schedule = start(device)
    skipped = []
    for batch in make_batches():
        fit(accelerator, model, optimizer, schedule, [batch])
        skipped.append(optimizer.step_was_skipped)
        assert accelerator.optimizer_step_was_skipped is skipped[-1]
    assert skipped == [i in OVERFLOWS for i in range(len(make_batches()))]


def test_takes_the_prepared_optimizer_for_its_own():
    """What was unscaled by one of the two is not unscaled again by a step of the other."""
    accelerator, _, optimizer, _ = start("cpu")
    (param, *_) = optimizer.param_groups[0]["params"]
    before = param.detach().clone()
    for prepared in optimizer.param_groups[0]["params"]:
        prepared.grad = torch.full_like(prepared, accelerator.scaler.get_scale())
    accelerator.scaler.scale(torch.zeros(()))
    accelerator.scaler.unscale_(optimizer)
    optimizer.step()
    assert torch.allclose(before - param, torch.tensor(optimizer.param_groups[0]["lr"]), rtol=0.1)


@on_devices
@pytest.mark.parametrize("half", [False, True])
def test_clips_norm(device, half):
    run = fit(*start(device, half), make_batches(), clip=0.5)
    assert_same_run(run, plain(ours(device, HALF[device] if half else None), clip=0.5))
    assert_close_run(run, plain(torchs(device), clip=0.5))


@on_devices
@pytest.mark.parametrize("half", [None, torch.bfloat16])
def test_bf16_without_loss_scaling(device, half):
    batches = make_batches(())
    run = fit(*start(device, run=ours(device, half), enabled=False), batches, clip=0.5)
    model, optimizer, _ = ours(device, half)
    expected = Run(model, optimizer, mixprec.GradScaler(device, enabled=False))
    schedule = schedule_for(optimizer)
    assert_same_run(run, trained(expected, torch.bfloat16, batches, schedule=schedule, clip=0.5))
    expected = torchs(device, enabled=False)
    schedule = schedule_for(expected.optimizer)
    assert_close_run(run, trained(expected, torch.bfloat16, batches, schedule=schedule, clip=0.5))


@needs_cuda
def test_its_own_clipping_of_fp32_gradients():
    accelerator, model, optimizer, schedule = start("cuda")
    for x, y in make_batches():
        accelerator.backward(loss_of(model, x.cuda(), y.cuda()))
        accelerator.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    run = Run(model, optimizer.optimizer, accelerator.scaler)
    assert_same_run(run, plain(torchs("cuda"), clip=0.5))


@on_devices
@pytest.mark.parametrize("half", [False, True])
def test_accumulates(device, half):
    run = fit(*start(device, half, gradient_accumulation_steps=2), make_batches())
    expected = ours(device, HALF[device]) if half else torchs(device)
    assert_same_run(run, plain(expected, accumulate=2))


@on_devices
@pytest.mark.parametrize("half", [False, True])
def test_resumes(device, half, tmp_path):
    accelerator, *prepared = start(device, half)
    fit(accelerator, *prepared, make_batches()[:5])
    accelerator.save_state(tmp_path)
    accelerator, *prepared = start(device, half)
    accelerator.load_state(tmp_path)
    resumed = fit(accelerator, *prepared, make_batches()[5:])
    assert_same_run(resumed, plain(ours(device, HALF[device] if half else None)))


@on_devices
@pytest.mark.parametrize("half", [False, True])
def test_prepare_keeps_the_state_of_a_training(device, half):
    """It loads the optimizer's own state_dict: masters and momentum are as before."""
    batches = make_batches(())
    begun = trained(ours(device, HALF[device] if half else None), HALF[device], batches[:5])
    run = fit(*start(device, run=begun), batches[5:])
    expected = trained(torchs(device), HALF[device], batches[:5])
    expected.scaler.load_state_dict(torch.amp.GradScaler(device, **SCALER).state_dict())
    assert_same_run(run, plain(expected, batches[5:]))
