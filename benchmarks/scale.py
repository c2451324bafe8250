"""Predicts which resource limits a run of 10^9 examples, 10^11 parameters and 1,000 processes.

    python -m benchmarks.scale

The model is in ``benchmarks.scale_model``. Its predictions are first compared with measurements of 1, 2 and 4 processes
on gloo. The constants of this machine are measured separately, in the same number of processes at once: matrix
products, passes over memory, normal numbers, and all-reduces of two sizes. Then the model predicts the large run, on
accelerators with the constants of their vendor.
"""

from __future__ import annotations

import argparse
import itertools
import os
import statistics
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from benchmarks.distributed import peak_memory
from benchmarks.sampling import drawing
from benchmarks.scale_large import large_tables
from benchmarks.scale_model import Machine, Run, draw_seconds, ordinary_seconds, peak, seconds, total_seconds
from benchmarks.spread import CELLS, ORDINARY, PRIVATE, launched, stepping

CELL = "perceptron"
WIDTHS = (784, 2048, 2048, 2048, 10)
_MIB = 1 << 20
_SMALL, _LARGE = 64, 5_000_000  # elements of an all-reduce
_REPEATS = 7


@dataclass(frozen=True)
class Case:
    """Layout of the model over processes.

    Attributes:
        topology: As in ``benchmarks.spread``.
        ranks: Number of processes.
        bands: Number of bands of the noise.
    """

    topology: str
    ranks: int
    bands: int = 1

    def run(self) -> Run:
        """Returns the run of this case for `benchmarks.scale_model`."""
        ends = list(itertools.pairwise(WIDTHS))
        weights = [a * b + b for a, b in ends]
        sharded = self.topology == "fsdp2"
        return Run(
            parameters=sum(weights),
            microbatch=CELLS[CELL].batch_size,
            replicas=1 if sharded else self.ranks,
            shards=self.ranks if sharded else 1,
            kept_bytes=4.0 * sum(a + b for a, b in ends),
            tensors=2 * len(weights),
            groups=len(weights),
            group=max(weights),
            largest=max(a * b for a, b in ends),
            bands=self.bands,
        )


CASES = (
    Case("one", 1),
    Case("ddp", 2),
    Case("ddp", 2, bands=8),
    Case("fsdp2", 2),
    Case("ddp", 4),
    Case("fsdp2", 4),
)


def timed(call: Callable[[], Any], repeats: int = _REPEATS) -> float:
    """Returns the median seconds of a call that all processes start and end together."""
    call()
    past = []
    for _ in range(repeats):
        dist.barrier()
        start = time.perf_counter()
        call()
        dist.barrier()
        past.append(time.perf_counter() - start)
    return statistics.median(past)


def constants() -> dict[str, float]:
    """Measures the constants of a process while the others do the same. Runs in every process."""
    from dpengine.noise import NoiseSource

    batch_size, width, ranks = CELLS[CELL].batch_size, WIDTHS[1], dist.get_world_size()
    x, g, weight = torch.randn(batch_size, width), torch.randn(batch_size, width), torch.randn(width, width)
    waiting = timed(lambda: None)

    def products() -> None:
        for _ in range(5):
            x @ weight.T, g @ weight, g.T @ x

    many, total = torch.zeros(_LARGE), torch.zeros(_LARGE)
    source = NoiseSource.fresh()
    found = {
        "products": 5 * 6 * batch_size * width**2 / (timed(products) - waiting),
        "memory_rate": 12 * _LARGE / (timed(lambda: total.add_(many)) - waiting),
        "normal": (timed(lambda: source.add_normal_(total, 1.0, domain="benchmark", step=0)) - waiting) / _LARGE,
        "latency": 0.0,
        "link_rate": 1.0,
    }
    if ranks > 1:
        hops, small = 2 * (ranks - 1), torch.zeros(_SMALL)
        found["latency"] = max(timed(lambda: dist.all_reduce(small), 30) - waiting, 0.0) / hops
        one = (timed(lambda: dist.all_reduce(total)) - waiting) / hops
        found["link_rate"] = 4 * _LARGE / ranks / (one - found["latency"])
    return found


def options(bands: int) -> dict[str, Any]:
    """Returns the arguments of ``make_private`` for noise with this number of bands."""
    from dpengine.noise import BandMF

    return {"noise": BandMF(num_bands=bands), "steps": 1000} if bands > 1 else {}


def peak_mib(topology: str, bands: int) -> float:
    """Returns the peak MiB of private steps. Runs in every process."""
    return peak_memory(CELL, topology, PRIVATE, **options(bands))["later"]


def timings(topology: str, bands: int, steps: int) -> dict[str, Any]:
    """Returns constants and median seconds of steps. Runs in every process."""
    found: dict[str, Any] = {"machine": constants()}
    calls = {PRIVATE: stepping(CELLS[CELL], topology, PRIVATE, **options(bands))}
    calls[ORDINARY] = stepping(CELLS[CELL], topology, ORDINARY)
    past: dict[str, list[float]] = {kind: [] for kind in calls}
    for number in range(5 + steps):
        for kind, call in calls.items():
            dist.barrier()
            start = time.perf_counter()
            call()
            dist.barrier()
            if number >= 5:
                past[kind].append(time.perf_counter() - start)
    return {**found, **{kind: statistics.median(one) for kind, one in past.items()}}


def largest_peak(case: Case) -> float:
    """Returns the largest peak MiB of the processes, with freed memory returned at once."""
    with mock.patch.dict(os.environ, {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}):
        return max(launched(case.ranks, peak_mib, case.topology, case.bands))


def compare(steps: int) -> str:
    """Returns predictions, measurements and the measured constants as Markdown."""
    lines = [
        "| processes | layout | bands | ordinary ms: predicted | measured | private ms: predicted | measured | "
        "error | peak MiB: predicted | measured | error |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    measured = ["| processes | layout | GFLOP/s | memory GB/s | ns per normal | link GB/s | hop ms |", "|" + "---|" * 7]
    parts = ["| processes | layout | bands | products | exchange | noise | passes over memory |", "|" + "---|" * 7]
    for case in CASES:
        of_ranks = launched(case.ranks, timings, case.topology, case.bands, steps)
        first, measured_peak = of_ranks[0], largest_peak(case)
        rates = {name: statistics.mean(one["machine"][name] for one in of_ranks) for name in first["machine"]}
        machine, run = Machine(memory=1e10, draw=0.0, draw_bytes=0.0, scatters=False, **rates), case.run()
        prefix = f"| {case.ranks} | {case.topology} |"
        ordinary, private = 1e3 * ordinary_seconds(run, machine), 1e3 * total_seconds(run, machine)
        bound = peak(run, machine) / _MIB
        found = {kind: 1e3 * first[kind] for kind in (ORDINARY, PRIVATE)}
        lines.append(
            f"{prefix} {case.bands} | {ordinary:.0f} | {found[ORDINARY]:.0f} | {private:.0f} | {found[PRIVATE]:.0f} | "
            f"{error(private, found[PRIVATE])} | {bound:.0f} | {measured_peak:.0f} | {error(bound, measured_peak)} |"
        )
        measured.append(
            f"{prefix} {machine.products / 1e9:.0f} | {machine.memory_rate / 1e9:.1f} | {1e9 * machine.normal:.2f} | "
            + ("- | - |" if case.ranks == 1 else f"{machine.link_rate / 1e9:.2f} | {1e3 * machine.latency:.2f} |")
        )
        names = ("products", "exchange", "noise", "passes over memory")
        each = seconds(run, machine)
        parts.append(f"{prefix} {case.bands} | " + " | ".join(f"{1e3 * each[name]:.0f}" for name in names) + " |")
        print(f"{case.topology}, {case.ranks} processes, {case.bands} bands: done", flush=True)
    return "\n\n".join("\n".join(one) for one in (lines, measured, parts))


def error(predicted: float, found: float) -> str:
    """Returns the relative error of a prediction."""
    return f"{100 * (predicted / found - 1):+.0f} %"


def draws() -> str:
    """Returns measured draws of larger batches from more examples, and their prediction from a million, as Markdown."""

    def once(examples: int, batch: int) -> float:
        draw = drawing(examples, batch)
        draw(0)
        past = []
        for step in range(1, 6):
            start = time.perf_counter()
            draw(step)
            past.append(time.perf_counter() - start)
        return statistics.median(past)

    each = once(1_000_000, 100_000) / 100_000
    lines = ["| examples | expected batch | ms predicted | measured | error |", "|---|---|---|---|---|"]
    machine = Machine(1e10, 1.0, 1.0, 1.0, 1.0, 1.0, draw=each)
    for examples, batch in ((1_000_000_000, 100_000), (1_000_000_000, 1_000_000)):
        predicted = 1e3 * draw_seconds(Run(1.0, microbatch=batch, examples=examples), machine)
        found = 1e3 * once(examples, batch)
        lines.append(f"| {examples:,} | {batch:,} | {predicted:.1f} | {found:.1f} | {error(predicted, found)} |")
    return "\n".join(lines)


def main() -> None:
    """Prints the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=11)
    parser.add_argument("--skip-measurements", action="store_true", help="print the large run alone")
    given = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    if not given.skip_measurements:
        compared = compare(given.steps)
        print(f"\n{compared}\n\n{draws()}\n")
    print(large_tables())


if __name__ == "__main__":
    main()
