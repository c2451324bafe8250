"""Step time of this checkout relative to another revision, interleaved step by step.

    python -m benchmarks.revisions 170d470 --cells mlp cnn --pairs 200

Each revision runs the same cell (a model with its data) in a separate process, with its own ``benchmarks`` and its own
native library. The processes step alternately, in pairs of alternating order. The second of two adjacent steps can be
30% faster, so a ratio is the geometric mean of two pairs with opposite order. Prints the median of these ratios and its
95% bounds, from the ranks of the sorted ratios.

The ratio of two processes with the same code can be several percent from 1 throughout a run. ``--starts 10`` starts 10
pairs of processes. It prints the median of each, and then the median of these medians with its bounds.
"""

from __future__ import annotations

import argparse
import math
import os
import platform
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]

_WORKER = """
import sys, time, torch
from benchmarks.cells import CELLS
from benchmarks.contenders import start
from benchmarks.runner import Setting
torch.set_num_threads({threads})
torch.manual_seed(0)
step = start(CELLS[{cell!r}], "dpengine auto", Setting(threads={threads})).step
for _ in range({warm_up}):
    step()
print("ready", flush=True)
for _ in sys.stdin:
    start_time = time.perf_counter()
    step()
    print(time.perf_counter() - start_time, flush=True)
"""


def export(revision: str, folder: Path) -> None:
    """Writes the files of a revision to a folder, and builds its native library there."""
    archive = subprocess.run(["git", "archive", revision], cwd=ROOT, check=True, capture_output=True).stdout
    subprocess.run(["tar", "x", "-C", str(folder)], input=archive, check=True)
    build = [sys.executable, "setup.py", "-q", "build_ext", "--inplace"]
    subprocess.run(build, cwd=folder, check=True, stdout=subprocess.DEVNULL)
    if not list((folder / "dpengine").rglob("native*.so")):
        raise RuntimeError(f"the native library of {revision} was not built: see the output of setup.py build_ext")


def worker(folder: Path, cell: str, warm_up: int, threads: int) -> subprocess.Popen[str]:
    """Starts a process that runs one step of the cell for each line that it reads."""
    code = _WORKER.format(cell=cell, warm_up=warm_up, threads=threads)
    environment = os.environ | {"PYTHONPATH": str(folder)}
    pipe = subprocess.PIPE
    return subprocess.Popen(
        [sys.executable, "-c", code], cwd=folder, env=environment, stdin=pipe, stdout=pipe, text=True
    )


def seconds(process: subprocess.Popen[str]) -> float:
    """Returns the seconds of one step of a worker."""
    assert process.stdin is not None and process.stdout is not None
    process.stdin.write("\n")
    process.stdin.flush()
    return float(process.stdout.readline())


def bounds(ratios: list[float]) -> tuple[float, float, float]:
    """Returns the lower 95% bound of the median, the median, and the upper bound."""
    ordered, half = sorted(ratios), len(ratios) / 2
    distance = 0.98 * math.sqrt(len(ratios))  # 1.96 standard deviations of a rank, sqrt(n) / 2 each
    at = lambda index: ordered[min(len(ordered) - 1, max(0, index))]  # noqa: E731
    return at(math.floor(half - distance)), at(int(half)), at(math.ceil(half + distance))


def compare(other: Path, cell: str, pairs: int, warm_up: int, threads: int) -> list[float]:
    """Returns ratios of step times, this checkout over the other, each from two pairs of opposite order."""
    processes = [worker(folder, cell, warm_up, threads) for folder in (ROOT, other)]
    try:
        for process in processes:
            assert process.stdout is not None and process.stdout.readline() == "ready\n"
        ratios = []
        for _ in range(pairs // 2):
            first, other_first = seconds(processes[0]), seconds(processes[1])
            other_second, second = seconds(processes[1]), seconds(processes[0])
            ratios.append(math.sqrt(first * second / (other_first * other_second)))
        return ratios
    finally:
        for process in processes:
            process.kill()


def main() -> None:
    """Prints one line for each cell."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("revision")
    parser.add_argument("--cells", nargs="+", default=["mlp", "cnn", "embedding", "lstm", "bert", "lora"])
    parser.add_argument("--pairs", type=int, default=100)
    parser.add_argument("--warm-up", type=int, default=10)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--starts", type=int, default=1)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        export(args.revision, Path(folder))
        print(f"{platform.machine()}, {args.threads} threads, {args.pairs} pairs, ratio to {args.revision}")
        for cell in args.cells:
            medians = []
            for _ in range(args.starts):
                ratios = compare(Path(folder), cell, args.pairs, args.warm_up, args.threads)
                medians.append(bounds(ratios)[1])
                if args.starts > 1:
                    print(f"{cell:16} {medians[-1]:.3f}", flush=True)
            low, middle, high = bounds(ratios if args.starts == 1 else medians)
            print(f"{cell:16} {middle:.3f}  ({low:.3f} to {high:.3f})", flush=True)


if __name__ == "__main__":
    main()
