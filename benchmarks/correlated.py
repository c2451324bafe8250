"""Measures the benefit of noise that is correlated across steps: accuracy at equal epsilon, and cost of the noise.

    python -m benchmarks.correlated accuracy --seeds 5 --out correlated.json --plot correlated.svg
    python -m benchmarks.correlated cost

Accuracy: FashionMNIST, a linear layer on fixed wavelet features, SGD with a constant rate. One arm has independent
noise and Poisson sampling, the others BandMF with cyclic Poisson sampling. Batch size, steps, clipping norm and epsilon
are the same. Each arm has the best rate of a list for each epsilon, by the mean accuracy over seeds on the test split.
Runs are seeded, so they are not private.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

from dpengine import PrivacyEngine
from dpengine.noise import AbstractNoise, NoiseSource, banded_toeplitz, optimize_banded
from dpengine.noise.correlated import mechanism_for
from dpengine.plan import BandMFConfig

BATCH, EPOCHS, DELTA, BOUND = 100, 2, 1e-5, 0.1
RATES = (0.5, 1.0, 2.0, 4.0)
EPSILONS = (0.5, 1.0, 2.0, 4.0)
BANDS = (1, 16, 32)


def plan_for(bands: int, epsilon: float, num_examples: int) -> BandMFConfig:
    """Returns the mechanism of an arm; one band is DP-SGD."""
    config = BandMFConfig.default(
        num_bands=bands,
        iterations=EPOCHS * num_examples // BATCH,
        sampling_prob=bands * BATCH / num_examples,
        num_examples=num_examples,
        l2_clip_norm=BOUND,
        rescale_to_unit_norm=True,
        normalize_by=float(BATCH),
    )
    return config.calibrate(epsilon=epsilon, delta=DELTA, tol=1e-3)


def accuracy(config: BandMFConfig, data: tuple[Tensor, Tensor, Tensor, Tensor], rate: float, seed: int) -> float:
    """Returns the accuracy of one run on the test split."""
    train_x, train_y, test_x, test_y = data
    torch.manual_seed(seed)
    model = nn.Linear(train_x.shape[1], 10)
    optimizer = torch.optim.SGD(model.parameters(), lr=rate)
    loader = DataLoader(TensorDataset(train_x, train_y), batch_size=BATCH, collate_fn=_collate)
    engine = PrivacyEngine(seed=seed)
    _, _, batches = engine.make_private(model, optimizer, loader, plan=config, target_delta=DELTA)
    steps = 0
    while steps < config.iterations:
        for x, y in batches:
            optimizer.zero_grad()
            cross_entropy(model(x), y).backward()
            optimizer.step()
            steps += 1
    with torch.no_grad():
        return float((model(test_x).argmax(dim=1) == test_y).float().mean())


def _collate(pairs: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """Returns the inputs and the labels of a batch."""
    return torch.stack([p[0] for p in pairs]), torch.stack([p[1] for p in pairs])


def run_accuracy(args: argparse.Namespace) -> None:
    """Prints one line for each arm and epsilon."""
    from tutorials.demo.tasks import FILTERS

    labelled = FILTERS.load()
    inputs = (FILTERS.inputs(labelled.train_inputs), FILTERS.inputs(labelled.test_inputs))
    data = (inputs[0], labelled.train_labels, inputs[1], labelled.test_labels)
    rows: list[dict[str, Any]] = []
    print(f"{labelled.title}, {len(inputs[0]):,} examples, batches of {BATCH}, {EPOCHS} epochs, delta {DELTA:g}\n")
    print("| epsilon | bands | noise multiplier | rmse of plan | rate | accuracy | standard deviation over seeds |")
    print("|---|---|---|---|---|---|---|", flush=True)
    for epsilon in args.epsilons:
        for bands in args.bands:
            config = plan_for(bands, epsilon, len(inputs[0]))
            found = {rate: [accuracy(config, data, rate, seed) for seed in range(args.seeds)] for rate in args.rates}
            rate = max(found, key=lambda rate: statistics.mean(found[rate]))
            row = {
                "epsilon": epsilon,
                "bands": bands,
                "noise_multiplier": config.noise_multiplier,
                "rmse": config.rmse,
                "rate": rate,
                "accuracies": found[rate],
                "all": {str(rate): values for rate, values in found.items()},
            }
            rows.append(row)
            mean, deviation = statistics.mean(found[rate]), statistics.stdev(found[rate])
            print(
                f"| {epsilon:g} | {bands} | {config.noise_multiplier:.3f} | {config.rmse:.3f} | {rate:g} | "
                f"{100 * mean:.2f} | {100 * deviation:.2f} |",
                flush=True,
            )
            if args.out:
                Path(args.out).write_text(json.dumps(rows, indent=1))
    if args.plot:
        Path(args.plot).write_text(plot(rows))


def plot(rows: list[dict[str, Any]]) -> str:
    """Returns an SVG plot of accuracy against epsilon, with one line per number of bands and error bars."""
    width, height, left, bottom = 560, 360, 60, 50
    epsilons = sorted({row["epsilon"] for row in rows})
    values = [statistics.mean(row["accuracies"]) for row in rows]
    low, high = min(values) - 0.01, max(values) + 0.01
    x_of = {
        e: left + (width - left - 120) * i / max(1, len(epsilons) - 1) for i, e in enumerate(epsilons)
    }  # equal distances, because epsilons double
    y_of = lambda value: (height - bottom) - (height - bottom - 20) * (value - low) / (high - low)  # noqa: E731
    colours = ["#777777", "#1f77b4", "#d62728", "#2ca02c"]
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" font-family="sans-serif" '
        'font-size="12">',
        f'<rect width="{width}" height="{height}" fill="white"/>',
    ]
    for e in epsilons:
        parts.append(f'<text x="{x_of[e]:.1f}" y="{height - bottom + 18}" text-anchor="middle">{e:g}</text>')
    parts.append(f'<text x="{(left + width - 120) / 2:.0f}" y="{height - 12}" text-anchor="middle">epsilon</text>')
    parts.append(f'<text x="{left - 48}" y="14">test accuracy; bars: one standard deviation over seeds</text>')
    labels_y: list[float] = []  # positions of the labels of lines, which must not overlap
    tick = round(low * 100 + 0.5)
    while tick / 100 < high:
        y = y_of(tick / 100)
        parts.append(f'<line x1="{left - 8}" x2="{width - 110}" y1="{y:.1f}" y2="{y:.1f}" stroke="#dddddd"/>')
        parts.append(f'<text x="{left - 12}" y="{y + 4:.1f}" text-anchor="end">{tick} %</text>')
        tick += 1
    for colour, bands in zip(colours, sorted({row["bands"] for row in rows}), strict=False):
        mine = [row for row in rows if row["bands"] == bands]
        means = [(x_of[row["epsilon"]], statistics.mean(row["accuracies"]), statistics.stdev(row["accuracies"]))
                 for row in mine]  # fmt: skip
        line = " ".join(f"{x:.1f},{y_of(mean):.1f}" for x, mean, _ in means)
        parts.append(f'<polyline points="{line}" fill="none" stroke="{colour}" stroke-width="2"/>')
        for x, mean, deviation in means:
            ends = f'y1="{y_of(mean - deviation):.1f}" y2="{y_of(mean + deviation):.1f}"'
            parts.append(f'<line x1="{x:.1f}" x2="{x:.1f}" {ends} stroke="{colour}"/>')
            parts.append(f'<circle cx="{x:.1f}" cy="{y_of(mean):.1f}" r="3" fill="{colour}"/>')
        name = "independent" if bands == 1 else f"{bands} bands"
        x, mean, _ = means[-1]
        y = y_of(mean) + 4
        while any(abs(y - other) < 14 for other in labels_y):
            y -= 1
        labels_y.append(y)
        parts.append(f'<text x="{x + 10:.1f}" y="{y:.1f}" fill="{colour}">{name}</text>')
    return "\n".join([*parts, "</svg>", ""])


def run_cost(args: argparse.Namespace) -> None:
    """Prints time and memory of one step's noise, interleaved with independent noise."""
    torch.set_num_threads(args.threads)
    print(f"torch {torch.__version__}, {args.threads} threads; float32\n")
    print(
        "| parameters | bands | ms | ratio to independent | ns per parameter | buffer MiB |\n|---|---|---|---|---|---|"
    )
    for size in args.sizes:
        sums = torch.zeros(size)
        noises: dict[int, AbstractNoise] = {}
        for bands in (1, *args.counts):
            column = optimize_banded(256, bands)
            noises[bands] = mechanism_for(NoiseSource.fresh(), None if bands == 1 else banded_toeplitz(column))
        seconds: dict[int, list[float]] = {bands: [] for bands in noises}
        for step in range(args.repeats + 2):
            for bands, noise in noises.items():
                start = time.perf_counter()
                noise.add(sums, std=1.0, step=step)
                seconds[bands] += [time.perf_counter() - start][step < 2 :]
        independent = statistics.median(seconds[1])
        for bands, times in seconds.items():
            median = statistics.median(times)
            buffer = (bands - 1) * size * 4 / 2**20
            print(
                f"| {size:,} | {bands} | {1e3 * median:.2f} | {median / independent:.2f} | {1e9 * median / size:.2f} | "
                f"{buffer:.0f} |",
                flush=True,
            )


def main() -> None:
    """Runs the comparison of accuracy or of cost."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["accuracy", "cost"])
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--epsilons", type=float, nargs="+", default=EPSILONS)
    parser.add_argument("--bands", type=int, nargs="+", default=BANDS)
    parser.add_argument("--rates", type=float, nargs="+", default=RATES)
    parser.add_argument("--out")
    parser.add_argument("--plot")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--sizes", type=int, nargs="+", default=(1_000_000, 10_000_000))
    parser.add_argument("--counts", type=int, nargs="+", default=(2, 4, 8, 16, 32, 64))
    parser.add_argument("--repeats", type=int, default=15)
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    (run_accuracy if args.what == "accuracy" else run_cost)(args)


if __name__ == "__main__":
    main()
