"""Growth of the cost of privacy with batch size, width and depth of an MLP, and with sequence length.

    python -m benchmarks.scaling --out scaling.json --plot scaling.svg

The cost is the time of dpengine's default mode over that of the ordinary step, interleaved as in ``benchmarks.step``.
The correctness of these layers is checked there.
"""

from __future__ import annotations

import argparse
import functools
import json
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from benchmarks import models
from benchmarks.cells import Cell, vectors
from benchmarks.runner import Setting
from benchmarks.table import pyplot
from benchmarks.timing import Protocol, time_steps

CONTENDERS = ("plain", "dpengine auto")


@dataclass(frozen=True)
class Curve:
    """A cell whose cost is measured for several values of one quantity.

    Attributes:
        title: Quantities that stay constant.
        values: Values of the quantity that varies.
        cell: Returns the cell for a value.
    """

    title: str
    values: tuple[int, ...]
    cell: Callable[[int], Cell]


def _perceptron(rows: int, width: int, depth: int) -> Cell:
    return Cell(functools.partial(models.mlp, width=width, depth=depth), vectors(784), rows)


CURVES = {
    "batch": Curve("784-512-512-10", (16, 64, 256, 1024, 4096), lambda rows: _perceptron(rows, 512, 2)),
    "width": Curve("B=256, 2 hidden layers", (64, 256, 1024, 2048), lambda width: _perceptron(256, width, 2)),
    "depth": Curve("B=256, 512 wide", (1, 2, 4, 8, 16), lambda depth: _perceptron(256, 512, depth)),
    "length": Curve(
        "transformer layer, D=256, B=8",
        (16, 64, 128, 256, 512),
        lambda time: Cell(models.OneLayer, vectors(time, 256), 8),
    ),
}


def measure(name: str, protocol: Protocol, setting: Setting) -> list[dict[str, float]]:
    """Returns a record for each value of a curve: ``value``, ``plain_ms``, ``ratio``."""
    points = []
    for value in CURVES[name].values:
        rows, error = time_steps(CURVES[name].cell(value), CONTENDERS, protocol, setting)
        if error:
            raise RuntimeError(f"benchmarks.scaling: {name}={value}: {error}")
        points.append({"value": value, "plain_ms": rows["plain"]["median_ms"], "ratio": rows[CONTENDERS[1]]["ratio"]})
    return points


def table(curves: dict[str, list[dict[str, float]]]) -> str:
    """Returns the curves as Markdown."""
    lines = ["| variable | constants | value | non-private ms | ratio |", "|---|---|---|---|---|"]
    for name, points in curves.items():
        lines += [
            f"| {name} | {CURVES[name].title} | {p['value']} | {p['plain_ms']:.2f} | {p['ratio']:.2f} |" for p in points
        ]
    return "\n".join(lines)


def plot(curves: dict[str, list[dict[str, float]]], path: str) -> None:
    """Draws one panel for each curve."""
    plt = pyplot()
    figure, _ = plt.subplots(1, len(curves), figsize=(3.2 * len(curves), 2.8), sharey=True, layout="constrained")
    for axes, (name, points) in zip(figure.axes, curves.items(), strict=True):
        axes.plot([p["value"] for p in points], [p["ratio"] for p in points], marker="o")
        axes.axhline(1.0, color="black", linewidth=0.8)
        axes.set_xscale("log", base=2)
        axes.set_xlabel(name)
        axes.set_title(CURVES[name].title, fontsize="small")
    figure.axes[0].set_ylabel("private / ordinary step")
    figure.savefig(path)
    plt.close(figure)


def main() -> None:
    """Measures the curves."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--curves", nargs="+", default=list(CURVES), choices=CURVES)
    parser.add_argument("--steps", type=int, default=15)
    parser.add_argument("--warm-up", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--out", help="a JSON file")
    parser.add_argument("--plot", help="a picture, .svg or .png")
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(args.threads)
    protocol = Protocol(args.steps, args.warm_up, budget=20.0)
    setting = Setting(device=args.device, threads=args.threads)
    curves: dict[str, Any] = {name: measure(name, protocol, setting) for name in args.curves}
    print(table(curves))
    if args.out:
        with open(args.out, "w") as file:
            json.dump({"torch": torch.__version__, "threads": args.threads, "curves": curves}, file, indent=1)
    if args.plot:
        plot(curves, args.plot)


if __name__ == "__main__":
    main()
