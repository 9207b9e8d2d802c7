"""Extension of griffe, which reads the docstrings for api.md."""

import re
import textwrap
from typing import Any

import griffe


class Docstrings(griffe.Extension):
    """Sphinx's notation becomes Markdown; mixprec.graphed is the function, not its module."""

    def on_package(self, *, pkg: griffe.Module, **_: Any) -> None:
        convert(pkg)
        # All targets before the first replacement: they are found by the modules' names.
        targets = {name: target_of(pkg.members[name]) for name in pkg.exports or ()}
        for name, target in targets.items():
            pkg.members[name] = griffe.Alias(name, target, parent=pkg)


def target_of(member: griffe.Object | griffe.Alias) -> griffe.Object:
    target = member.final_target if member.is_alias else member
    return target.members.get(member.name, target) if target.is_module else target


def convert(documented: griffe.Object) -> None:
    if documented.docstring:
        documented.docstring.value = as_markdown(documented.docstring.value)
    for member in documented.members.values():
        if not member.is_alias:
            convert(member)


def as_markdown(text: str) -> str:
    text = re.sub(r":\w+:`(mixprec\.[\w.]+)`", r"[`\1`][\1]", text)  # a link within the page
    text = re.sub(r":\w+:`([^`]+)`", r"`\1`", text)
    return re.sub(r"^Example::\n((?:\n|    .*)+)", as_fence, text, flags=re.M)


def as_fence(example: re.Match[str]) -> str:
    return f"Example:\n\n```python\n{textwrap.dedent(example[1]).strip()}\n```\n"
