"""`python -m mixprec doctor`: the machine's report, its exit code, and what it says is broken."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from doctor_reports import H200, MODES, changed

import mixprec
from mixprec.__main__ import main
from mixprec.doctor import advice, examine, machine, ops, speed


def run(*arguments, **options):
    command = [sys.executable, "-P", "-m", "mixprec", *arguments]
    return subprocess.run(command, capture_output=True, text=True, **options)


def assert_one_screen(text):
    lines = text.splitlines()
    assert len(lines) <= 45
    assert max(map(len, lines)) <= 100


def test_json_of_this_machine():
    done = run("doctor", "--json")
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads(done.stdout)
    assert report.keys() == changed().keys()
    assert report["machine"].keys() == H200["machine"].keys()
    assert report["build"].keys() == H200["build"].keys()
    assert [op["name"] for op in report["ops"]] == list(ops.OPS)
    assert all(op["ok"] for op in report["ops"])
    assert report["device"] == ("cuda" if torch.cuda.is_available() else "cpu")
    modes = report["speed"]["modes"]
    assert [row["mode"] for row in modes] == list(MODES[: 4 if torch.cuda.is_available() else 3])
    assert all(row["speed_against_fp32"] == modes[0]["ms"] / row["ms"] for row in modes)


def test_screen_of_this_machine():
    pytest.importorskip("rich")
    done = run("doctor")
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"torch {torch.__version__}" in done.stdout
    assert f"{len(ops.OPS)} of {len(ops.OPS)} agree" in done.stdout
    assert_one_screen(done.stdout)


def fail(*_):
    raise RuntimeError("no kernel image is available\nmore")


@pytest.mark.parametrize(
    ("op", "replacement", "broken", "says"),
    [
        ("check", fail, "unscale_", "no kernel image is available"),
        (
            "to_master",
            lambda weight, remainder: weight.float(),
            "SGD remainders float16",
            "float64",
        ),
        ("update_scale", lambda *_: None, "update", "float64"),
    ],
)
def test_broken_op(op, replacement, broken, says, monkeypatch, capsys):
    monkeypatch.setattr(mixprec._C, op, replacement)
    monkeypatch.setattr(speed, "measure", lambda device: None)
    assert main(["doctor", "--json"]) == 1
    report = json.loads(capsys.readouterr().out)
    assert {op["name"]: op["ok"] for op in report["ops"]}[broken] is False
    (what,) = (f["what"] for f in report["findings"] if f["what"].startswith(f"{broken} is"))
    assert says in what
    assert "\n" not in what


def test_training_that_fails(monkeypatch, capsys):
    monkeypatch.setattr(speed, "measure", fail)
    monkeypatch.setattr(ops, "check", lambda device: [])
    assert main(["doctor", "--json"]) == 1
    (finding,) = json.loads(capsys.readouterr().out)["findings"]
    assert finding["what"] == "training fails: no kernel image is available"


def test_gpu_of_which_torch_makes_no_context(monkeypatch):
    """It is in exclusive use, say: the rest of the report is of the CPU."""

    def busy():
        raise RuntimeError("CUDA error: devices busy")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", busy)
    found = machine.describe()
    assert found["gpu"] is None and found["gpu_problem"] == "CUDA error: devices busy"
    report = {**changed(), "machine": found}
    (finding,) = [f for f in advice.findings(report) if "cannot use it" in f["what"]]
    assert "devices busy" in finding["what"]


def test_another_torch(tmp_path):
    """`import mixprec` fails; the doctor says why and goes on, and only the doctor."""
    shutil.copytree(Path(mixprec.__file__).parent, tmp_path / "mixprec", symlinks=True)
    (tmp_path / "mixprec" / "_build.py").write_text("TORCH = '1.0.0'\nCUDA = None\n")
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    done = run("doctor", "--json", env=environment)
    assert done.returncode == 1
    (finding,) = json.loads(done.stdout)["findings"]
    assert finding["level"] == "error"
    assert "mixprec was built for torch 1.0.0" in finding["what"]
    assert "pip install --force-reinstall" in finding["remedy"]
    assert "Traceback" not in done.stderr
    script = [sys.executable, "-P", "-c", "import mixprec"]
    plain = subprocess.run(script, env=environment, capture_output=True, text=True)
    assert "ImportError: mixprec was built for torch 1.0.0" in plain.stderr


@pytest.mark.parametrize(
    ("changes", "level", "says"),
    [
        ({"build__backends": ["CPU"]}, "warning", "built for the CPU alone"),
        ({"machine__gpu": None, "speed": None}, "warning", "torch cannot use it"),
        ({"machine__gpu__tensor_cores": []}, "hint", "no tensor cores"),
        ({"machine__gpu__free_gib": 1.0}, "hint", "1.0 of 139.8 GiB are free"),
        ({"build__error": "undefined symbol"}, "error", "undefined symbol"),
    ],
)
def test_finding(changes, level, says, monkeypatch, capsys):
    report = changed(**changes)
    (finding,) = report["findings"]
    assert finding["level"] == level
    assert says in finding["what"]
    monkeypatch.setattr(examine, "examine", lambda: report)
    assert main(["doctor", "--json"]) == (level == "error")


def test_advice():
    assert not changed()["findings"]
    assert any("graphed" in line for line in changed()["advice"])
    assert any("above about 512" in line for line in changed()["advice"])
    assert not any("graphed" in line for line in changed(speed__bound="GPU")["advice"])


def test_screen_of_a_gpu(capsys):
    pytest.importorskip("rich")
    from mixprec.doctor import screen

    screen.show(changed(build__backends=["CPU"], machine__gpu__free_gib=1.0))
    text = capsys.readouterr().out
    assert_one_screen(text)
    assert "the GPU works 25% of the time" in text
    assert "8 x NVIDIA H200, compute capability 9.0" in text
    assert "warning: mixprec was built for the CPU alone" in text
    screen.show(changed(build__error="undefined symbol", ops=[], speed=None))
    assert "error: mixprec cannot be imported: undefined symbol" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("name", "capability", "dtypes"),
    [
        ("NVIDIA GeForce GTX 1080", (6, 1), ""),
        ("Tesla V100-SXM2-16GB", (7, 0), "float16"),
        ("NVIDIA GeForce GTX 1660 Ti", (7, 5), ""),
        ("NVIDIA A100-SXM4-40GB", (8, 0), "float16 bfloat16 TF32"),
        ("NVIDIA H200", (9, 0), "float16 bfloat16 TF32 float8"),
    ],
)
def test_tensor_cores(name, capability, dtypes):
    assert machine.tensor_cores(name, capability) == dtypes.split()


def test_without_rich(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "rich", None)
    with pytest.raises(SystemExit) as error:
        main(["doctor"])
    assert error.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "pip install rich" in line
    assert "--json" in line


@pytest.mark.parametrize("arguments", [[], ["doctor", "--nothing"]])
def test_wrong_usage(arguments):
    with pytest.raises(SystemExit) as error:
        main(arguments)
    assert error.value.code == 2
