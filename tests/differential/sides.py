"""Runs both sides: forks a process for each package and share of the cases, and compares what they recorded."""

from __future__ import annotations

import contextlib
import importlib
import io
import itertools
import json
import math
import multiprocessing
import os
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

BASELINE = os.environ.get("DPENGINE_BASELINE", "4629c32")
TESTS = Path(__file__).resolve().parents[1]
CURRENT = TESTS.parent


ROUNDING = 1e-6  # relative, of sums
SMALLEST = 1e-7  # absolute, of sums that cancel to nearly zero


@dataclass(frozen=True)
class Intended:
    """A difference that an issue makes on purpose.

    Attributes:
        reason: The issue and why.
        field: Of the records: ``"error"``, ``"warnings"``, ``"ledger"`` and so on; ``"*"`` for any of them.
        accepts: Tells by both values whether a difference is this one.
        where: Tells by the current record, with ``calls`` and ``answers`` up to it, whether a difference may be this.
        ends: Whether later calls of the case differ in consequence, and are not compared.
    """

    reason: str
    field: str
    accepts: Callable[[Any, Any], bool] = lambda before, after: True
    where: Callable[[dict[str, Any]], bool] = lambda record: True
    ends: bool = True


INTENDED: list[Intended] = [
    Intended(
        "GradSampleModule removes the raw gradient from p.grad when it raises MissingGradientError.",
        "gradients",
        where=lambda record: (record.get("error") or [None])[0] == "MissingGradientError",
    ),
    Intended(
        "PerSampleGradientClipper raises if parameters change while it holds sums, which it lost silently.",
        "*",
        where=lambda record: record.get("error") == ["UnknownParameterError", "DPE016"] and record["call"] == ["clip"],
    ),
    Intended(
        "PerSampleGradientClipper drops an interrupted backward pass, which it clipped.",
        "error",
        where=lambda record: record.get("error") == ["TicketError", "DPE022"] and record["call"] == ["clip"],
    ),
    Intended(
        "The same: a dropped pass is not probed, and leaves p.grad as it is.",
        "gradients",
        where=lambda record: record.get("error") == ["TicketError", "DPE022"] and record["call"] == ["clip"],
    ),
    Intended(
        "The same: an interrupted pass leaves no forward pass for the probe of the next one.",
        "warnings",
        accepts=lambda before, after: before == ["DPE012"] and after is None,
    ),
    Intended(
        "In ghost mode, a backward pass after the step of its batch that reaches a tied parameter is rejected in the "
        "layer, before the batch is checked.",
        "error",
        accepts=lambda before, after: (
            (before, after) == (["TicketError", "DPE022"], ["UnsupportedLayerError", "DPE001"])
        ),
        where=lambda record: record["call"] == ["backward"],
    ),
    Intended(
        "After a charge that failed while the loader returned a batch, a batch in the sums stays complete. "
        "The step of the batch that was not returned counts as skipped, or is drawn again after a resume.",
        "*",
        where=lambda record: ["fault_in_charge", "next"] in record["calls"],
    ),
    Intended(
        "After a charge that failed in zero_grad, a batch that was returned without a backward pass stays the current "
        "one, and is charged when it is discarded.",
        "ledger",
        accepts=lambda before, after: bool(after) and (before is None or _steps(after, before)),
        where=lambda record: ["fault_in_charge", "zero_grad"] in record["calls"],
    ),
    Intended(
        "The same: the step of such a batch is taken if it is empty.",
        "*",
        where=lambda record: ["fault_in_charge", "zero_grad"] in record["calls"] and record["call"] == ["step"],
    ),
    Intended(
        "Shuffled runs charge skipped steps, and keep charges apart whose bounds without amplification differ.",
        "ledger",
        accepts=lambda before, after: bool(after) and (before is None or _steps(after, before)),
        where=lambda record: "shuffle" in record["answers"],
        ends=False,
    ),
]


def _steps(after: list[dict[str, Any]], before: list[dict[str, Any]]) -> bool:
    """Tells if a ledger holds at least the steps of another one."""
    return sum(charge["count"] for charge in after) >= sum(charge["count"] for charge in before)


MISTAKEN = [[kind, None] for kind in ("AttributeError", "NameError", "ImportError", "IndexError", "KeyError")]

Place = tuple[str, int]  # the kind and the seed of a case


class NoBaseline(Exception):
    """The commit that the current package is compared with cannot be had."""


def baseline_folder() -> Path:
    """Returns a folder that holds the package at the baseline commit; it is exported once."""
    commit = _git("rev-parse", "--verify", f"{BASELINE}^{{commit}}").decode().strip()
    folder = CURRENT / "build" / "differential" / commit
    if not folder.exists():
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder.parent) as part:
            with tarfile.open(fileobj=io.BytesIO(_git("archive", "--prefix=whole/", commit, "dpengine"))) as archive:
                archive.extractall(part)
            with contextlib.suppress(OSError):  # another process was faster
                os.rename(Path(part) / "whole", folder)
    return folder


def _git(*args: str) -> bytes:
    try:
        return subprocess.run(["git", "-C", str(CURRENT), *args], check=True, capture_output=True).stdout
    except (OSError, subprocess.CalledProcessError) as error:
        reason = getattr(error, "stderr", b"").decode(errors="replace").strip() or str(error)
        raise NoBaseline(f"The baseline commit {BASELINE} is not in the history here: {reason}") from error


@contextlib.contextmanager
def both_sides() -> Iterator[tuple[Path, Path]]:
    """Yields folders with the baseline and the current package, with the same compiled kernels or with none."""
    baseline = baseline_folder()
    built = list((CURRENT / "dpengine" / "kernels").glob("native*.so"))
    with tempfile.TemporaryDirectory() as folder:
        sides = []
        for name, root in (("baseline", baseline), ("current", CURRENT)):
            side = Path(folder) / name
            side.mkdir()
            copy_package(root, side, built if _kernels(baseline) == _kernels(CURRENT) else [])
            sides.append(side)
        yield sides[0], sides[1]


def copy_package(root: Path, into: Path, built: Sequence[Path]) -> None:
    """Copies the sources of a package, and links the compiled kernels."""
    for path in (root / "dpengine").rglob("*"):
        if path.is_file() and path.suffix not in {".so", ".pyc"}:
            target = into / path.relative_to(root)
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(path.read_bytes())
    for path in built:
        (into / "dpengine" / "kernels" / path.name).symlink_to(path)


def _kernels(root: Path) -> dict[str, bytes]:
    paths = (root / "dpengine" / "kernels").glob("*.[ch]")
    return {path.name: path.read_bytes() for path in paths}


def differences(roots: Sequence[Path], cases: Sequence[Place], processes: int = 2) -> list[list[str]]:
    """Plays cases on several packages, and compares each package but the first with the first.

    Args:
        roots: Folders that hold a package ``dpengine``. One process, which has imported torch alone, forks for each.
        cases: What is played.
        processes: How many run at a time.

    Returns:
        For each further package one text per case that differs: the calls, and both values of the first difference.
    """
    with tempfile.TemporaryDirectory() as folder:
        job = {"roots": [str(root) for root in roots], "cases": list(cases), "processes": processes, "folder": folder}
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(TESTS)}
        command = [sys.executable, "-m", "differential.sides"]
        done = subprocess.run(command, input=json.dumps(job).encode(), env=environment, cwd=folder, capture_output=True)
        if done.returncode:
            raise RuntimeError(f"The sides did not run:\n{done.stderr.decode()[-4000:]}")
        found: list[list[str]] = [[] for _ in roots[1:]]
        sides = [_read(Path(folder), side, len(cases), _shares(cases, processes)) for side in range(len(roots))]
        calls, mistaken = 0, 0
        for place, first, *others in zip(cases, *sides, strict=True):
            for texts, other in zip(found, others, strict=True):
                texts += _difference(place, first, other)
            calls += len(first)
            mistaken += sum(record.get("error") in MISTAKEN for record in first)
        if mistaken > 5 + calls / 100:
            raise RuntimeError(f"{mistaken} of {calls} calls failed by a mistake of the test's own code.")
        return found


def _shares(cases: Sequence[Place], processes: int) -> int:
    return max(1, min(processes, len(cases) // 50))


def _read(folder: Path, side: int, count: int, shares: int) -> Iterator[list[dict]]:
    files = [(folder / f"{side}-{share}").open() for share in range(shares)]
    for number in range(count):
        yield json.loads(files[number % shares].readline())


def _serve(job: dict[str, Any]) -> None:
    """Forks the processes: after torch, which takes seconds to import, and before dpengine."""
    for name in ("torch.distributed", "torch._dynamo", "scipy.stats"):  # the package imports them later
        importlib.import_module(name)
    folder, shares = Path(job["folder"]), _shares(job["cases"], job["processes"])
    waiting = list(itertools.product(range(len(job["roots"])), range(shares)))
    context = multiprocessing.get_context("fork")
    running: list[Any] = []
    failed = False
    while waiting or running:
        while waiting and len(running) < job["processes"]:
            side, share = waiting.pop(0)
            arguments = (job["roots"][side], job["cases"][share::shares], folder / f"{side}-{share}")
            running.append(context.Process(target=_play, args=arguments))
            running[-1].start()
        running[0].join()
        failed |= running.pop(0).exitcode != 0
    sys.exit(int(failed))


def _play(root: str, cases: list[Place], answers: Path) -> None:
    import torch

    torch.set_num_threads(1)
    sys.path.insert(0, root)
    from differential.adapter import Recorder

    import dpengine

    assert Path(dpengine.__file__).is_relative_to(root), f"{dpengine.__file__} is not in {root}"
    recorder = Recorder()
    from differential.player import played

    seeds = [seed for kind, seed in cases if kind == "spread"]
    spread = _played_by_ranks(seeds, recorder) if seeds else {}  # before this process has any thread
    with answers.open("w") as file:
        for kind, seed in cases:
            records = spread[str(seed)] if kind == "spread" else played(kind, seed, recorder)
            file.write(json.dumps(records) + "\n")


def _played_by_ranks(seeds: list[int], recorder: Any) -> dict[str, list[dict]]:
    context = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory() as folder:
        ranks = [context.Process(target=_rank, args=(rank, seeds, recorder, Path(folder))) for rank in range(2)]
        for rank in ranks:
            rank.start()
        for rank in ranks:
            rank.join()
        first, second = (json.loads((Path(folder) / f"rank {rank}").read_text()) for rank in range(2))
        return {seed: first[seed] + second[seed] for seed in first}


def _rank(rank: int, seeds: list[int], recorder: Any, folder: Path) -> None:
    import datetime

    import torch.distributed as dist
    from differential.player import played

    store, timeout = dist.FileStore(str(folder / "store"), 2), datetime.timedelta(seconds=60)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=timeout)
    found = {}
    for seed in seeds:
        (folder / f"case {seed}").mkdir(exist_ok=True)
        found[seed] = played("spread", seed, recorder, folder / f"case {seed}")
        dist.barrier()
    (folder / f"rank {rank}").write_text(json.dumps(found))
    dist.destroy_process_group()


def _same(before: Any, after: Any) -> bool:
    """Returns True if two values are equal: numbers in a list up to the rounding of sums in another order."""
    if not (isinstance(before, list) and isinstance(after, list) and len(before) == len(after)):
        return before == after
    if not all(isinstance(value, float | None) for value in before + after):
        return before == after
    largest = max((abs(value) for value in before if value is not None and math.isfinite(value)), default=0.0)
    far = max(SMALLEST, ROUNDING * largest)
    return all(
        one == other
        or (one is not None and other is not None and (abs(one - other) <= far or (one != one and other != other)))
        for one, other in zip(before, after, strict=True)
    )


def _difference(place: Place, old: list[dict], new: list[dict]) -> list[str]:
    """Returns a text on the first call whose records differ, or nothing."""
    for number, (then, now) in enumerate(itertools.zip_longest(old, new, fillvalue={})):
        fields = [name for name in {**then, **now} if not _same(then.get(name), now.get(name))]
        record = now | {name + "s": [one.get(name) for one in new[: number + 1]] for name in ("call", "answer")}
        meant = {
            name: one
            for name in fields
            for one in INTENDED
            if one.field in {name, "*"} and one.where(record) and one.accepts(then.get(name), now.get(name))
        }
        if fields and len(meant) == len(fields):
            if any(one.ends for one in meant.values()):
                return []
        elif fields:
            calls = " ".join("-".join(map(str, record.get("call", ["?"]))) for record in old[: number + 1])
            values = "".join(f"\n  {f}:\n    baseline {then.get(f)}\n    current  {now.get(f)}" for f in fields)
            name = ":".join(map(str, place))
            again = f"python tests/differential/compare.py {name}"
            return [f"{name} differs at call {number + 1} of {len(old)} (alone: {again})\n  {calls}{values}"]
    return []


def compare(cases: Sequence[Place], processes: int = 2) -> list[str]:
    """Plays cases on the baseline and on the current package, and returns the differences."""
    with both_sides() as roots:
        return differences(roots, cases, processes)[0]


if __name__ == "__main__":
    _serve(json.load(sys.stdin))
