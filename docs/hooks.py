"""Hooks of mkdocs: examples/*.py, which pages link to, are files of the site too."""

from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files


def on_files(files: Files, *, config: Any) -> None:
    for path in sorted(Path(config.config_file_path).parent.glob("examples/*.py")):
        files.append(File.generated(config, f"examples/{path.name}", abs_src_path=str(path)))


def on_page_markdown(markdown: str, **_: Any) -> str:
    return markdown.replace("](../examples/", "](examples/")
