"""Scripts written for Opacus, as they are in ``tutorials/from_opacus``: with Opacus, and with the import line changed.

    python -m benchmarks.from_opacus --repeats 3 --threads 1

Each run is a process of its own; runs of all contenders alternate, so that drifts of the machine hit all alike. Opacus
runs a copy of each script whose ``dpengine.compat.opacus`` reads ``opacus``, in each mode that the script knows. Time
is that of the training loop over its steps, first batches included; the whole run has data, calibration, epsilon and
tests as well. Memory is the peak of what is resident above what the imports took, data
included; Linux only. Accuracy is the mean over seeds, one for each repeat.
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
    """The script before it was migrated: the one rule of the migration, backwards."""
    return re.sub(r"\bdpengine\.compat\.opacus\b", "opacus", text)


def copy_for_opacus(folder: Path) -> None:
    """All scripts, as they were written for Opacus."""
    for path in SCRIPTS.glob("*.py"):
        (folder / path.name).write_text(written_for_opacus(path.read_text(encoding="utf-8")), encoding="utf-8")


def contenders_for(our_modes: list[str], opacus_modes: list[str], *, installed: bool) -> list[tuple[str, str]]:
    """Pairs of library and mode."""
    theirs = [("opacus", mode) for mode in opacus_modes] if installed else []
    return [*[("dpengine", mode) for mode in our_modes], *theirs]


def measure(example: str, pairs: list[tuple[str, str]], args: argparse.Namespace, copies: Path) -> dict[str, Any]:
    """All runs of an example by contender, and why a contender has none."""
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
    return {"runs": {name: past for name, past in runs.items() if name not in broke}, "broke": broke}


def run(folder: Path, example: str, argv: list[str], threads: int) -> Run:
    """Runs a script in a process of its own.

    Args:
        folder: Where the script lies.
        example: Its name.
        argv: What it is told.
        threads: Of the CPU.

    Returns:
        What the script returned, with ``peak_mib`` and the ``library`` that it used.

    Raises:
        RuntimeError: If it failed; the message is the line that names the error.
    """
    job = json.dumps({"folder": str(folder), "example": example, "argv": argv, "threads": threads})
    command = [sys.executable, "-W", "ignore", "-m", "benchmarks.from_opacus", "--job", job]
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": str(threads)}
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT, env=environment)
    if done.returncode != 0:
        said = re.findall(r"^(?:\w+\.)*\w*(?:Error|Exception|Interrupt)\b.*", done.stderr, re.MULTILINE)
        raise RuntimeError(said[-1][:200] if said else f"exit status {done.returncode}")
    return json.loads(done.stdout.splitlines()[-1])


def _job(job: dict[str, Any]) -> Run:
    sys.path.insert(0, job["folder"])
    script = importlib.import_module(job["example"])
    import torch

    from benchmarks.memory import probes

    torch.set_num_threads(job["threads"])
    before, _, later = probes("cpu")
    torch.ones(64, 64).mm(torch.ones(64, 64))  # starts what torch starts
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


def row(past: list[Run]) -> dict[str, float]:
    """The figures of a contender over its repeats."""
    per_step = [1e3 * one["seconds"] / one["steps"] for one in past]
    return {
        "steps": past[0]["steps"],
        "median_ms": statistics.median(per_step),
        "min_ms": min(per_step),
        "max_ms": max(per_step),
        "whole": statistics.median(one["whole"] for one in past),
        "peak_mib": statistics.median(one["peak_mib"] for one in past),
        "accuracy": statistics.mean(one["accuracy"] for one in past),
        "spread": statistics.stdev(one["accuracy"] for one in past) if len(past) > 1 else 0.0,
        "epsilon": max(one["epsilon"] for one in past),
        "noise_multiplier": past[0]["noise_multiplier"],
    }


def table(example: str, measured: dict[str, Any]) -> str:
    """A line for each contender. The ratio is of its median step to that of Opacus's fastest mode."""
    rows = {name: row(past) for name, past in measured["runs"].items()}
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
    """The modes that a script knows, read from its text."""
    found = re.search(r"^MODES = \(([^)]*)\)", (SCRIPTS / f"{example}.py").read_text(encoding="utf-8"), re.MULTILINE)
    if found is None:
        raise ValueError(f"tutorials/from_opacus/{example}.py has no line that begins with MODES = (")
    return tuple(re.findall(r'"(\w+)"', found[1]))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--examples", nargs="+", default=list(EXAMPLES), choices=EXAMPLES)
    parser.add_argument("--our-modes", nargs="+", default=["hooks"], choices=MODES, help="the scripts say hooks")
    parser.add_argument("--opacus-modes", nargs="+", default=list(MODES), choices=MODES)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--quick", action="store_true", help="the short form of each script, to see that all works")
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
