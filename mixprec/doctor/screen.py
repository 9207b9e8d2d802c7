"""The doctor's report on one screen."""

import sys
from typing import Any

from rich.console import Console
from rich.table import Table

from .advice import Report

_COLOURS = {"error": "red", "warning": "yellow", "hint": "cyan"}


def show(report: Report) -> None:
    """Prints at the terminal's width, or 100 columns into a file."""
    width = None if sys.stdout.isatty() else 100
    console = Console(width=width, markup=False, highlight=False)
    console.print(_grid(_machine(report)))
    if report["speed"]:
        console.print(_speed_table(report["speed"]))
    if report["advice"]:
        console.print("what to do here", style="bold")
        console.print(*(f"- {line}" for line in report["advice"]), sep="\n")
    console.print("known troubles, and what to try", style="bold")
    console.print(_grid(report["troubles"]))
    if not report["findings"]:
        console.print("nothing is broken", style="bold green")
    for finding in report["findings"]:
        text = f"{finding['level']}: {finding['what']}\n  -> {finding['remedy']}"
        console.print(text, style=_COLOURS[finding["level"]])


def _grid(rows: dict[str, str]) -> Table:
    grid = Table.grid(padding=(0, 2))
    grid.add_column(no_wrap=True, style="bold")
    grid.add_column()
    for name, text in rows.items():
        grid.add_row(name, text)
    return grid


def _machine(report: Report) -> dict[str, str]:
    machine, build, ops = report["machine"], report["build"], report["ops"]
    gpu = machine["gpu"]
    rows = {"GPU": "none that torch can use"}
    if gpu:
        cores = ", ".join(gpu["tensor_cores"]) or "none"
        rows = {
            "GPU": f"{machine['gpu_count']} x {gpu['name']}, compute capability "
            f"{gpu['capability']}, {gpu['free_gib']} of {gpu['memory_gib']} GiB free",
            "tensor cores": cores,
        }
    rows["CPU"] = f"{machine['cpu']}, threads: {machine['threads']}"
    rows["versions"] = (
        f"torch {machine['torch']}, CUDA {machine['cuda']}, driver {machine['driver']}, "
        f"Python {machine['python']}"
    )
    rows["mixprec"] = f"built for torch {build.get('torch')}, CUDA {build.get('cuda')}, backends: "
    rows["mixprec"] += " and ".join(build["backends"]) or "none"
    if build.get("architectures"):
        rows["mixprec"] += f", architectures {build['architectures']}"
    right = [op["name"] for op in ops if op["ok"]]
    if ops:
        rows["ops"] = f"{len(right)} of {len(ops)} agree with float64: {', '.join(right)}"
    return rows


def _speed_table(speed: dict[str, Any]) -> Table:
    title = f"{speed['network']}, batch {speed['batch_size']}, on {speed['device']}"
    if speed["busy"]:
        title += f"; torch AMP is {speed['bound']}-bound: "
        title += f"the GPU works {min(speed['busy'], 1):.0%} of the time"
    table = Table(title=title, title_justify="left", title_style="bold", box=None)
    table.add_column("an iteration")
    for header in ("ms", "of it GPU", "launches", "against fp32"):
        table.add_column(header, justify="right")
    for mode in speed["modes"]:
        gpu_ms, launches = mode["gpu_ms"], mode["launches"]
        table.add_row(
            mode["mode"],
            f"{mode['ms']:.3g}",
            f"{gpu_ms:.3g}" if gpu_ms else "-",
            str(launches or "-"),
            f"{mode['speed_against_fp32']:.2f}x",
        )
    return table
