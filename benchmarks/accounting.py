"""Compares accountants on runs whose epsilon is known: soundness, tightness and cost.

``python -m benchmarks.accounting --peers-python PATH --out accounting.json`` computes epsilon with every tool for every
setting of `accounting_truths.json`, measures the cost of epsilon after every step and of calibration, and prints
tables. ``--show`` prints the tables of earlier results; the last file takes precedence.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from . import accounting_table
from .accounting_settings import PATH, Setting
from .accounting_tools import OURS, TOOLS

ROOT = Path(__file__).resolve().parents[1]
EVERY = (  # ordinary runs, for which epsilon is computed after every step
    {"rate": 256 / 60000, "sigma": 1.1, "delta": 1e-5},
    {"rate": 0.01, "sigma": 1.0, "delta": 1e-6},
    {"rate": 1e-3, "sigma": 0.7, "delta": 1e-7},
)
EVERY_STEPS = 100_000
TARGETS = tuple(
    {"rate": rate, "steps": steps, "epsilon": epsilon, "delta": delta}
    for rate, steps, epsilon, delta in (
        (256 / 60000, 14_040, 2.0, 1e-5),
        (0.01, 1000, 1.0, 1e-6),
        (1e-3, 100_000, 8.0, 1e-7),
        (0.05, 600, 0.5, 1e-5),
        (0.1, 2000, 3.0, 1e-8),
        (1e-4, 1_000_000, 1.0, 1e-9),
        (0.5, 100, 10.0, 1e-5),
        (0.02, 5000, 0.1, 1e-6),
        (0.3, 10_000, 50.0, 1e-6),
        (0.005, 200, 4.0, 1e-12),
    )
)
PEER_TARGETS = 3


def main() -> None:
    """Runs the benchmark, or prints results."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--peers-python", default=sys.executable, help="interpreter that has Opacus and prv-accountant")
    parser.add_argument("--tools", nargs="*", default=list(TOOLS), choices=list(TOOLS))
    parser.add_argument("--parts", nargs="*", default=["settings", "every", "noise"])
    parser.add_argument("--stride", type=int, default=1, help="use only every n-th setting")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--show", type=Path, nargs="*")
    arguments = parser.parse_args()
    truths = json.loads(PATH.read_text())
    if arguments.show:
        print(accounting_table.report(merged(arguments.show), truths))
        return
    results: dict[str, Any] = {}
    for tool in arguments.tools:
        interpreter = sys.executable if tool in OURS else arguments.peers_python
        results[tool] = run_tool(tool, interpreter, truths["settings"][:: arguments.stride], arguments.parts)
        if arguments.out:
            arguments.out.write_text(json.dumps(results))
        print(f"{tool}: done", file=sys.stderr, flush=True)
    print(accounting_table.report(results, truths))


def merged(paths: list[Path]) -> dict[str, Any]:
    """Merges the results of several files, by tool and part."""
    combined: dict[str, Any] = {}
    for path in paths:
        for tool, parts in json.loads(path.read_text()).items():
            before = combined.setdefault(tool, {})
            settings = before.get("settings", {}) | parts.get("settings", {})
            before.update(parts, **({"settings": settings} if settings else {}))
    return combined


def run_tool(tool: str, interpreter: str, settings: list[dict[str, Any]], parts: list[str]) -> dict[str, Any]:
    """Returns the results of a tool by part, or the reason why there are none."""
    results: dict[str, Any] = {}
    try:
        with process(tool, interpreter) as run_job:
            if "settings" in parts:
                results["settings"] = {Setting.from_json(row).key: run_job(row) for row in settings}
            if "every" in parts:
                results["every"] = [run_job(job) for job in every_jobs(tool)]
            if "noise" in parts:
                targets = TARGETS if tool in OURS else TARGETS[:PEER_TARGETS]
                results["noise"] = [run_job({"solve": target}) for target in targets]
    except RuntimeError as error:
        results["missing"] = str(error)
    return results


def every_jobs(tool: str) -> list[dict[str, Any]]:
    """Returns jobs that compute epsilon after every step; for other tools than ours, only after the last step."""
    if tool == "dpengine pld":
        return [{"every": {**run, "steps": EVERY_STEPS}, "limit": 3600} for run in EVERY]
    return [
        {"kinds": [[run["rate"], run["sigma"], EVERY_STEPS]], "delta": run["delta"], "relation": "add_remove"}
        for run in EVERY
    ]


@contextlib.contextmanager
def process(tool: str, interpreter: str) -> Iterator[Any]:
    """Starts a process of `accounting_tools`; yields a function that runs a job in it."""
    one_thread = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
    child = subprocess.Popen(
        [interpreter, "-m", "benchmarks.accounting_tools", tool],
        cwd=ROOT,
        env={**os.environ, **one_thread, "PYTHONPATH": str(ROOT)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    assert child.stdin is not None and child.stdout is not None

    def run_job(job: dict[str, Any]) -> dict[str, Any]:
        with contextlib.suppress(BrokenPipeError):  # detected by the missing answer
            child.stdin.write(json.dumps(job) + "\n")
            child.stdin.flush()
        line = child.stdout.readline()
        if not line:
            raise RuntimeError(f"{tool} is not installed for {interpreter}, or crashed")
        return json.loads(line)

    try:
        yield run_job
    finally:
        with contextlib.suppress(BrokenPipeError):
            child.stdin.close()
        child.wait()
        child.stdout.close()


if __name__ == "__main__":
    main()
