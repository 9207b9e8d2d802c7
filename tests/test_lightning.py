"""mixprec.lightning.MixedPrecision under Lightning's Trainer."""

import pytest
import torch
from helpers import on_devices
from trainers import (
    OVERFLOWS,
    SCALER,
    SGD,
    Run,
    assert_close_run,
    assert_same_run,
    loss_of,
    make_batches,
    make_model,
    ours,
    schedule_for,
    torchs,
    trained,
)

import mixprec

pl = pytest.importorskip("lightning.pytorch")
import mixprec.lightning  # noqa: E402

FP16, BF16 = torch.float16, torch.bfloat16


class Regression(pl.LightningModule):
    def __init__(self, optimizer=mixprec.SGD, overflows=OVERFLOWS, **options):
        super().__init__()
        self.overflows = overflows
        self.model = make_model()
        self.make_optimizer = lambda: optimizer(self.model.parameters(), **SGD, **options)

    def training_step(self, batch, _):
        return loss_of(self.model, *batch)

    def configure_optimizers(self):
        return self.make_optimizer()

    def train_dataloader(self):
        return torch.utils.data.DataLoader(make_batches(self.overflows), batch_size=None)


class Scheduled(Regression):
    def configure_optimizers(self):
        optimizer = self.make_optimizer()
        return [optimizer], [{"scheduler": schedule_for(optimizer), "interval": "step"}]


class HeldBack(Scheduled):
    def lr_scheduler_step(self, scheduler, metric):
        if not self.trainer.precision_plugin.scaler.last_step_skipped:
            scheduler.step()


class Manual(Regression):
    automatic_optimization = False

    def training_step(self, batch, _):
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(loss_of(self.model, *batch))
        self.clip_gradients(optimizer, 0.5, "norm")
        optimizer.step()


class WithoutLoss(Regression):
    """Batches without a loss, the first one too: nothing to scale, to clip or to step."""

    def training_step(self, batch, index):
        return None if index in (0, 4) else super().training_step(batch, index)


def plugin_for(device, precision="16-mixed", half=False):
    scaler = mixprec.GradScaler(device, **SCALER) if precision == "16-mixed" else None
    return mixprec.lightning.MixedPrecision(precision, device, scaler, half_weights=half)


def fit(module, plugin, *, ckpt_path=None, **options):
    """The run and its trainer."""
    trainer = pl.Trainer(
        accelerator="gpu" if plugin.device == "cuda" else "cpu",
        devices=1,
        plugins=plugin,
        barebones=True,
        **{"max_epochs": 1, **options},
    )
    trainer.fit(module, ckpt_path=ckpt_path)
    return Run(module.model, trainer.optimizers[0], plugin.scaler), trainer


@on_devices
@pytest.mark.parametrize("half", [False, True])
def test_same_bits(device, half):
    """Autocast, loss scaling and skipped steps; half weights with masters of fp32 training."""
    run, _ = fit(Regression(), plugin_for(device, half=half))
    assert_same_run(run, trained(torchs(device), FP16, make_batches()))
    assert run.scaler.steps_skipped == len(OVERFLOWS)
    assert run.model[0].weight.dtype is (FP16 if half else torch.float32)


@on_devices
@pytest.mark.parametrize("half", [False, True])
@pytest.mark.parametrize("clip", [None, 0.5])
def test_bf16_without_a_scaler(device, half, clip):
    module = Regression(overflows=())
    run, _ = fit(module, plugin_for(device, "bf16-mixed", half), gradient_clip_val=clip)
    expected = trained(torchs(device, enabled=False), BF16, make_batches(()), clip=clip)
    (assert_close_run if clip else assert_same_run)(run, expected)
    assert run.scaler.state_dict() == {}


@on_devices
@pytest.mark.parametrize("half", [False, True])
def test_clips_norm(device, half):
    run, _ = fit(Regression(), plugin_for(device, half=half), gradient_clip_val=0.5)
    expected = ours(device, FP16 if half else None)
    assert_same_run(run, trained(expected, FP16, make_batches(), clip=0.5))
    assert_close_run(run, trained(torchs(device), FP16, make_batches(), clip=0.5))


@on_devices
@pytest.mark.parametrize("options", [{"foreach": False}, {"fused": True}])
def test_clips_torchs_optimizers(device, options):
    """The fused ones too, which Lightning's own plugin refuses."""
    # (3,): a first step that is skipped leaves the momentum of torch's fused SGD unwritten.
    module = Regression(torch.optim.SGD, (3,), **options)
    run, _ = fit(module, plugin_for(device), gradient_clip_val=0.5)
    assert_same_run(run, trained(torchs(device, **options), FP16, make_batches((3,)), clip=0.5))


@on_devices
def test_clips_values(device):
    options = {"gradient_clip_val": 0.02, "gradient_clip_algorithm": "value"}
    run, _ = fit(Regression(), plugin_for(device), **options)
    assert_same_run(run, trained(torchs(device), FP16, make_batches(), value=0.02))
    with pytest.raises(ValueError, match="unscale FP16 gradients"):
        fit(Regression(), plugin_for(device, half=True), **options)


@on_devices
@pytest.mark.parametrize("half", [False, True])
def test_accumulates(device, half):
    run, _ = fit(Regression(), plugin_for(device, half=half), accumulate_grad_batches=2)
    expected = ours(device, FP16) if half else torchs(device)
    assert_same_run(run, trained(expected, FP16, make_batches(), accumulate=2))


@on_devices
@pytest.mark.parametrize("half", [False, True])
def test_resumes(device, half, tmp_path):
    _, trainer = fit(Scheduled(), plugin_for(device, half=half))
    trainer.save_checkpoint(tmp_path / "one.ckpt")
    resumed, _ = fit(
        Scheduled(), plugin_for(device, half=half), max_epochs=2, ckpt_path=tmp_path / "one.ckpt"
    )
    uninterrupted, _ = fit(Scheduled(), plugin_for(device, half=half), max_epochs=2)
    assert_same_run(resumed, uninterrupted)


@on_devices
def test_resumes_from_lightnings_own_plugin(device, tmp_path):
    stock = pl.plugins.MixedPrecision("16-mixed", device, torch.amp.GradScaler(device, **SCALER))
    _, trainer = fit(Regression(torch.optim.SGD, foreach=False), stock)
    trainer.save_checkpoint(tmp_path / "one.ckpt")
    run, _ = fit(Regression(), plugin_for(device), max_epochs=2, ckpt_path=tmp_path / "one.ckpt")
    assert_same_run(run, trained(torchs(device), FP16, make_batches() * 2))


@on_devices
@pytest.mark.parametrize(("module", "hold"), [(Scheduled, False), (HeldBack, True)])
def test_schedule(device, module, hold):
    run, _ = fit(module(), plugin_for(device))
    expected = torchs(device)
    schedule = schedule_for(expected.optimizer)
    trained(expected, FP16, make_batches(), schedule=schedule, hold=hold)
    assert_same_run(run, expected)


def test_scaler_of_another_kind():
    with pytest.raises(TypeError, match=r"must be a mixprec\.GradScaler"):
        mixprec.lightning.MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu"))
    with pytest.raises(pl.utilities.exceptions.MisconfigurationException, match="scaler"):
        mixprec.lightning.MixedPrecision("bf16-mixed", "cpu", mixprec.GradScaler("cpu"))


@on_devices
def test_manual_optimization_clips(device):
    run, _ = fit(Manual(), plugin_for(device))
    assert_same_run(run, trained(ours(device), FP16, make_batches(), clip=0.5))


@on_devices
def test_batches_without_a_loss(device):
    run, _ = fit(WithoutLoss(), plugin_for(device), gradient_clip_val=0.5)
    batches = [batch for i, batch in enumerate(make_batches()) if i not in (0, 4)]
    assert_same_run(run, trained(ours(device), FP16, batches, clip=0.5))
