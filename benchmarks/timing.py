"""Times the contenders of a cell. Their steps alternate, so that drift of the machine affects all equally."""

from __future__ import annotations

import os
import statistics
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from benchmarks.cells import Cell
from benchmarks.contenders import BASELINES, CONTENDERS, label, start
from benchmarks.gate import judge
from benchmarks.memory import peak_memory
from benchmarks.runner import Runner, Setting, timed, trainable

MIN_STEPS = 5  # of a contender that has used up its budget


@dataclass(frozen=True)
class Protocol:
    """Length of a measurement.

    Attributes:
        steps: Number of timed steps of each contender.
        warm_up: Number of steps before the timed ones.
        budget: Seconds after which a slow contender stops, once it has made ``MIN_STEPS`` steps.
        memory: Contenders whose peak memory is measured: ``"all"``, ``"ours"`` or ``"none"``.
        max_bytes: Limit for the bytes of stored per-sample gradients; a contender that exceeds it is not timed.
    """

    steps: int = 20
    warm_up: int = 5
    budget: float = 60.0
    memory: str = "all"
    max_bytes: float = 0.4 * os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def measure(name: str, cell: Cell, contenders: Iterable[str], protocol: Protocol, setting: Setting) -> dict[str, Any]:
    """Checks and times the contenders of a cell, and measures their memory.

    Returns:
        The entry of the cell in the file of results.
    """
    failed: dict[str, str] = {}
    gate: dict[str, dict[str, float | None]] = {}
    sound = []
    for contender in contenders:
        why_not = _too_large(cell, contender, protocol.max_bytes)
        if why_not is None and contender not in BASELINES:
            verdict = judge(CONTENDERS[contender], cell, setting)
            gate[contender] = {"deviation": verdict.deviation, "overshoot": verdict.overshoot}
            why_not = verdict.why_not
        if why_not is None:
            sound.append(contender)
        else:
            failed[contender] = why_not
    timed, broke = time_steps(cell, sound, protocol, setting)
    measured = {"all": tuple(timed), "ours": ("plain", *[c for c in timed if c.startswith("dpengine")]), "none": ()}
    return {
        "rows": cell.batch_size,
        "goals": [{"target": g.target, "stretch": g.stretch, "against": g.against} for g in cell.goals],
        "results": timed,
        "gate": gate,
        "failed": {**failed, **broke},
        "labels": {c: why for c in timed if (why := label(c, name)) is not None},
        "memory": {c: peak_memory(name, c, setting) for c in measured[protocol.memory]},
    }


def time_steps(
    cell: Cell, contenders: Iterable[str], protocol: Protocol, setting: Setting
) -> tuple[dict[str, dict[str, float]], dict[str, str]]:
    """Returns the times of contenders without checking them, and the errors of those that failed."""
    runners: dict[str, Runner] = {}
    broke: dict[str, str] = {}
    seconds: dict[str, list[float]] = {}
    try:
        for contender in contenders:
            try:
                runners[contender] = start(cell, contender, setting)
                warming = 0.0
                for _ in range(protocol.warm_up):
                    if warming <= protocol.budget / 4:
                        warming += timed(runners[contender].step, setting.device)
                seconds[contender] = []
            except Exception as error:
                broke[contender] = _short(error)
        for _ in range(protocol.steps):
            for contender in [c for c, past in seconds.items() if _continues(past, protocol)]:
                try:
                    seconds[contender].append(timed(runners[contender].step, setting.device))
                except Exception as error:
                    broke[contender] = _short(error)
                    del seconds[contender]
    finally:
        for runner in runners.values():
            runner.close()
    medians = {contender: statistics.median(past) for contender, past in seconds.items()}
    return {contender: _row(contender, past, medians) for contender, past in seconds.items()}, broke


def _continues(past: list[float], protocol: Protocol) -> bool:
    return len(past) < MIN_STEPS or sum(past) < protocol.budget


def _row(contender: str, seconds: list[float], medians: dict[str, float]) -> dict[str, float]:
    quarter = statistics.quantiles(seconds, n=4) if len(seconds) > 1 else [0.0, 0.0, 0.0]
    row = {
        "median_ms": 1e3 * medians[contender],
        "min_ms": 1e3 * min(seconds),
        "iqr_ms": 1e3 * (quarter[2] - quarter[0]),
        "steps": len(seconds),
        "ratio": medians[contender] / medians["plain"],
    }
    own = CONTENDERS[contender].baseline
    return row if own == "plain" or own not in medians else {**row, "own_ratio": medians[contender] / medians[own]}


def _too_large(cell: Cell, contender: str, max_bytes: float) -> str | None:
    if not CONTENDERS[contender].stores_gradients:
        return None
    numbers = cell.batch_size * sum(weight.numel() for weight in trainable(cell.make()).values())
    if 4 * numbers <= max_bytes / 4:  # float32; the measured libraries have up to four copies at once
        return None
    return f"not timed: its per-sample gradients take {4 * numbers / 1e9:.1f} GB, several times"


def _short(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".split("\n")[0][:200]
