"""scaler.step(optimizer) + scaler.update() alone: torch foreach, torch fused and mixprec.

    python benchmarks/optimizer_step.py [--models resnet18,vit_l_16] [--clip 1.0]

Wall is the host's time for one call of both, median; on a GPU without waiting for it. GPU is the
sum of the kernels' durations, from torch.profiler. The floor is the bytes that any two-pass step
has to move (gradients are read once to find inf, once to step; all else is read and written once)
at the bandwidth of a large copy, measured in the same run. Gradients are finite, the scale stays 1.
L2 is not flushed: in training, too, the step follows the kernels that wrote the gradients.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import torchvision
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

import mixprec


def transformer_1b() -> nn.Module:
    return nn.ModuleList(nn.TransformerEncoderLayer(2048, 16, 8192) for _ in range(22))


def small_tensors() -> nn.Module:
    return nn.ParameterList(torch.empty(1000) for _ in range(2000))


MODELS: dict[str, Callable[[], nn.Module]] = {
    "resnet18": lambda: torchvision.models.resnet18(num_classes=10),
    "resnet50": torchvision.models.resnet50,
    "vit_l_16": torchvision.models.vit_l_16,
    "transformer_1b": transformer_1b,
    "small_tensors": small_tensors,
}


@dataclass
class Recipe:
    optimizer: Callable[..., torch.optim.Optimizer]
    scaler: type[torch.amp.GradScaler]
    weights: str = "fp32"  # or "Linear/Conv half", "all half"


RECIPES = {
    "torch foreach": Recipe(
        lambda p, **k: torch.optim.SGD(p, foreach=True, **k), torch.amp.GradScaler
    ),
    "torch fused": Recipe(lambda p, **k: torch.optim.SGD(p, fused=True, **k), torch.amp.GradScaler),
    "mixprec fp32": Recipe(mixprec.SGD, mixprec.GradScaler),
    "mixprec half_weights": Recipe(mixprec.SGD, mixprec.GradScaler, "Linear/Conv half"),
    "mixprec all half": Recipe(mixprec.SGD, mixprec.GradScaler, "all half"),
}


def make_params(model: str, weights: str, half: torch.dtype, device: str) -> list[Tensor]:
    """Parameters of the model's shapes with random values and gradients."""
    with torch.device("meta"):
        module = MODELS[model]()
    halves = set()
    for submodule in module.modules():
        if weights == "all half" or isinstance(submodule, (nn.Linear, nn.modules.conv._ConvNd)):
            halves.update(submodule.parameters(recurse=False))
    params = []
    for meta in module.parameters():
        dtype = half if weights != "fp32" and meta in halves else torch.float32
        param = nn.Parameter(torch.randn(meta.shape, device=device).to(dtype))
        param.grad = torch.randn(meta.shape, device=device).to(dtype)
        params.append(param)
    return params


def floor_bytes(params: list[Tensor]) -> int:
    """Gradient twice, weight and momentum read and written; half weights: the master too."""
    return sum(
        p.numel()
        * (2 * p.element_size() + 2 * p.element_size() + 8 + (8 if p.element_size() == 2 else 0))
        for p in params
    )


def copy_bandwidth(device: str) -> float:
    """Bytes a second, read and written, of a copy far larger than any cache."""
    source = torch.randn(2**30 if device == "cuda" else 2**27, device=device)
    target = torch.empty_like(source)
    times = [time_once(lambda: target.copy_(source), device) for _ in range(10)]
    return 2 * source.numel() * source.element_size() / min(times)


def synchronize(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def time_once(run: Callable[[], object], device: str) -> float:
    synchronize(device)
    start = time.perf_counter()
    run()
    synchronize(device)
    return time.perf_counter() - start


def wall_time(run: Callable[[], None], device: str, repeats: int) -> float:
    """Median seconds until `run` returns; on a GPU its kernels still run then."""
    times = []
    for _ in range(repeats):
        synchronize(device)
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def kernel_time(run: Callable[[], None], repeats: int) -> tuple[float, float]:
    """Seconds of all GPU work of one run, and the number of launches. Copies and memsets count."""
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _ in range(repeats):
            run()
        torch.cuda.synchronize()
    kernels = [e for e in profile.events() if e.device_type == torch.autograd.DeviceType.CUDA]
    return sum(e.device_time for e in kernels) * 1e-6 / repeats, len(kernels) / repeats


def measure(
    recipe: Recipe, model: str, half: torch.dtype, device: str, clip: float | None, repeats: int
) -> dict:
    params = make_params(model, recipe.weights, half, device)
    optimizer = recipe.optimizer(params, lr=1e-6, momentum=0.9)
    scaler = recipe.scaler(device, init_scale=1.0, growth_interval=2**30)
    scaler.scale(torch.zeros((), device=device))

    def run() -> None:
        if clip is not None:
            if isinstance(scaler, mixprec.GradScaler):
                scaler.clip_grad_norm_(optimizer, clip)
            else:
                scaler.unscale_(optimizer)
                nn.utils.clip_grad_norm_(params, clip)
        scaler.step(optimizer)
        scaler.update()

    for _ in range(3):
        run()
    result = {
        "parameters": sum(p.numel() for p in params),
        "tensors": len(params),
        "wall_s": wall_time(run, device, repeats),
        "floor_bytes": floor_bytes(params),
        "state_bytes": sum(
            t.numel() * t.element_size()
            for state in optimizer.state.values()
            for t in state.values()
            if isinstance(t, Tensor)
        ),
    }
    if device == "cuda":
        result["gpu_s"], result["launches"] = kernel_time(run, repeats)
    return result


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--models", default="resnet18,resnet50,vit_l_16", help=f"of {', '.join(MODELS)}"
    )
    parser.add_argument("--recipes", default=",".join(RECIPES), help="of the default's")
    parser.add_argument("--clip", type=float, help="also clip the gradients' norm to this")
    parser.add_argument(
        "--repeats", type=int, default=30, help="runs of each (default: %(default)s)"
    )
    parser.add_argument("--threads", type=int, help="CPU threads (default: torch's)")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--output", type=Path, help="write results to this JSON file")
    args = parser.parse_args()
    for names, known in ((args.models, MODELS), (args.recipes, RECIPES)):
        if unknown := set(names.split(",")) - set(known):
            parser.error(f"unknown: {', '.join(sorted(unknown))}; known: {', '.join(known)}")
    if args.threads:
        torch.set_num_threads(args.threads)
    half = torch.float16 if args.device == "cuda" else torch.bfloat16

    console = Console(width=120)
    name = (
        torch.cuda.get_device_name()
        if args.device == "cuda"
        else f"CPU, {torch.get_num_threads()} threads"
    )
    bandwidth = copy_bandwidth(args.device)
    console.print(
        f"{name}, torch {torch.__version__}, mixprec {mixprec.__version__}, half type {half}, "
        f"a large copy moves {bandwidth / 1e9:.0f} GB/s"
    )
    results = []
    for model in args.models.split(","):
        table = Table(
            "recipe",
            *(
                f"{h}"
                for h in (
                    "wall us",
                    "GPU us",
                    "launches",
                    "floor us",
                    "time/floor",
                    "faster than fused",
                    "state MB",
                )
            ),
            title=model,
        )
        rows = {
            r: measure(RECIPES[r], model, half, args.device, args.clip, args.repeats)
            for r in args.recipes.split(",")
        }
        fused = rows.get("torch fused")
        for recipe, row in rows.items():
            time_key = "gpu_s" if args.device == "cuda" else "wall_s"
            floor = row["floor_bytes"] / bandwidth
            row.update(model=model, recipe=recipe, clip=args.clip, bandwidth=bandwidth)
            table.add_row(
                recipe,
                f"{row['wall_s'] * 1e6:.0f}",
                f"{row['gpu_s'] * 1e6:.0f}" if "gpu_s" in row else "-",
                f"{row['launches']:.0f}" if "launches" in row else "-",
                f"{floor * 1e6:.0f}",
                f"{row[time_key] / floor:.2f}",
                f"{fused[time_key] / row[time_key]:.2f}x" if fused else "-",
                f"{row['state_bytes'] / 1e6:.0f}",
            )
            results.append(row)
        console.print(table)
    if args.output:
        args.output.write_text(
            json.dumps({"device": name, "torch": torch.__version__, "results": results}, indent=1)
        )


if __name__ == "__main__":
    main()
