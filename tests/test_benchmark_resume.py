"""benchmarks/resnet_cifar.py: a run that was interrupted and resumed is the undisturbed one."""

import os
import signal
import subprocess
import sys

import pytest
import torch
from benchmark_runs import (
    BENCHMARKS,
    SMALL,
    TINY,
    _train,
    assert_same_training,
    overflow_at_label_2,
    resnet_cifar,
    use_tiny_model,
)
from helpers import DEVICES


@pytest.fixture(scope="module", params=DEVICES)
def options(request):
    return f"--device {request.param} {SMALL} --modes amp mixprec --augment --deterministic"


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory, options):
    out = tmp_path_factory.mktemp("undisturbed") / "out"
    with pytest.MonkeyPatch.context() as patch:
        use_tiny_model(patch)
        overflow_at_label_2(patch)
        assert resnet_cifar.main([*options.split(), "--out", str(out)]) == 0
    return out


def interrupt_at_call(monkeypatch, owner, name, number):
    """Ctrl-C inside the `number`-th call of a method."""
    original, calls = getattr(owner, name), []

    def wrapper(*args, **options):
        calls.append(1)
        if len(calls) == number:
            signal.raise_signal(signal.SIGINT)
        return original(*args, **options)

    monkeypatch.setattr(owner, name, wrapper)


# 4 steps an epoch, 2 epochs, amp first.
@pytest.mark.parametrize(
    "owner, name, number",
    [
        (_train.Training, "iterate", 2),  # inside the first epoch
        (_train.Training, "iterate", 4),  # its last step
        (_train.Training, "evaluate", 1),  # its evaluation
        (_train.Training, "state_dict", 1),  # while its checkpoint is made
        (_train.Training, "iterate", 15),  # in the second mode's second epoch
        (resnet_cifar, "write_files", 1),  # when all is done
        (resnet_cifar, "load_splits", 1),  # before the first step
    ],
)
def test_interrupted_and_resumed_is_undisturbed(
    run, tiny_model, tmp_path, monkeypatch, options, undisturbed, owner, name, number
):
    overflow_at_label_2(monkeypatch)
    with monkeypatch.context() as patch:
        interrupt_at_call(patch, owner, name, number)
        code, _, err = run(options, "--out out")
    if name == "write_files":
        assert code == 0
    else:
        assert code == 130 and err.count("\n") == 1 and err.rstrip().endswith("--resume out")
        assert run("--resume out")[0] == 0
    assert_same_training(tmp_path / "out", undisturbed)


@pytest.mark.parametrize("variant", ["--modes bf16 amp-best", "--loader torch"])
def test_other_modes_and_loader_resume(run, tiny_model, tmp_path, monkeypatch, options, variant):
    """Interrupted inside the second mode's first epoch."""
    assert run(options, variant, "--out undisturbed")[0] == 0
    with monkeypatch.context() as patch:
        interrupt_at_call(patch, _train.Training, "iterate", 10)
        assert run(options, variant, "--out out")[0] == 130
    assert run("--resume out")[0] == 0
    assert_same_training(tmp_path / "out", tmp_path / "undisturbed")


def test_killed_run_resumes_from_its_last_epoch(
    run, tiny_model, tmp_path, monkeypatch, options, undisturbed
):
    """A kill is not announced: here an exception in the second epoch, past the handler."""
    overflow_at_label_2(monkeypatch)
    original, calls = _train.Training.iterate, []

    def killed_at_6(*args):
        calls.append(1)
        if len(calls) == 6:
            raise SystemExit
        return original(*args)

    with monkeypatch.context() as patch:
        patch.setattr(_train.Training, "iterate", killed_at_6)
        with pytest.raises(SystemExit):
            run(options, "--out out")
    assert run("--resume out")[0] == 0
    assert_same_training(tmp_path / "out", undisturbed)


def test_failed_save_leaves_the_last_one(tmp_path):
    _train.save_atomically(tmp_path / "file.pt", [1])
    with pytest.raises(AttributeError):
        _train.save_atomically(tmp_path / "file.pt", [2, lambda: 0])  # cannot be pickled
    assert torch.load(tmp_path / "file.pt", weights_only=True) == [1]


def test_sigint_from_outside(tmp_path):
    options = f"{TINY} --model squeezenet1_1 --modes fp32 --epochs 30 --out out --loader torch"
    process = subprocess.Popen(
        [sys.executable, BENCHMARKS / "resnet_cifar.py", *options.split()],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert "epoch 1/30" in process.stdout.readline()
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does: the DataLoader's workers get it too
    _, err = process.communicate()
    assert process.returncode == 130 and err.count("\n") == 1 and "--resume out" in err
    state = torch.load(tmp_path / "out/checkpoint.pt", weights_only=True)["unfinished"]
    assert 4 <= state["step"] < 120 and state["losses"][: state["step"]].min() > 0


def test_second_interrupt_kills():
    with _train.StopFlag() as stop:
        signal.raise_signal(signal.SIGINT)
        assert stop.requested and signal.getsignal(signal.SIGINT) is signal.SIG_DFL
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_resume_refuses_another_run(run, tiny_model, undisturbed):
    code, _, err = run("--resume", undisturbed, "--lr 0.5 --epochs 2")
    assert code == 2 and "leave out --lr," in err and err.count("\n") == 1
    code, _, err = run(TINY, "--out", undisturbed)
    assert code == 2 and "holds a run already" in err
    (undisturbed.parent / "checkpoint.pt").write_bytes(b"no checkpoint")
    code, _, err = run("--resume", undisturbed.parent)
    assert code == 2 and "is damaged" in err and err.count("\n") == 1
