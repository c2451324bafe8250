"""Measures the cost of a ledger file: private steps with every charge on disk, or with several steps per charge.

    python -m benchmarks.durability --cells mlp,cnn,bert --folder /where/the/ledger/would/be

Steps alternate, so that drift of the machine affects all equally. Times are means, because with ``reserve_steps=m``
only one step in m writes. The time of a write depends on the disk: pass the folder that a real ledger would be in.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import warnings
from pathlib import Path

import torch

from benchmarks.cells import CELLS
from benchmarks.contenders import ours
from benchmarks.runner import Setting, timed

RESERVED = (1, 10, 100, 1000)


def main() -> None:
    """Prints one table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cells", default="mlp,cnn", help="cells of benchmarks.step")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--folder", type=Path, help="default: the folder for temporary files")
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(args.threads)
    print(f"torch {torch.__version__}, {args.threads} threads, {args.steps} steps\n")
    print(
        "| cell | in memory, ms | one write, ms | "
        + " | ".join(f"share of a step, reserve {m}" for m in RESERVED)
        + " | measured, reserve 1 |"
    )
    print("|" + "---|" * (4 + len(RESERVED)), flush=True)
    for name in args.cells.split(","):
        with tempfile.TemporaryDirectory(dir=args.folder) as folder:
            _row(name, Path(folder), args.steps, Setting(threads=args.threads))


def _row(name: str, folder: Path, steps: int, setting: Setting) -> None:
    from dpengine.ledger_file.run_ledger import RunLedger

    cell, writes = CELLS[name], []
    builds = {"memory": ours("auto"), "file": ours("auto", ledger=folder / "run.ledger")}
    runners = {}
    for kind, build in builds.items():
        torch.manual_seed(0)
        runners[kind] = build(cell, cell.make(), cell.batch(cell.batch_size), setting)
    charge = RunLedger.charge

    def timed_charge(*args: object, **kwargs: object) -> None:
        writes.append(timed(lambda: charge(*args, **kwargs), "cpu"))  # type: ignore[arg-type]

    RunLedger.charge = timed_charge  # type: ignore[method-assign]
    seconds: dict[str, list[float]] = {kind: [] for kind in builds}
    for step in range(20 + steps):  # the first steps choose between methods
        for kind, runner in runners.items():
            seconds[kind] += [timed(runner.step, "cpu")][step < 20 :]
    RunLedger.charge = charge  # type: ignore[method-assign]
    memory, write = statistics.mean(seconds["memory"]), statistics.mean(writes[20:])
    shares = " | ".join(f"{write / m / memory:.2%}" for m in RESERVED)
    measured = statistics.median(f - m for f, m in zip(seconds["file"], seconds["memory"], strict=True)) / memory
    print(f"| {name} | {1e3 * memory:.2f} | {1e3 * write:.3f} | {shares} | {measured:+.1%} |", flush=True)


if __name__ == "__main__":
    main()
