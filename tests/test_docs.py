"""The documentation's Python runs, on whatever device there is; links, figures, names are right.

Blocks of Python in README and docs/ run, but those after a line `<!-- not run: why -->`.
"""

import re
import textwrap
from pathlib import Path

import pytest
from helpers import run_python

import mixprec

ROOT = Path(__file__).parents[1]
READMES = sorted(ROOT.glob("README*.md"))
PAGES = [*READMES, *sorted((ROOT / "docs").rglob("*.md"))]
BLOCK = re.compile(r"(?<!-->\n)^( *)```python\n(.*?)^\1```", re.M | re.S)
FIGURE = re.compile(r"\d+(?:[.,]\d+)*")
SVG_TEXT = re.compile(r">([^<>]+)</text>")


def blocks(pages):
    for page in pages:
        text = page.read_text(encoding="utf-8")
        for found in BLOCK.finditer(text):
            where = f"{page.relative_to(ROOT)}:{text.count(chr(10), 0, found.start()) + 1}"
            yield pytest.param(textwrap.dedent(found[2]), where, id=where)


@pytest.mark.parametrize(("code", "where"), list(blocks(PAGES)))
def test_block(code, where, tmp_path, monkeypatch):
    """On its own, as a reader copies it, and in an empty folder."""
    for package in re.findall(r"^(?:import|from) (\w+)", code, re.M):
        pytest.importorskip(package)
    monkeypatch.chdir(tmp_path)
    exec(compile(code, where, "exec"), {"__name__": "__main__"})


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
    run_python(pictures / "draw.py", tmp_path / "new.svg", folder=tmp_path)
    new, kept = tmp_path / "new.svg", pictures / "h200.svg"
    assert SVG_TEXT.findall(new.read_text()) == SVG_TEXT.findall(kept.read_text())


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_page_names_tests_that_exist(page):
    text = page.read_text(encoding="utf-8")
    for file, name in [*re.findall(r"`(test_\w+\.py)::(\w+)", text), *names_in_columns(text)]:
        assert f"def {name}(" in (ROOT / "tests" / file).read_text(), (file, name)


def names_in_columns(text):
    """(file, test) for the cells of a table whose head names a file for each column."""
    for table in re.findall(r"(?:^\|.*\n)+", text, re.M):
        head, _, *rows = [line.split("|")[2:-1] for line in table.splitlines()]
        for file, *cells in zip(head, *rows, strict=True) if "`test_" in head[0] else ():
            for name in re.findall(r"`(test_\w+)`", " ".join(cells)):
                yield re.findall(r"test_\w+\.py", file)[0], name
