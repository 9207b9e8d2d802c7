"""Reports of resnet_cifar.py: environment, table, results.json, picture."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import json
import os
import platform
import statistics
from collections.abc import Callable
from pathlib import Path

import matplotlib
import numpy as np
import torch
from _batches import batch
from _config import Config
from rich.console import Console
from rich.table import Table

matplotlib.use("Agg")
from matplotlib import pyplot as plt


def environment(config: Config) -> dict[str, str]:
    try:
        mixprec_version = importlib.metadata.version("mixprec")
    except importlib.metadata.PackageNotFoundError:
        mixprec_version = "not installed"
    info = {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "mixprec": mixprec_version,
    }
    if config.device_type == "cuda":
        return {
            "GPU": torch.cuda.get_device_name(config.device),
            **info,
            "CUDA": torch.version.cuda,
            "cuDNN": str(torch.backends.cudnn.version()),
            "TF32 in matmul": on_off(torch.backends.cuda.matmul.allow_tf32),
            "TF32 in cuDNN": on_off(torch.backends.cudnn.allow_tf32),
            "cudnn.benchmark": on_off(torch.backends.cudnn.benchmark),
        }
    return {"CPU": cpu_name(), "threads": str(torch.get_num_threads()), **info}


def on_off(flag: bool) -> str:
    return "on" if flag else "off"


def cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        name = next(line.split(":")[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        name = platform.processor() or platform.machine()
    return f"{name}, {torch.backends.cpu.get_cpu_capability()}"


def describe(config: Config, data: dict) -> str:
    """What was run, for titles: it always names the data."""
    return (
        f"{config.model}, {data['name']}, {data['train']:,} training and {data['test']:,} test "
        f"images of {data['width']}x{data['height']}, batch {batch(config)}, "
        f"epochs {config.epochs}, {config.dtype}"
        + (", augmented" if config.augment else "")
        + (", compiled" if config.compile else "")
        + ("" if config.graph else ", mixprec without graph")
    )


def summarise(results: list[dict]) -> list[dict]:
    """One row a mode, over its seeds; against fp32 too, where that was run."""
    rows = []
    for mode in dict.fromkeys(result["mode"] for result in results):
        runs = [result for result in results if result["mode"] == mode]
        laps = [lap for run in runs for lap in run["laps_ms"]]
        p10, median, p90 = np.percentile(laps, (10, 50, 90)).tolist() if laps else (None,) * 3
        accuracies = [run["accuracies"][-1] for run in runs]
        peaks = [run["peak_memory"] for run in runs if run["peak_memory"]]
        rows.append(
            {
                "mode": mode,
                "seeds": [run["seed"] for run in runs],
                "warm_up": runs[0]["warm_up"],
                "iteration_ms": {"median": median, "p10": p10, "p90": p90, "count": len(laps)},
                "train_seconds": [run["train_seconds"] for run in runs],
                "peak_memory_bytes": max(peaks, default=None),
                "accuracy": {
                    "mean": statistics.mean(accuracies),
                    "values": accuracies,
                    "deviation": statistics.stdev(accuracies) if len(runs) > 1 else None,
                },
                "steps_skipped": [run["steps_skipped"] for run in runs],
                "final_scale": [run["final_scale"] for run in runs],
            }
        )
    base = next((row for row in rows if row["mode"] == "fp32"), None)
    for row in rows:
        row["speedup"] = row["memory_saved"] = row["accuracy_difference"] = None
        if base and base["iteration_ms"]["median"] and row["iteration_ms"]["median"]:
            row["speedup"] = base["iteration_ms"]["median"] / row["iteration_ms"]["median"]
        if base and base["peak_memory_bytes"] and row["peak_memory_bytes"]:
            row["memory_saved"] = 1 - row["peak_memory_bytes"] / base["peak_memory_bytes"]
        if base:
            row["accuracy_difference"] = row["accuracy"]["mean"] - base["accuracy"]["mean"]
    return rows


def table(rows: list[dict], on_cuda: bool, config: Config) -> Table:
    """One column a mode, so that it fits a narrow terminal."""
    result = Table(caption_justify="left")
    warm_up = rows[0]["warm_up"]
    result.caption = (
        f"Times of an iteration leave out the first {warm_up} after every start (algorithms are "
        "searched, code compiled, graphs captured) and evaluation. Peak memory: "
        + ("of training, without the data." if on_cuda else "not measured on a CPU.")
    )
    result.add_column("")
    for row in rows:
        result.add_column(row["mode"], justify="right")

    def line(name: str, show: Callable[[dict], str]) -> None:
        result.add_row(name, *map(show, rows))

    line("ms an iteration, median", lambda row: milliseconds(row["iteration_ms"]["median"]))
    line(
        "  p10 to p90",
        lambda row: " - ".join(milliseconds(row["iteration_ms"][p]) for p in ("p10", "p90")),
    )
    if config.processes > 1:
        result.caption += " Times and memory are the first process's, accuracy is over all."
        images = config.global_batch_size * 1000  # in a second, at 1 ms an iteration
        line(
            "images/s of all processes",
            lambda row: show(images / row["iteration_ms"]["median"], "{:,.0f}"),
        )
    line("  speed against fp32", lambda row: show(row["speedup"], "{:.2f}x"))
    line("training in all, s", lambda row: f"{statistics.mean(row['train_seconds']):.1f}")
    line("peak memory, MiB", lambda row: show(row["peak_memory_bytes"], "{:,.0f}", 2**-20))
    line("  saved against fp32", lambda row: show(row["memory_saved"], "{:.1f} %", 100))
    line(
        "test accuracy, %",
        lambda row: (
            show(row["accuracy"]["mean"], "{:.2f}")
            + show(row["accuracy"]["deviation"], " ± {:.2f}", missing="")
        ),
    )
    line("  against fp32, points", lambda row: show(row["accuracy_difference"], "{:+.2f}"))
    line("steps skipped", lambda row: over_seeds(row["steps_skipped"]))
    line("final scale", lambda row: over_seeds(row["final_scale"]))
    return result


def show(value: float | None, form: str, factor: float = 1, missing: str = "n/a") -> str:
    return missing if value is None else form.format(value * factor)


def milliseconds(value: float | None) -> str:
    return "n/a" if value is None else f"{value:,.{3 if value < 10 else 2 if value < 100 else 0}f}"


def over_seeds(values: list[float]) -> str:
    return "/".join(f"{value:g}" for value in dict.fromkeys(values))


def print_report(
    console: Console, info: dict, results: list[dict], config: Config, data: dict
) -> None:
    console.print(
        ", ".join(f"{name} {value}" for name, value in info.items()),
        highlight=False,
        soft_wrap=True,
    )
    console.print(describe(config, data), highlight=False, soft_wrap=True)
    console.print(table(summarise(results), config.device_type == "cuda", config))


def write_files(out: Path, info: dict, results: list[dict], config: Config, data: dict) -> None:
    """results.json and results.png; each is complete or the one before."""
    rows = summarise(results)
    content = {
        "environment": info,
        "data": data,
        "config": dataclasses.asdict(config),
        "summary": rows,
        "runs": results,
    }
    temporary = out / "results.json.tmp"
    temporary.write_text(json.dumps(content, indent=1))
    os.replace(temporary, out / "results.json")

    figure, ((loss_axes, scale_axes), (time_axes, memory_axes)) = plt.subplots(
        2, 2, figsize=(12, 8), layout="constrained"
    )
    figure.suptitle(describe(config, data) + "\n" + (info.get("GPU") or info["CPU"]), fontsize=10)
    colours = {row["mode"]: f"C{index}" for index, row in enumerate(rows)}
    for run in results:
        label = run["mode"] if run["seed"] == results[0]["seed"] else None
        loss_axes.plot(smooth(run["losses"]), color=colours[run["mode"]], label=label, linewidth=1)
        scale_axes.plot(run["scales"], color=colours[run["mode"]], label=label, linewidth=1)
    loss_axes.set(title="training loss, running mean", xlabel="step")
    scale_axes.set(title="loss scale", xlabel="step")
    scale_axes.set_yscale("log", base=2)
    loss_axes.legend()
    scale_axes.legend()

    names = list(colours)
    times = [row["iteration_ms"]["median"] for row in rows]
    bars(time_axes, names, times, colours, "median ms an iteration", milliseconds)
    peaks = [row["peak_memory_bytes"] and row["peak_memory_bytes"] / 2**20 for row in rows]
    bars(memory_axes, names, peaks, colours, "peak memory, MiB", "{:,.0f}".format)
    temporary = out / "results.png.tmp"
    figure.savefig(temporary, format="png", dpi=120)
    plt.close(figure)
    os.replace(temporary, out / "results.png")


def bars(
    axes,
    names: list[str],
    values: list[float | None],
    colours: dict,
    title: str,
    form: Callable[[float], str],
) -> None:
    drawn = axes.bar(
        names, [value or 0 for value in values], color=[colours[name] for name in names]
    )
    axes.bar_label(drawn, ["n/a" if value is None else form(value) for value in values])
    axes.set_title(title)


def smooth(values: list[float]) -> np.ndarray:
    """Running mean over 2 % of the steps."""
    width = max(1, len(values) // 50)
    return np.convolve(values, np.full(width, 1 / width), mode="valid")
