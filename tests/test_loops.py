"""mixprec in torchvision's reference training loop and in Hugging Face's Trainer."""

import pytest
import torch
from helpers import on_devices
from torch import nn
from trainers import (
    HALF,
    INF,
    OVERFLOWS,
    SCALER,
    Run,
    assert_same_run,
    loss_of,
    make_batches,
    ours,
    schedule_for,
    torchs,
    trained,
)


def torchvision_epoch(run, batches, clip_grad_norm=None):
    """The calls of torchvision's references/classification/train.py in their order."""
    model, optimizer, scaler = run
    device = next(model.parameters()).device
    model.train()
    for batch in batches:
        image, target = (tensor.to(device, non_blocking=True) for tensor in batch)
        with torch.amp.autocast(device.type, HALF[device.type]):
            loss = loss_of(model, image, target)
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        if clip_grad_norm is not None:
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), clip_grad_norm)
        scaler.step(optimizer)
        scaler.update()
    return run


@on_devices
@pytest.mark.parametrize("half", [False, True])
def test_torchvision_same_bits(device, half):
    """Autocast, loss scaling and skipped steps; half weights with masters of fp32 training."""
    run = torchvision_epoch(ours(device, HALF[device] if half else None), make_batches())
    assert_same_run(run, torchvision_epoch(torchs(device), make_batches()))
    assert run.scaler.steps_skipped == len(OVERFLOWS)


@on_devices
def test_torchvision_clips_norm(device):
    run = torchvision_epoch(ours(device), make_batches(), clip_grad_norm=0.5)
    assert_same_run(run, torchvision_epoch(torchs(device), make_batches(), clip_grad_norm=0.5))


@on_devices
def test_torchvision_resumes(device, tmp_path):
    """Epochs with a schedule; train.py's checkpoint after each, loaded into a new training."""

    def epochs(run, count, checkpoint=None):
        schedule = schedule_for(run.optimizer)
        parts = dict(zip(("model", "optimizer", "scaler"), run, strict=True))
        parts["lr_scheduler"] = schedule
        if checkpoint is not None:
            for name, part in parts.items():
                part.load_state_dict(checkpoint[name])
        for _ in range(count):
            torchvision_epoch(run, make_batches())
            schedule.step()
            state = {name: part.state_dict() for name, part in parts.items()}
            torch.save(state, tmp_path / "checkpoint.pth")
        return run

    half = HALF[device]
    epochs(ours(device, half), 1)
    checkpoint = torch.load(tmp_path / "checkpoint.pth", map_location="cpu", weights_only=True)
    resumed = epochs(ours(device, half), 1, checkpoint)
    assert_same_run(resumed, epochs(ours(device, half), 2))
    assert_same_run(resumed, epochs(torchs(device), 2))


def make_bert():
    transformers = pytest.importorskip("transformers", "5.24")
    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=32,
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=32,
        max_position_embeddings=8,
        num_labels=1,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        attn_implementation="eager",
    )
    model = transformers.BertForSequenceClassification(config)
    model.accepts_loss_kwargs = False  # the mean over accumulated batches is the Trainer's work
    return model


def bert_loss(model, tokens, labels):
    return model(input_ids=tokens, labels=labels).loss


def make_tokens():
    generator = torch.Generator().manual_seed(2)
    tokens = torch.randint(32, (10, 4, 8), generator=generator)
    labels = tokens.float().mean(2) / 16
    for i in OVERFLOWS:
        labels[i] *= INF
    return list(zip(tokens, labels, strict=True))


def hugging_face(run, folder, *, resume=None, **options):
    """transformers.Trainer with the recipe of docs/trainers.md."""
    transformers = pytest.importorskip("transformers", "5.24")
    accelerate = pytest.importorskip("mixprec.accelerate")
    device = next(run.model.parameters()).device.type

    class Trainer(transformers.Trainer):
        def create_accelerator_and_postprocess(self):
            super().create_accelerator_and_postprocess()
            self.accelerator.scaler = accelerate.GradScaler(device, **SCALER)

        def _clip_grad_norm(self, model):
            scaler, optimizer = self.accelerator.scaler, self.optimizer.optimizer
            return scaler.clip_grad_norm_(optimizer, self.args.max_grad_norm)

    arguments = transformers.TrainingArguments(
        folder,
        use_cpu=device == "cpu",
        fp16=device == "cuda",
        bf16=device == "cpu",
        per_device_train_batch_size=1,
        train_sampling_strategy="sequential",
        report_to="none",
        disable_tqdm=True,
        remove_unused_columns=False,
        **{"save_strategy": "no", "max_steps": 10, "max_grad_norm": INF, **options},
    )
    trainer = Trainer(
        run.model,
        arguments,
        train_dataset=[{"input_ids": x, "labels": y} for x, y in make_tokens()],
        data_collator=lambda batches: batches[0],
        optimizers=(run.optimizer, schedule_for(run.optimizer)),
    )
    trainer.train(resume_from_checkpoint=resume)
    return Run(run.model, run.optimizer, trainer.accelerator.scaler)


def plain(run, **options):
    device = next(run.model.parameters()).device.type
    schedule = schedule_for(run.optimizer)
    options = {"loss_of": bert_loss, "schedule": schedule, "hold": True, **options}
    return trained(run, HALF[device], make_tokens(), **options)


def our_bert(device, half):
    return ours(device, HALF[device] if half else None, make_bert)


@on_devices
@pytest.mark.parametrize("half", [False, True])
def test_hugging_face_same_bits(device, half, tmp_path):
    """Autocast, loss scaling, skipped steps and the schedule, which waits for them."""
    run = hugging_face(our_bert(device, half), tmp_path)
    assert_same_run(run, plain(torchs(device, make_model=make_bert)))
    assert run.scaler.steps_skipped == len(OVERFLOWS)


@on_devices
@pytest.mark.parametrize("half", [False, True])
def test_hugging_face_clips_norm(device, half, tmp_path):
    run = hugging_face(our_bert(device, half), tmp_path, max_grad_norm=0.1)
    assert_same_run(run, plain(our_bert(device, half), clip=0.1))


@on_devices
@pytest.mark.parametrize("half", [False, True])
def test_hugging_face_accumulates(device, half, tmp_path):
    options = {"gradient_accumulation_steps": 2, "max_steps": 5}
    run = hugging_face(our_bert(device, half), tmp_path, **options)
    expected = our_bert(device, half) if half else torchs(device, make_model=make_bert)
    assert_same_run(run, plain(expected, accumulate=2))


@on_devices
@pytest.mark.parametrize("half", [False, True])
def test_hugging_face_resumes(device, half, tmp_path):
    options = {"save_strategy": "steps", "save_steps": 5}
    hugging_face(our_bert(device, half), tmp_path, max_steps=5, **options)
    checkpoint = str(tmp_path / "checkpoint-5")
    run = hugging_face(our_bert(device, half), tmp_path, resume=checkpoint)
    assert_same_run(run, plain(our_bert(device, half)))
