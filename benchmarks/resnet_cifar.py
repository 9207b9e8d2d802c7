"""ResNet-18 on CIFAR-10: fp32, torch's AMP and mixprec side by side.

    python benchmarks/resnet_cifar.py
    torchrun --nproc-per-node 8 benchmarks/resnet_cifar.py

Every mode (_modes.py) starts from the same weights, sees the same batches, and is trained and timed
by the same loop (_train.py). torchrun's processes (_ranks.py) train together, by
DistributedDataParallel in every mode.
"""

from __future__ import annotations

import dataclasses
import shlex
import sys
import time
from pathlib import Path

import _ranks
import torch
from _batches import load_splits
from _config import BenchmarkError, Config, build_parser, changed_options, resolve_device_defaults
from _data import Source, open_source
from _live import TensorBoard, TrainingBar
from _modes import build, logits
from _report import environment, print_report, write_files
from _train import StopFlag, Training, save_atomically
from rich.console import Console

CPU_SECONDS = 120  # of training, which a run on a CPU is cut to


class Benchmark:
    """All trainings of one output folder, and its checkpoint: what is done, what is in hand."""

    def __init__(self, config: Config, out: Path, console: Console):
        self.config, self.out, self.console = config, out, console
        self.results: list[dict] = []
        self.unfinished: dict | None = None  # the training that a loaded checkpoint goes on with
        self.doing = "the start"

    @classmethod
    def load(cls, out: Path, console: Console) -> Benchmark:
        path = out / "checkpoint.pt"
        if not path.is_file():
            raise BenchmarkError(f"--resume {out}: there is no checkpoint.pt in it")
        try:
            # To the CPU: random states must be there, and load_state_dict moves the rest.
            content = torch.load(path, map_location="cpu", weights_only=True)
            benchmark = cls(Config(**content["config"]), out, console)
            benchmark.results, benchmark.unfinished = content["results"], content["unfinished"]
        except Exception as error:
            raise BenchmarkError(
                f"{path} is damaged, or no checkpoint of this script ({type(error).__name__})"
            ) from None
        return benchmark

    def save(self, training: Training | None = None) -> None:
        self.write(
            "checkpoint.pt",
            {
                "config": dataclasses.asdict(self.config),
                "results": self.results,
                "unfinished": training and training.state_dict(),
            },
        )

    def write(self, name: str, content: dict) -> None:
        """By the first process, whose state is that of all."""
        if _ranks.rank() == 0:
            save_atomically(self.out / name, content)

    def run(self) -> bool:
        """Train what is not done yet, then report; False if interrupted."""
        config = self.config
        if config.device_type == "cuda":
            index = torch.device(config.device).index
            torch.cuda.set_device(_ranks.local_rank() if index is None else index)
            torch.backends.cudnn.benchmark = not config.deterministic
            torch.backends.cudnn.deterministic = config.deterministic
        source = _ranks.one_after_the_first(lambda: open_source(config, self.console))
        config.data = source.kind
        check_model(config, source)
        if config.device_type == "cpu":
            if config.dtype == "fp16":
                self.console.print(
                    "Note: fp16 convolutions are slow on most CPUs; bf16 is the default here."
                )
            if config.train_limit is None:
                if _ranks.rank() == 0:
                    self.fit_to_cpu(source)
                config.train_limit = _ranks.from_rank_0(config.train_limit)
        splits = load_splits(source, config, self.console)
        height, width = source.size
        data = {
            "name": source.name,
            "train": len(splits["train"]),
            "test": len(splits["test"]),
            "classes": source.num_classes,
            "height": height,
            "width": width,
            "loader": config.loader,
        }
        info = environment(config)

        done = [(result["mode"], result["seed"]) for result in self.results]
        todo = [(mode, seed) for seed in config.seeds for mode in config.modes]
        with StopFlag() as stop:
            try:
                for mode, seed in todo:
                    if (mode, seed) not in done:
                        training = Training(mode, seed, config, splits, source.num_classes)
                        if not self.train(training, stop):
                            return False
                        del training  # before the next mode measures its memory
            finally:
                if self.results and _ranks.rank() == 0:
                    write_files(self.out, info, self.results, config, data)
        print_report(self.console, info, self.results, config, data)
        self.console.print(
            f"results.json, results.png and weights are in {self.out}",
            soft_wrap=True,
        )
        return True

    def train(self, training: Training, stop: StopFlag) -> bool:
        """One training, from its start or from the checkpoint; False if interrupted."""
        config, mode, seed = self.config, training.mode, training.seed
        name = self.doing = mode + (f" seed {seed}" if len(config.seeds) > 1 else "")
        if self.unfinished:
            training.load_state_dict(self.unfinished)
            self.unfinished = None
        events = None
        if config.tensorboard and _ranks.rank() == 0:
            events = TensorBoard(self.out / "tensorboard" / f"{mode}-seed{seed}", training)
        with TrainingBar(name, training, self.console) as bar:
            while len(training.accuracies) < config.epochs:
                bar.restart(training)
                epoch_done = training.train_epoch(stop, bar.show) and training.evaluate(stop)
                self.save(training)
                if not epoch_done:
                    return False
                if events:
                    events.write(training)
                loss = training.losses[: training.step][-training.steps_per_epoch :].mean()
                self.console.print(
                    f"{name}: epoch {len(training.accuracies)}/{config.epochs}, loss {loss:.4f}, "
                    f"test accuracy {training.accuracies[-1]:.2f} %, "
                    f"scale {training.scales[training.step - 1]:g}",
                    soft_wrap=True,
                )
        self.write(f"weights-{mode}-seed{seed}.pt", training.setup.model.state_dict())
        self.results.append(training.result())
        self.save()
        return True

    def fit_to_cpu(self, source: Source) -> None:
        """Set train_limit to what CPU_SECONDS allow, from one timed iteration of each mode."""
        config = self.config
        eager = dataclasses.replace(config, compile=False)
        seconds_per_image = 0.0
        for mode in config.modes:
            setup = build(mode, 0, source.num_classes, eager)
            for count in (2, 8):  # the first one is the warm-up
                x, y = torch.zeros(count, 3, *source.size), torch.zeros(count, dtype=torch.int64)
                began = time.perf_counter()
                setup.train_step(x, y)
            seconds_per_image += (time.perf_counter() - began) / count
        # A fifth is left for evaluation.
        allowed = (
            0.8
            * CPU_SECONDS
            * config.processes
            / (config.epochs * len(config.seeds) * seconds_per_image)
        )
        # Coarse steps (1, 1.5, 2, 3, 4, 6 ...), so that one machine nearly always gets one size.
        sizes = [
            config.global_batch_size * factor * 2**power for power in range(20) for factor in (2, 3)
        ]
        fitting = max([sizes[0]] + [size for size in sizes if size <= allowed])
        config.train_limit = min(fitting, source.counts["train"])
        self.console.print(
            f"No GPU: cut down to {config.epochs} epochs of {config.train_limit:,} training images "
            f"in batches of {config.batch_size}, {config.dtype}, about two minutes here (on a GPU: "
            f"10 epochs of {source.counts['train']:,} in batches of 256, fp16). "
            "Accuracies say little at this size.",
            soft_wrap=True,
        )


def check_model(config: Config, source: Source) -> None:
    """Refuse images that the model cannot take, before they are read."""
    config_fp32 = dataclasses.replace(config, device="cpu", compile=False)
    model = build("fp32", 0, source.num_classes, config_fp32).model
    height, width = source.size
    try:
        logits(model(torch.zeros(min(2, config.batch_size), 3, height, width)))
    except (RuntimeError, ValueError, AssertionError) as error:
        raise BenchmarkError(
            f"{config.model} cannot be trained on {width}x{height} images in batches of "
            f"{config.batch_size} ({error}): try another --image-size or --batch-size"
        ) from None


def start(given: dict, console: Console) -> Benchmark:
    """The benchmark that the options ask for: a new one, or the one that --resume names."""
    if "resume" in given:
        benchmark = Benchmark.load(Path(given.pop("resume")), console)
        changed = changed_options(given, benchmark.config)
        if changed:
            raise BenchmarkError(
                f"--resume goes on with the options of the run in {benchmark.out}: leave out "
                f"{', '.join(changed)}, or start a new run"
            )
        resolve_device_defaults(benchmark.config)
        if benchmark.config.processes != _ranks.world_size():
            raise BenchmarkError(
                f"--resume: the run in {benchmark.out} has {benchmark.config.processes} processes, "
                f"not {_ranks.world_size()}: {command(benchmark)}"
            )
        return benchmark
    out = Path(given.pop("out", time.strftime("runs/resnet_cifar-%Y%m%d-%H%M%S")))
    config = Config(**given, processes=_ranks.world_size())
    resolve_device_defaults(config)
    if (out / "checkpoint.pt").exists():
        raise BenchmarkError(
            f"--out {out} holds a run already: go on with it by --resume {out}, or choose another"
        )
    out.mkdir(parents=True, exist_ok=True)
    benchmark = Benchmark(config, out, console)
    benchmark.save()
    return benchmark


def start_together(given: dict, console: Console) -> Benchmark:
    """The first process looks at the files, and tells the others; none goes on alone."""
    found: tuple = ()
    if _ranks.rank() == 0:
        try:
            benchmark = start(given, console)
            found = benchmark.config, benchmark.out, benchmark.results, benchmark.unfinished
        except (BenchmarkError, OSError):
            _ranks.from_rank_0(found)
            raise
    found = _ranks.from_rank_0(found)
    if not found:
        raise BenchmarkError("the first process could not start")
    benchmark = Benchmark(found[0], found[1], console)
    benchmark.results, benchmark.unfinished = found[2:]
    return benchmark


def command(benchmark: Benchmark) -> str:
    count = benchmark.config.processes
    launcher = ["python"] if count == 1 else ["torchrun", "--nproc-per-node", str(count)]
    return shlex.join([*launcher, sys.argv[0], "--resume", str(benchmark.out)])


def main(arguments: list[str] | None = None) -> int:
    console = Console(highlight=False)
    benchmark = None
    try:
        given = vars(build_parser().parse_args(arguments))
        _ranks.start()
        console.quiet = _ranks.rank() > 0
        benchmark = start_together(given, console)
        if benchmark.run():
            return 0
    except KeyboardInterrupt:  # before the training began
        pass
    except (BenchmarkError, OSError) as error:
        return fail(str(error)) if benchmark or _ranks.rank() == 0 else 2
    except RuntimeError as error:
        # On a CPU, torch raises no class of its own for this.
        if not isinstance(error, torch.OutOfMemoryError) and "allocate memory" not in str(error):
            raise
        size = benchmark.config.batch_size
        return fail(
            f"out of memory in {benchmark.doing} at batch size {size}: try --batch-size "
            f"{max(1, size // 2)}, a smaller --image-size or --model, or --loader torch, which "
            "keeps the images off the device"
        )
    if benchmark is None:
        print("interrupted before the run began", file=sys.stderr)
    else:
        if _ranks.rank() == 0:
            print(f"interrupted; go on with: {command(benchmark)}", file=sys.stderr)
    return 130


def fail(message: str) -> int:
    print("resnet_cifar.py: error:", *message.split(), file=sys.stderr)
    return 2


if __name__ == "__main__":
    _ranks.leave(main())
