"""`mixprec doctor SCRIPT`: each mistake at its line and nothing else, silence on right scripts."""

import json
from pathlib import Path

import pytest

from mixprec.__main__ import main
from mixprec.doctor.mistakes import RULES, diagnose

ROOT = Path(__file__).parents[1]
RIGHT = """\
import torch
from torch import nn
from torch.nn import functional as F

def train(loader):
    model = nn.Linear(8, 8).cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 10)
    scaler = torch.amp.GradScaler("cuda")
    for epoch in range(3):
        for i, (x, y) in enumerate(loader):
            optimizer.zero_grad()
            with torch.autocast("cuda", torch.float16):
                loss = F.cross_entropy(model(x), y)
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            if i % 50 == 0:
                print(loss.item())
        scheduler.step()
"""
# Of RIGHT or of the scripts below: what is replaced, by what. "# here" is where the mistake is.
FIRST = "            optimizer.zero_grad()\n"
BACKWARD = "            scaler.scale(loss).backward()\n"
UNSCALE = "            scaler.unscale_(optimizer)\n"
CLIP = "            nn.utils.clip_grad_norm_(model.parameters(), 1.0)\n"
STEP = "            scaler.step(optimizer)\n"
UPDATE = "            scaler.update()\n"
MADE = '    scaler = torch.amp.GradScaler("cuda")\n'
WITHOUT_SCALER = {
    MADE: "",
    BACKWARD: "            loss.backward()\n",
    UNSCALE: "",
    STEP: "            optimizer.step()\n",
    UPDATE: "",
}
MISTAKES = [
    ("half-model", {"Linear(8, 8).cuda()": "Linear(8, 8).cuda().half()  # here"}),
    ("half-model", {"8).cuda()\n": "8).cuda()\n    model.to(torch.float16)  # here\n"}),
    ("no-scaler", {**WITHOUT_SCALER, "torch.float16):": "torch.float16):  # here"}),
    ("no-scaler", {**WITHOUT_SCALER, ", torch.float16):": "):  # here"}),
    ("unscaled-backward", {BACKWARD: "            loss.backward()  # here\n"}),
    ("backward-in-autocast", {BACKWARD: f"    {BACKWARD[:-1]}  # here\n"}),
    ("clip-scaled", {UNSCALE: "", CLIP: f"{CLIP[:-1]}  # here\n"}),
    ("clip-scaled", {UNSCALE: "", CLIP: f"{CLIP[:-1]}  # here\n{UNSCALE}"}),
    ("step-without-scaler", {STEP: "            optimizer.step()  # here\n"}),
    ("step-without-scaler", {STEP: f"{STEP}            optimizer.step()  # here\n"}),
    (
        "step-without-scaler",
        {STEP: "            if (i + 1) % 4 == 0:\n                optimizer.step()  # here\n"},
    ),
    ("update-before-step", {UPDATE: "", STEP: f"{UPDATE[:-1]}  # here\n{STEP}"}),
    ("no-update", {UPDATE: "", STEP: f"{STEP[:-1]}  # here\n"}),
    ("no-zero-grad", {FIRST: "", BACKWARD: f"{BACKWARD[:-1]}  # here\n"}),
    (
        "scheduler-first",
        {"        scheduler.step()\n": "", FIRST: f"{FIRST}            scheduler.step()  # here\n"},
    ),
    ("read-every-iteration", {UPDATE: f"{UPDATE}            total = loss.item()  # here\n"}),
    ("read-every-iteration", {UPDATE: f"{UPDATE}            total = float(loss)  # here\n"}),
    ("read-every-iteration", {UPDATE: f"{UPDATE}            print(i, loss)  # here\n"}),
    ("read-every-iteration", {UPDATE: f'{UPDATE}            bar(f"{{loss:.3f}}")  # here\n'}),
    ("read-every-iteration", {UPDATE: f"{UPDATE}            loss.detach().cpu()  # here\n"}),
    ("deprecated-name", {'torch.amp.GradScaler("cuda")': "torch.cuda.amp.GradScaler()  # here"}),
    (
        "deprecated-name",
        {
            "import nn\n": "import nn\nfrom torch.cuda.amp import autocast  # here\n",
            'torch.autocast("cuda", torch.float16)': "autocast()",
        },
    ),
]

RIGHT_SCRIPTS = {
    "plain": {},
    "bf16 without a scaler": {**WITHOUT_SCALER, "torch.float16": "torch.bfloat16"},
    "fp32": {**WITHOUT_SCALER, 'torch.autocast("cuda", torch.float16)': "nullcontext()"},
    "mixprec's clipping": {
        UNSCALE: "",
        CLIP: "            scaler.clip_grad_norm_(optimizer, 1.0)\n",
    },
    "norms in fp32": {
        "8).cuda()\n": "8).cuda().half()\n    [m.float() for m in model if is_norm(m)]\n"
    },
    "half for export": {
        "        scheduler.step()\n": "        scheduler.step()\n    model.half()\n"
    },
    "old torch too": {
        "import nn\n": "import nn\ntry:\n    from torch.amp import GradScaler as Scaler\n"
        "except ImportError:\n    from torch.cuda.amp import GradScaler as Scaler\n"
    },
    "a scaler that is off": {
        **WITHOUT_SCALER,
        MADE: "    scaler = mixprec.GradScaler(enabled=False)\n",
        CLIP: "            scaler.clip_grad_norm_(optimizer, 1.0)\n",
        STEP: STEP,
    },
    "a helper unscales": {UNSCALE: "            prepare(scaler, optimizer)\n"},
    "read every 50 iterations": {
        UPDATE: f"{UPDATE}            if i % 50:\n                continue\n"
        "            print(loss)\n"
    },
}


def edited(edits):
    script = RIGHT
    for old, new in edits.items():
        assert script.count(old) == 1, old
        script = script.replace(old, new)
    return script


def found(script):
    return [(mistake["rule"], mistake["line"]) for mistake in diagnose(script.encode())]


@pytest.mark.parametrize(("rule", "edits"), MISTAKES)
def test_mistake_is_found_at_its_line(rule, edits):
    script = edited(edits)
    lines = [i for i, line in enumerate(script.splitlines(), 1) if line.endswith("# here")]
    assert found(script) == [(rule, *lines)]


def test_every_rule_has_a_mistake():
    assert {rule.name for rule in RULES} == {rule for rule, _ in MISTAKES}


@pytest.mark.parametrize("name", RIGHT_SCRIPTS)
def test_right_script(name):
    assert found(edited(RIGHT_SCRIPTS[name])) == []


OWN = [p for folder in ("examples", "benchmarks", "mixprec") for p in (ROOT / folder).rglob("*.py")]
OTHERS = sorted((ROOT / "tests" / "scripts").glob("*.py"))


@pytest.mark.parametrize("path", OWN + OTHERS, ids=lambda path: path.name)
def test_nothing_found(path):
    assert found(path.read_text()) == []


def test_command(tmp_path, capsys):
    wrong, right = tmp_path / "wrong.py", tmp_path / "right.py"
    wrong.write_text(edited({UNSCALE: ""}))
    right.write_text(RIGHT)
    assert main(["doctor", str(right), str(wrong)]) == 1
    text = capsys.readouterr().out
    assert f"{wrong}:16: clip-scaled: `nn.utils.clip_grad_norm_(" in text
    assert f"{right}: nothing found" in text
    rule = next(rule for rule in RULES if rule.name == "clip-scaled")
    assert rule.why in text
    assert rule.remedy in text
    assert main(["doctor", "--json", str(right), str(wrong)]) == 1
    (finding,) = json.loads(capsys.readouterr().out)["findings"]
    assert (finding["file"], finding["line"], finding["rule"]) == (str(wrong), 16, rule.name)
    assert main(["doctor", str(right)]) == 0


@pytest.mark.parametrize(
    ("name", "content", "error"),
    [
        ("broken.py", "x = 1\ndef f(:\n", "broken.py:2: not Python"),
        ("notebook.ipynb", "{}", "jupyter nbconvert --to script"),
        ("null.py", "x\0", "null.py:1: not Python"),
        ("missing.py", None, "missing.py: No such file"),
    ],
)
def test_what_cannot_be_read(tmp_path, capsys, name, content, error):
    path, right = tmp_path / name, tmp_path / "right.py"
    right.write_text(RIGHT)
    if content is not None:
        path.write_text(content)
    with pytest.raises(SystemExit) as raised:
        main(["doctor", str(right), str(path)])
    assert raised.value.code == 2
    output = capsys.readouterr()
    assert error in output.err
    assert len(output.err.splitlines()) == 1
    assert not output.out
