"""Draws h200.svg from README's figures: python docs/pictures/draw.py [FILE]"""

import re
import sys
from pathlib import Path

import matplotlib
from matplotlib import pyplot as plt

matplotlib.use("Agg")
matplotlib.rcParams |= {"svg.fonttype": "none", "svg.hashsalt": "mixprec", "font.size": 9}
HERE = Path(__file__).parent
README = (HERE.parents[1] / "README.md").read_text()
NUMBER = r"[\d,.]*\d"
MODES = ["fp32", "amp", "mixprec"]
RECIPES = ["torch\nforeach", "torch\nfused", "mixprec\nfp32", "mixprec\nhalf", "mixprec\ncompact"]
COLOURS = {"mixprec": "#009485", "amp": "#9aa7b4", "fp32": "#5b6b7b", "torch": "#9aa7b4"}


def row(name: str, columns: int) -> list[str]:
    """The first number of each of the first cells of a table's row."""
    cells = re.search(rf"^\| {re.escape(name)} \|(.*)\|$", README, re.M)[1].split("|")
    return [re.search(NUMBER, cell)[0] for cell in cells[:columns]]


def resnet50(unit: str) -> list[str]:
    text = README[README.index("--model resnet50") :]
    return re.search(rf"({NUMBER}) / ({NUMBER}) / ({NUMBER})\s{unit}", text).groups()


def bars(axes: plt.Axes, title: str, names: list[str], figures: list[str]) -> None:
    colours = [COLOURS[name.split("\n")[0]] for name in names]
    drawn = axes.bar(names, [float(f.replace(",", "")) for f in figures], 0.7, color=colours)
    axes.bar_label(drawn, figures, padding=2)
    axes.set_title(title, fontsize=10)
    axes.set_yticks([])
    axes.margins(y=0.12)
    axes.spines[["left", "top", "right"]].set_visible(False)


def main() -> None:
    figure, panels = plt.subplots(2, 3, figsize=(10, 5), layout="constrained")
    small, large = "ResNet-18, 32x32, batch 256", "ResNet-50, 224x224, batch 128"
    of_modes = [
        (f"{small}\nms an iteration", row("ms an iteration, median (p10 - p90)", 3)),
        (f"{small}\npeak memory, MiB", row("peak memory, MiB", 3)),
        (f"{small}\ntest accuracy, %", row("test accuracy, %", 3)),
        (f"{large}\nms an iteration", resnet50("ms")),
        (f"{large}\npeak memory, MiB", resnet50("MiB")),
    ]
    for axes, (title, figures) in zip(panels.flat, of_modes, strict=False):
        bars(axes, title, MODES, figures)
    step = row("ResNet-50, 26 M", 5)
    bars(panels[1, 2], "the step of ResNet-50\nmicroseconds on the GPU", RECIPES, step)
    target = Path(sys.argv[1]) if len(sys.argv) > 1 else HERE / "h200.svg"
    figure.savefig(target, metadata={"Date": None})


if __name__ == "__main__":
    main()
