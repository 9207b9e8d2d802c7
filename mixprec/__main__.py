"""``python -m mixprec doctor [SCRIPT ...]``."""

import argparse
import importlib.util
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .doctor.mistakes import diagnose


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit code: 1 where something is broken or a script has a mistake, else 0."""
    parser = argparse.ArgumentParser(prog="python -m mixprec", description="mixprec's tools")
    doctor = parser.add_subparsers(required=True, metavar="doctor").add_parser(
        "doctor",
        help="look at this machine, or at training scripts",
        description="Without scripts: what this machine has, whether every op of mixprec is right "
        "on it, what mixed precision gains, and what to do. With scripts: their known mistakes "
        "around mixed precision, by line; nothing is executed. Exit code: 1 where something is "
        "broken or a script has a finding, 2 for wrong usage or an unreadable script, else 0.",
    )
    doctor.add_argument("scripts", nargs="*", type=Path, metavar="SCRIPT", help="Python files")
    doctor.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args(arguments)
    if options.scripts:
        return _check_scripts(doctor, options)
    if not options.json and not importlib.util.find_spec("rich"):
        doctor.exit(2, "mixprec doctor: the screen needs rich: pip install rich, or use --json\n")
    from .doctor.examine import examine

    report = examine()
    if options.json:
        print(json.dumps(report, indent=1))
    else:
        from .doctor.screen import show

        show(report)
    return any(finding["level"] == "error" for finding in report["findings"])


def _check_scripts(doctor: argparse.ArgumentParser, options: argparse.Namespace) -> int:
    found: dict[Path, list[dict[str, Any]]] = {}
    for path in options.scripts:
        if path.suffix == ".ipynb":
            doctor.exit(2, f"{path}: a notebook; first: jupyter nbconvert --to script {path}\n")
        try:
            found[path] = diagnose(path.read_bytes())
        except OSError as error:
            doctor.exit(2, f"{path}: {error.strerror}\n")
        except (SyntaxError, ValueError) as error:  # ValueError: a null byte
            line = getattr(error, "lineno", None) or 1
            doctor.exit(2, f"{path}:{line}: not Python: {getattr(error, 'msg', error)}\n")
    if options.json:
        findings = [{"file": str(path), **mistake} for path in found for mistake in found[path]]
        print(json.dumps({"findings": findings}, indent=1))
    else:
        for path, mistakes in found.items():
            if not mistakes:
                print(f"{path}: nothing found")
            for m in mistakes:
                print(f"{path}:{m['line']}: {m['rule']}: {m['what']}")
                print(f"    why: {m['why']}\n    fix: {m['remedy']}")
    return any(found.values())


if __name__ == "__main__":
    sys.exit(main())
