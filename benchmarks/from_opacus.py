"""Compares the scripts of ``tutorials/from_opacus`` with Opacus and with dpengine. Only the import line differs.

    python -m benchmarks.from_opacus --repeats 3 --threads 1

Each run is a separate process. Contenders alternate, so that drift of the machine affects all equally. Opacus runs a
copy of each script that imports ``opacus`` instead of ``dpengine.compat.opacus``, in each mode of the script.
The time per step is that of the training loop, with its first batches; the whole run includes data, calibration,
epsilon and tests. Memory is the peak resident memory, with data, minus that after the imports (Linux only). Accuracy is
the mean over seeds, one for each repeat.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import importlib.util
import io
import json
import os
import platform
import re
import statistics
import subprocess
import sys
import tempfile
import time
from importlib import metadata
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
SCRIPTS = ROOT / "tutorials" / "from_opacus"
EXAMPLES = (
    "image_classifier",
    "text_lstm",
    "text_transformer",
    "limited_memory",
    "schedulers",
    "checkpoint_and_resume",
)
MODES = ("hooks", "functorch", "ew", "ghost")
MISSING = (
    "Opacus is not installed, so its lines and all ratios are missing: pip install -r benchmarks/requirements.txt\n"
    "(or pip install --no-deps opacus==1.6.0, to leave torch as it is)."
)
Run = dict[str, Any]


def written_for_opacus(text: str) -> str:
    """Returns a script before its migration, which only replaced this name."""
    return re.sub(r"\bdpengine\.compat\.opacus\b", "opacus", text)


def copy_for_opacus(folder: Path) -> None:
    """Writes a copy of each script for Opacus."""
    for path in SCRIPTS.glob("*.py"):
        (folder / path.name).write_text(written_for_opacus(path.read_text(encoding="utf-8")), encoding="utf-8")


def contenders_for(our_modes: list[str], opacus_modes: list[str], *, installed: bool) -> list[tuple[str, str]]:
    """Returns pairs of library and mode."""
    theirs = [("opacus", mode) for mode in opacus_modes] if installed else []
    return [*[("dpengine", mode) for mode in our_modes], *theirs]


def measure(example: str, pairs: list[tuple[str, str]], args: argparse.Namespace, copies: Path) -> dict[str, Any]:
    """Returns the runs of an example by contender, and the error of each contender that failed."""
    runs: dict[str, list[Run]] = {f"{library} {mode}": [] for library, mode in pairs}
    broke: dict[str, str] = {}
    for seed in range(args.repeats):
        for library, mode in pairs:
            name = f"{library} {mode}"
            if name not in broke:
                folder = SCRIPTS if library == "dpengine" else copies
                argv = [*(["--quick"] if args.quick else []), "--mode", mode, "--seed", str(seed)]
                try:
                    runs[name].append(run(folder, example, argv, args.threads))
                except RuntimeError as error:
                    broke[name] = str(error)
    return {"runs": {name: repeats for name, repeats in runs.items() if name not in broke}, "broke": broke}


def run(folder: Path, example: str, argv: list[str], threads: int) -> Run:
    """Runs a script in a separate process.

    Args:
        folder: Folder of the script.
        example: Name of the script.
        argv: Command-line arguments.
        threads: Number of CPU threads.

    Returns:
        The result of the script, with ``peak_mib`` and the ``library`` that it used.

    Raises:
        RuntimeError: If it failed; the message is the line that names the error.
    """
    job = json.dumps({"folder": str(folder), "example": example, "argv": argv, "threads": threads})
    command = [sys.executable, "-W", "ignore", "-m", "benchmarks.from_opacus", "--job", job]
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": str(threads)}
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT, env=environment)
    if done.returncode != 0:
        errors = re.findall(r"^(?:\w+\.)*\w*(?:Error|Exception|Interrupt)\b.*", done.stderr, re.MULTILINE)
        raise RuntimeError(errors[-1][:200] if errors else f"exit status {done.returncode}")
    return json.loads(done.stdout.splitlines()[-1])


def _job(job: dict[str, Any]) -> Run:
    sys.path.insert(0, job["folder"])
    script = importlib.import_module(job["example"])
    import torch

    from benchmarks.memory import probes

    torch.set_num_threads(job["threads"])
    before, _, later = probes("cpu")
    torch.ones(64, 64).mm(torch.ones(64, 64))  # starts the threads of torch
    peak, resting = later(), before()
    start = time.perf_counter()
    with contextlib.redirect_stdout(io.StringIO()):
        result = script.main(job["argv"])
    whole = time.perf_counter() - start
    return {
        **result,
        "whole": whole,
        "peak_mib": (peak() - resting) / 2**20,
        "library": script.PrivacyEngine.__module__.split(".")[0],
    }


def row(repeats: list[Run]) -> dict[str, float]:
    """Returns statistics of a contender over its repeats."""
    per_step = [1e3 * result["seconds"] / result["steps"] for result in repeats]
    return {
        "steps": repeats[0]["steps"],
        "median_ms": statistics.median(per_step),
        "min_ms": min(per_step),
        "max_ms": max(per_step),
        "whole": statistics.median(result["whole"] for result in repeats),
        "peak_mib": statistics.median(result["peak_mib"] for result in repeats),
        "accuracy": statistics.mean(result["accuracy"] for result in repeats),
        "spread": statistics.stdev(result["accuracy"] for result in repeats) if len(repeats) > 1 else 0.0,
        "epsilon": max(result["epsilon"] for result in repeats),
        "noise_multiplier": repeats[0]["noise_multiplier"],
    }


def table(example: str, measured: dict[str, Any]) -> str:
    """Returns a Markdown row for each contender. The ratio is to the median step of Opacus's fastest mode."""
    rows = {name: row(repeats) for name, repeats in measured["runs"].items()}
    theirs = [found["median_ms"] for name, found in rows.items() if name.startswith("opacus ")]
    lines = [
        "| example | contender | ms a step | min - max | whole run, s | ratio to Opacus's fastest | peak MiB | "
        "accuracy | epsilon | last sigma |",
        "|" + "---|" * 10,
    ]
    for name, found in rows.items():
        ratio = f"{found['median_ms'] / min(theirs):.2f}" if theirs else "-"
        lines.append(
            f"| {example} | {name} | {found['median_ms']:.1f} | {found['min_ms']:.1f} - {found['max_ms']:.1f} | "
            f"{found['whole']:.1f} | {ratio} | {found['peak_mib']:.0f} | {found['accuracy']:.1%} ± "
            f"{found['spread']:.1%} | {found['epsilon']:.4f} | {found['noise_multiplier']:.4f} |"
        )
    notes = [f"{name} does not run: {why}" for name, why in measured["broke"].items()]
    return "\n".join([*lines, *([""] if notes else []), *notes])


def modes_of(example: str) -> tuple[str, ...]:
    """Returns the modes that a script supports, from its text."""
    found = re.search(r"^MODES = \(([^)]*)\)", (SCRIPTS / f"{example}.py").read_text(encoding="utf-8"), re.MULTILINE)
    if found is None:
        raise ValueError(f"tutorials/from_opacus/{example}.py has no line that begins with MODES = (")
    return tuple(re.findall(r'"(\w+)"', found[1]))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--examples", nargs="+", default=list(EXAMPLES), choices=EXAMPLES)
    parser.add_argument("--our-modes", nargs="+", default=["hooks"], choices=MODES, help="default: hooks")
    parser.add_argument("--opacus-modes", nargs="+", default=list(MODES), choices=MODES)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--quick", action="store_true", help="a short run of each script, as a check")
    parser.add_argument("--out", help="a JSON file, written after each example")
    parser.add_argument("--job", help=argparse.SUPPRESS)
    return parser


def main() -> None:
    """Runs the benchmark from the command line."""
    args = _parser().parse_args()
    if args.job:
        print(json.dumps(_job(json.loads(args.job))))
        return
    installed = importlib.util.find_spec("opacus") is not None
    versions = {package: metadata.version(package) for package in ("torch", *(["opacus"] if installed else []))}
    print(f"{versions}, {platform.platform()}, {os.cpu_count()} cores, {args.threads} threads, {args.repeats} repeats")
    if not installed:
        print(MISSING)
    results: dict[str, Any] = {"versions": versions, "threads": args.threads, "examples": {}}
    with tempfile.TemporaryDirectory() as folder:
        copy_for_opacus(Path(folder))
        for example in args.examples:
            known = modes_of(example)
            ours, theirs = ([m for m in modes if m in known] for modes in (args.our_modes, args.opacus_modes))
            pairs = contenders_for(ours, theirs, installed=installed)
            results["examples"][example] = measure(example, pairs, args, Path(folder))
            print("\n" + table(example, results["examples"][example]), flush=True)
            if args.out:
                Path(args.out).write_text(json.dumps(results, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
