"""Measures the cost of privacy in training on several processes: time, collectives, and memory of a process.

    python -m benchmarks.distributed --out distributed.json

For each parallel layout, processes on gloo train a private and an ordinary copy of the model. Their steps alternate,
between barriers, so that drift of the machine affects both equally. All steps use the same batch, and include noise and
update, but not data loading. Each process has one thread. Collectives are those of one step. The size of a message is
that of the sum or of the gathered tensor. Memory is measured in separate processes, as in ``benchmarks.memory``.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.exchanges import Exchanges
from benchmarks.memory import probes
from benchmarks.spread import CELLS, ORDINARY, PRIVATE, TOPOLOGIES, launched, stepping

KINDS = (PRIVATE, ORDINARY)
TARGET = 1.25
_MIB = 1 << 20


def time_and_count(cell: str, topology: str, steps: int, warm_up: int) -> dict[str, Any]:
    """Returns the seconds of interleaved steps of each kind, and the collectives of one step. Runs in every process."""
    step = {kind: stepping(CELLS[cell], topology, kind) for kind in KINDS}
    seconds: dict[str, list[float]] = {kind: [] for kind in KINDS}
    for number in range(warm_up + steps):
        for kind in KINDS:
            dist.barrier()
            start = time.perf_counter()
            step[kind]()
            dist.barrier()
            if number >= warm_up:
                seconds[kind].append(time.perf_counter() - start)
    exchanges = {}
    for kind in KINDS:
        with Exchanges() as seen:
            step[kind]()
        exchanges[kind] = {name: [count, seen.sizes[name]] for name, count in sorted(seen.calls.items())}
    return {"seconds": seconds, "exchanges": exchanges}


def peak_memory(cell: str, topology: str, kind: str, **options: Any) -> dict[str, float]:
    """Returns the peak MiB of the first three steps and of later ones, minus the memory before the model was built."""
    for _ in range(2):
        stepping(CELLS["tiny"], topology, kind, **options)()  # imports modules and opens connections
    before, first, later = probes("cpu")
    later()  # returns freed memory to the system
    resting = before()
    step = stepping(CELLS[cell], topology, kind, **options)
    for _ in range(3):
        step()
    figures = {"first": (first() - resting) / _MIB}
    for _ in range(2):
        step()
    settle = later()
    for _ in range(2):
        step()
    return {**figures, "later": (settle() - resting) / _MIB}


def measure(cell: str, topology: str, steps: int, warm_up: int, *, memory: bool) -> dict[str, Any]:
    """Returns all figures of a model in one layout."""
    ranks = TOPOLOGIES[topology]
    of_ranks = launched(ranks, time_and_count, cell, topology, steps, warm_up)
    seconds = of_ranks[0]["seconds"]
    median = {kind: statistics.median(past) for kind, past in seconds.items()}
    row: dict[str, Any] = {"cell": cell, "topology": topology, "ranks": ranks, "exchanges": of_ranks[0]["exchanges"]}
    row["ms"] = {kind: 1e3 * value for kind, value in median.items()}
    row["ratio"] = median[PRIVATE] / median[ORDINARY]
    # Ratios of adjacent steps: a temporary slowdown of the machine affects both.
    row["pairs"] = statistics.quantiles([a / b for a, b in zip(*(seconds[k] for k in KINDS), strict=True)], n=4)
    if memory:
        row["memory"] = {kind: _largest(launched(ranks, peak_memory, cell, topology, kind)) for kind in KINDS}
    return row


def _largest(of_ranks: list[dict[str, float]]) -> dict[str, float]:
    return {name: max(one[name] for one in of_ranks) for name in of_ranks[0]}


def times(rows: list[dict[str, Any]]) -> str:
    """Returns times and memory as Markdown."""
    lines = [
        "| model | layout | processes | ordinary ms | private ms | ratio | quartiles of pairs | target | "
        "ordinary MiB | private MiB | ratio |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        met = "met" if row["ratio"] <= TARGET else f"missed by {100 * (row['ratio'] / TARGET - 1):.0f} %"
        ms, (low, _, high) = row["ms"], row["pairs"]
        line = f"| {row['cell']} | {row['topology']} | {row['ranks']} | {ms[ORDINARY]:.0f} | {ms[PRIVATE]:.0f} | "
        line += f"{row['ratio']:.2f} | {low:.2f} to {high:.2f} | {TARGET}: {met} | "
        if "memory" in row:
            mib = {kind: row["memory"][kind]["later"] for kind in KINDS}
            line += f"{mib[ORDINARY]:.0f} | {mib[PRIVATE]:.0f} | {mib[PRIVATE] / mib[ORDINARY]:.2f} |"
        else:
            line += "- | - | - |"
        lines.append(line)
    return "\n".join(lines)


def exchanged(rows: list[dict[str, Any]]) -> str:
    """Returns the collectives of a step as Markdown."""
    lines = ["| model | layout | collective | ordinary | private | bytes ordinary | bytes private |"]
    lines.append("|---|---|---|---|---|---|---|")
    for row in rows:
        found = row["exchanges"]
        for name in sorted(found[PRIVATE].keys() | found[ORDINARY].keys()):
            (count, size), (plain, plain_size) = (found[kind].get(name, (0, 0)) for kind in KINDS)
            prefix = f"| {row['cell']} | {row['topology']} | {name} | "
            lines.append(f"{prefix}{plain} | {count} | {plain_size:,} | {size:,} |")
    return "\n".join(lines)


def main() -> None:
    """Runs the benchmark from the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    cells = [name for name in CELLS if name != "tiny"]
    parser.add_argument("--cells", nargs="+", default=cells, choices=cells)
    parser.add_argument("--topologies", nargs="+", default=list(TOPOLOGIES), choices=TOPOLOGIES)
    parser.add_argument("--steps", type=int, default=15)
    parser.add_argument("--warm-up", type=int, default=5)
    parser.add_argument(
        "--memory", nargs="*", default=["transformer"], choices=cells, help="models whose memory is measured"
    )
    parser.add_argument("--out", help="a JSON file, written after each row")
    given = parser.parse_args()
    results: dict[str, Any] = {"torch": torch.__version__, "machine": platform.platform(), "rows": []}
    for cell in given.cells:
        for topology in given.topologies:
            row = measure(cell, topology, given.steps, given.warm_up, memory=cell in given.memory)
            results["rows"].append(row)
            print(f"{cell}, {topology}: {row['ratio']:.2f}", flush=True)
            if given.out:
                with open(given.out, "w") as file:
                    json.dump(results, file, indent=1)
    print(f"\n{times(results['rows'])}\n\n{exchanged(results['rows'])}")


if __name__ == "__main__":
    main()
