"""Every example runs, on whatever device there is; links, figures and names are up to date.

Blocks of Python in README and docs/ run, but those after a line `<!-- not run: why -->`.
"""

import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch

import mixprec

ROOT = Path(__file__).parents[1]
READMES = sorted(ROOT.glob("README*.md"))
PAGES = [*READMES, *sorted((ROOT / "docs").rglob("*.md"))]
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
NONE = pytest.param(None, marks=pytest.mark.skip(reason="there is none"))
BLOCK = re.compile(r"(?<!-->\n)^( *)```python\n(.*?)^\1```", re.M | re.S)
FIGURE = re.compile(r"\d+(?:[.,]\d+)*")
SVG_TEXT = re.compile(r">([^<>]+)</text>")


def blocks():
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        for found in BLOCK.finditer(text):
            where = f"{page.relative_to(ROOT)}:{text.count(chr(10), 0, found.start()) + 1}"
            yield pytest.param(textwrap.dedent(found[2]), where, id=where)


@pytest.mark.parametrize(("code", "where"), list(blocks()) or [NONE])
def test_block(code, where, tmp_path, monkeypatch):
    """On its own, as a reader copies it, and in an empty folder."""
    for package in re.findall(r"^(?:import|from) (\w+)", code, re.M):
        pytest.importorskip(package)
    monkeypatch.chdir(tmp_path)
    exec(compile(code, where, "exec"), {"__name__": "__main__"})


@pytest.mark.parametrize("path", EXAMPLES or [NONE], ids=lambda path: path and path.name)
def test_example(path, tmp_path):
    environment = {**os.environ, "OMP_NUM_THREADS": str(min(torch.get_num_threads(), 4))}
    command = [sys.executable, str(path)]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_to_files(page):
    """Those to anchors are mkdocs's to check (.ci/run)."""
    text = re.sub(r"```.*?```|`[^`\n]*`", "", page.read_text(encoding="utf-8"), flags=re.S)
    for target in re.findall(r"\]\(([^)#\s]+)", text):
        assert target.startswith("https://") or (page.parent / target).exists(), target


def test_every_public_name_is_in_the_api():
    listed = re.findall(r"^::: mixprec\.(\w+)$", (ROOT / "docs" / "api.md").read_text(), re.M)
    assert set(mixprec.__all__) <= set(listed)


def test_translated_tables_have_the_same_figures():
    readme, chinese = (
        re.findall(r"^\|.*$", (ROOT / name).read_text(encoding="utf-8"), re.M)
        for name in ("README.md", "README.zh-CN.md")
    )
    for row, translated in zip(readme, chinese, strict=True):
        assert FIGURE.findall(translated) == FIGURE.findall(row)


def test_picture_has_readmes_figures(tmp_path):
    pytest.importorskip("matplotlib")
    pictures = ROOT / "docs" / "pictures"
    command = [sys.executable, str(pictures / "draw.py"), str(tmp_path / "new.svg")]
    subprocess.run(command, check=True)
    new, kept = tmp_path / "new.svg", pictures / "h200.svg"
    assert SVG_TEXT.findall(new.read_text()) == SVG_TEXT.findall(kept.read_text())
