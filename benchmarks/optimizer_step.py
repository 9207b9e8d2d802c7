"""scaler.step(optimizer) + scaler.update() alone: torch's optimizers beside mixprec's.

    python benchmarks/optimizer_step.py [--clip 1.0] [--models resnet18,vit_l_16] [--out DIR]

Wall is the host's time for one call of both; on a GPU without waiting for it. GPU is the sum of the
kernels' durations, from torch.profiler. The floor is the bytes that any two-pass step has to move
(gradients are read once to find inf, once to step; all else is read and written once) at the
bandwidth of a large copy, measured in the same run. Gradients are finite, the scale stays 1.
Medians over rounds, in which the recipes take turns. L2 is not flushed: in training, too, the step
follows the kernels that wrote the gradients. FusedSGD of apex and Transformer Engine are compared
where they are installed.
"""

import argparse
import functools
import importlib
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import matplotlib
import torch
import torchvision
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

import mixprec

matplotlib.use("Agg")
from matplotlib import pyplot as plt


def transformer_1b() -> nn.Module:
    return nn.ModuleList(nn.TransformerEncoderLayer(2048, 16, 8192) for _ in range(22))


def tensors(number: int, size: int) -> Callable[[], nn.Module]:
    return lambda: nn.ParameterList(torch.empty(size) for _ in range(number))


MODELS: dict[str, Callable[[], nn.Module]] = {
    "resnet18": lambda: torchvision.models.resnet18(num_classes=10),
    "resnet50": torchvision.models.resnet50,
    "vit_l_16": torchvision.models.vit_l_16,
    "transformer_1b": transformer_1b,
    "small_tensors": tensors(2000, 1000),
    "10k": tensors(1, 10_000),
    "1m": tensors(1, 1_000_000),
    "100m": tensors(100, 1_000_000),
}
GPU_MODELS = "resnet18,resnet50,vit_l_16,transformer_1b,small_tensors"
CPU_MODELS = "10k,1m,resnet18,resnet50,100m,small_tensors"  # the others take gigabytes and minutes


@dataclass
class Recipe:
    optimizer: Callable[..., torch.optim.Optimizer]
    scaler: type[torch.amp.GradScaler] = torch.amp.GradScaler
    weights: str = "fp32"  # or "Linear/Conv half", "all half"
    half_state: int = 8  # bytes that an optimizer keeps of a half weight


FUSED = functools.partial(torch.optim.SGD, fused=True)
COMPACT = functools.partial(mixprec.SGD, store_param_remainders=True)
RECIPES = {
    "torch foreach": Recipe(functools.partial(torch.optim.SGD, foreach=True)),
    "torch fused": Recipe(FUSED),
    "mixprec fp32": Recipe(mixprec.SGD, mixprec.GradScaler),
    "mixprec half_weights": Recipe(mixprec.SGD, mixprec.GradScaler, "Linear/Conv half"),
    "mixprec all half": Recipe(mixprec.SGD, mixprec.GradScaler, "all half"),
    "mixprec compact masters": Recipe(COMPACT, mixprec.GradScaler, "all half", half_state=6),
}
TORCH_HALF = "torch fused half"  # without masters and fp32 momentum: less to move, less accurate
OTHERS = {"apex": "apex.optimizers", "TE": "transformer_engine.pytorch.optimizers"}


def add_other_recipes() -> str:
    """FusedSGD of the packages that work here; returns what is missing."""
    missing = []
    for package, module in OTHERS.items():
        try:
            optimizer = importlib.import_module(module).FusedSGD
            optimizer([nn.Parameter(torch.zeros(1, device="cuda"))], lr=0.1, momentum=0.9)
            RECIPES[f"{package} FusedSGD"] = Recipe(optimizer)
        except (ImportError, AttributeError, RuntimeError) as error:
            missing.append(f"{package} FusedSGD ({str(error).splitlines()[0]})")
    return f"not here: {', '.join(missing)}" if missing else ""


@functools.cache
def shapes(model: str) -> list[tuple[torch.Size, bool]]:
    """Of each parameter: its shape, and whether half_weights would cast it."""
    with torch.device("meta"):
        module = MODELS[model]()
    layers = [m for m in module.modules() if isinstance(m, (nn.Linear, nn.modules.conv._ConvNd))]
    halves = {param for layer in layers for param in layer.parameters(recurse=False)}
    return [(param.shape, param in halves) for param in module.parameters()]


def make_params(model: str, weights: str, half: torch.dtype, device: str) -> list[Tensor]:
    """Parameters of the model's shapes with random values and gradients."""
    params = []
    for shape, castable in shapes(model):
        is_half = weights == "all half" or (castable and weights != "fp32")
        dtype = half if is_half else torch.float32
        param = nn.Parameter(torch.randn(shape, device=device, dtype=dtype))
        param.grad = torch.randn(shape, device=device, dtype=dtype)
        params.append(param)
    return params


def floor_bytes(params: list[Tensor], half_state: int) -> int:
    """Gradient twice, weight and state read and written; an fp32 weight has 4 bytes of state."""
    return sum(
        p.numel() * (4 * p.element_size() + 2 * (half_state if p.element_size() == 2 else 4))
        for p in params
    )


def copy_bandwidth(device: str) -> float:
    """Bytes a second, read and written, of a copy far larger than any cache."""
    source = torch.ones(2**30 if device == "cuda" else 2**27, device=device)
    target = torch.empty_like(source)
    times = wall_times([lambda: target.copy_(source)] * 10, device, wait=True)
    return 2 * source.numel() * source.element_size() / min(times)


def wall_times(calls: list[Callable[[], object]], device: str, wait: bool = False) -> list[float]:
    """Seconds until each call returns; on a GPU its kernels still run then, unless `wait`."""
    synchronize = torch.cuda.synchronize if device == "cuda" else lambda: None
    times = []
    for call in calls:
        synchronize()
        start = time.perf_counter()
        call()
        if wait:
            synchronize()
        times.append(time.perf_counter() - start)
    return times


def gpu_times(calls: list[Callable[[], object]]) -> list[tuple[float, int]]:
    """Of each call: seconds of its kernels, copies and memsets, and their number."""
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for call in calls:
            call()
            torch.cuda._sleep(1)  # a kernel of its own name, behind which the next call's begin
        torch.cuda.synchronize()
    on_gpu, groups = torch.autograd.DeviceType.CUDA, [[]]
    for event in sorted(profile.events(), key=lambda event: event.time_range.start):
        if "spin_kernel" in event.name:
            groups.append([])
        elif event.device_type == on_gpu and "Optimizer.step#" not in event.name:  # torch's mark
            groups[-1].append(event.device_time * 1e-6)
    if len(groups) != len(calls) + 1:
        raise RuntimeError(f"{len(calls)} calls, but {len(groups) - 1} marks in the profile")
    return [(sum(group), len(group)) for group in groups[:-1]]


def measure(
    recipe: Recipe, model: str, half: torch.dtype, device: str, clips: list, repeats: int
) -> dict:
    """One round of a recipe: samples for each of `clips` (None: no clipping)."""
    params = make_params(model, recipe.weights, half, device)
    optimizer = recipe.optimizer(params, lr=1e-6, momentum=0.9)
    scaler = recipe.scaler(device, init_scale=1.0, growth_interval=2**30)
    scaler.scale(torch.zeros((), device=device))

    def step(clip: float | None) -> None:
        if clip is not None and isinstance(scaler, mixprec.GradScaler):
            scaler.clip_grad_norm_(optimizer, clip)
        elif clip is not None:
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(params, clip)
        scaler.step(optimizer)
        scaler.update()

    samples = []
    for clip in clips:
        calls = [functools.partial(step, clip)] * repeats
        for call in calls[:3]:
            call()
        sample: dict[str, list] = {"wall_s": wall_times(calls, device)}
        if device == "cuda":
            gpu = gpu_times(calls)
            sample["gpu_s"], sample["launches"] = map(list, zip(*gpu, strict=True))
        samples.append(sample)
    state = [t for values in optimizer.state.values() for t in values.values()]
    return {
        "parameters": sum(p.numel() for p in params),
        "tensors": len(params),
        "floor_bytes": floor_bytes(params, recipe.half_state),
        "state_bytes": sum(t.nbytes for t in state if isinstance(t, Tensor)),
        "samples": samples,
    }


def summarise(rounds: list[dict], bandwidth: float, clips: list) -> dict:
    """Medians over all samples of a recipe's rounds."""
    row = {key: value for key, value in rounds[0].items() if key != "samples"}
    key = "gpu_s" if "gpu_s" in rounds[0]["samples"][0] else "wall_s"
    for i, clip in enumerate(clips):
        row["plain" if clip is None else "clipped"] = {
            name: statistics.median(v for r in rounds for v in r["samples"][i][name])
            for name in rounds[0]["samples"][i]
        }
    row["floor_s"] = row["floor_bytes"] / bandwidth
    row["time_s"] = row["plain"][key]
    row["time_over_floor"] = row["time_s"] / row["floor_s"]
    if "clipped" in row:
        row["clip_adds"] = row["clipped"][key] / row["time_s"] - 1
    return row


def table(title: str, rows: dict[str, dict]) -> Table:
    def median(kind: str, name: str, factor: float = 1e6) -> Callable[[dict], str]:
        return lambda row: f"{row[kind][name] * factor:,.0f}" if name in row[kind] else "-"

    def against(name: str) -> Callable[[dict], str]:
        other = rows.get(name)
        return lambda row: f"{other['time_s'] / row['time_s']:.2f}x" if other else "-"

    columns: dict[str, Callable[[dict], str]] = {
        "wall\nus": median("plain", "wall_s"),
        "GPU\nus": median("plain", "gpu_s"),
        "launches": median("plain", "launches", 1),
        "bytes a\nparameter": lambda row: f"{row['floor_bytes'] / row['parameters']:.1f}",
        "floor\nus": lambda row: f"{row['floor_s'] * 1e6:,.0f}",
        "time/\nfloor": lambda row: f"{row['time_over_floor']:.2f}",
        "against\nfused": against("torch fused"),
        "state\nMB": lambda row: f"{row['state_bytes'] / 1e6:,.0f}",
    }
    if TORCH_HALF in rows:
        columns["against\nfused half"] = against(TORCH_HALF)
    if all("clipped" in row for row in rows.values()):
        columns |= {
            "clipped:\nwall us": median("clipped", "wall_s"),
            "\nGPU us": median("clipped", "gpu_s"),
            "\nlaunches": median("clipped", "launches", 1),
            "clipping\nadds": lambda row: f"{row['clip_adds']:+.0%}",
        }
    result = Table(title=title)
    result.add_column("recipe", no_wrap=True)
    for header in columns:
        result.add_column(header, justify="right")
    for recipe, row in rows.items():
        result.add_row(recipe, *(show(row) for show in columns.values()))
    return result


def draw(results: list[dict], path: Path) -> None:
    """Time over floor, one bar a recipe and model; clipped: the pale bar behind."""
    machines, models, recipes = (
        list(dict.fromkeys(row[key] for row in results)) for key in ("machine", "model", "recipe")
    )
    figure, all_axes = plt.subplots(
        len(machines), squeeze=False, figsize=(11, 4 * len(machines)), layout="constrained"
    )
    for machine, axes in zip(machines, all_axes[:, 0], strict=True):
        for i, recipe in enumerate(recipes):
            rows = [r for r in results if (r["machine"], r["recipe"]) == (machine, recipe)]
            at = [models.index(r["model"]) + (i + 0.5) / (len(recipes) + 1) for r in rows]
            heights, width = [r["time_over_floor"] for r in rows], 1 / (len(recipes) + 1)
            bars = axes.bar(at, heights, width, label=recipe)
            axes.bar_label(bars, fmt="%.2f", fontsize=6)
            clipped = [h * (1 + r.get("clip_adds", 0)) for h, r in zip(heights, rows, strict=True)]
            axes.bar(at, clipped, width, color=f"C{i}", alpha=0.3, zorder=0)
        axes.axhline(1, color="black", linewidth=0.8)
        axes.set_xticks([i + 0.45 for i in range(len(models))], models)
        axes.set(title=machine, ylabel="time / floor (pale: with clipping)")
    all_axes[0, 0].legend(fontsize=8)
    figure.savefig(path, dpi=150)
    plt.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", help=f"default: {GPU_MODELS}; on a CPU {CPU_MODELS}")
    parser.add_argument("--recipes", help=f"default: all, of {', '.join(RECIPES)}")
    parser.add_argument("--clip", type=float, help="also with clipping of the norm to this")
    parser.add_argument("--rounds", type=int, default=3, help="default: %(default)s")
    parser.add_argument("--repeats", type=int, default=10, help="in a round (default: %(default)s)")
    default_threads = ",".join(dict.fromkeys(("1", str(torch.get_num_threads()))))
    parser.add_argument(
        "--threads", default=default_threads, help="on a CPU (default: %(default)s)"
    )
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--out", type=Path, help="folder (default: runs/optimizer_step-TIME)")
    args = parser.parse_args()
    on_cuda = args.device == "cuda"
    missing = add_other_recipes() if on_cuda else ""
    if not on_cuda:  # there half is bfloat16; float16 gradients torch refuses to unscale
        RECIPES[TORCH_HALF] = Recipe(FUSED, weights="all half", half_state=2)
    models = (args.models or (GPU_MODELS if on_cuda else CPU_MODELS)).split(",")
    recipes = args.recipes.split(",") if args.recipes else list(RECIPES)
    for names, known in ((models, MODELS), (recipes, RECIPES)):
        if unknown := set(names) - set(known):
            parser.error(f"unknown: {', '.join(sorted(unknown))}; known: {', '.join(known)}")
    out = args.out or Path("runs") / time.strftime("optimizer_step-%Y%m%d-%H%M%S")
    out.mkdir(parents=True, exist_ok=True)
    half = torch.float16 if on_cuda else torch.bfloat16
    clips = [None] if args.clip is None else [None, args.clip]

    console = Console(width=150)
    console.print(f"torch {torch.__version__}, mixprec {mixprec.__version__}, half type {half}")
    if missing:
        console.print(missing)
    results = []
    for threads in [0] if on_cuda else map(int, args.threads.split(",")):
        if threads:
            torch.set_num_threads(threads)
        machine = f"CPU, threads: {threads}" if threads else torch.cuda.get_device_name()
        bandwidth = copy_bandwidth(args.device)
        console.print(f"{machine}: a large copy moves {bandwidth / 1e9:,.1f} GB/s")
        for model in models:
            rounds: dict[str, list[dict]] = {recipe: [] for recipe in recipes}
            for _ in range(args.rounds):
                for recipe in recipes:
                    what = RECIPES[recipe], model, half, args.device, clips, args.repeats
                    rounds[recipe].append(measure(*what))
            rows = {r: summarise(samples, bandwidth, clips) for r, samples in rounds.items()}
            first = next(iter(rows.values()))
            size = f"{first['parameters'] / 1e6:,.1f} M parameters in {first['tensors']} tensors"
            console.print(table(f"{model}, {size}, {machine}", rows))
            common = {"machine": machine, "model": model, "clip": args.clip, "bandwidth": bandwidth}
            results += [{"recipe": recipe, **common, **row} for recipe, row in rows.items()]
    versions = {"torch": torch.__version__, "mixprec": mixprec.__version__, "half": str(half)}
    text = json.dumps({**versions, "missing": missing, "results": results}, indent=1)
    (out / "results.json").write_text(text)
    draw(results, out / "results.png")
    console.print(f"results.json and results.png are in {out}")


if __name__ == "__main__":
    main()
