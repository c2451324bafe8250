"""The clock: all contenders of a cell make one step each in turn, so that drifts of the machine hit all alike."""

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

FEWEST_STEPS = 5  # of a contender that has used up its budget


@dataclass(frozen=True)
class Protocol:
    """Length of a measurement.

    Attributes:
        steps: Timed steps of each contender.
        warm_up: Steps before.
        budget: Seconds after which a slow contender stops, once it has made ``FEWEST_STEPS`` steps.
        memory: Whose peak memory is taken: ``"all"``, ``"ours"`` or ``"none"``.
        largest: Bytes of gradients of single rows above which a contender that keeps them is left out.
    """

    steps: int = 20
    warm_up: int = 5
    budget: float = 60.0
    memory: str = "all"
    largest: float = 0.4 * os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def measure(name: str, cell: Cell, contenders: Iterable[str], protocol: Protocol, setting: Setting) -> dict[str, Any]:
    """Gates and times a cell's contenders, and takes their memory.

    Returns:
        What goes under the cell's name in the file of results.
    """
    failed: dict[str, str] = {}
    gate: dict[str, dict[str, float | None]] = {}
    sound = []
    for contender in contenders:
        why_not = _too_large(cell, contender, protocol.largest)
        if why_not is None and contender not in BASELINES:
            verdict = judge(CONTENDERS[contender], cell, setting)
            gate[contender] = {"deviation": verdict.deviation, "overshoot": verdict.overshoot}
            why_not = verdict.why_not
        if why_not is None:
            sound.append(contender)
        else:
            failed[contender] = why_not
    timed, broke = time_steps(cell, sound, protocol, setting)
    wanted = {"all": tuple(timed), "ours": ("plain", *[c for c in timed if c.startswith("dpengine")]), "none": ()}
    return {
        "rows": cell.rows,
        "goals": [{"target": g.target, "stretch": g.stretch, "against": g.against} for g in cell.goals],
        "results": timed,
        "gate": gate,
        "failed": {**failed, **broke},
        "labels": {c: why for c in timed if (why := label(c, name)) is not None},
        "memory": {c: peak_memory(name, c, setting) for c in wanted[protocol.memory]},
    }


def time_steps(
    cell: Cell, contenders: Iterable[str], protocol: Protocol, setting: Setting
) -> tuple[dict[str, dict[str, float]], dict[str, str]]:
    """The times of a cell's contenders, ungated, and what went wrong with the others."""
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
            for contender in [c for c, past in seconds.items() if _goes_on(past, protocol)]:
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


def _goes_on(past: list[float], protocol: Protocol) -> bool:
    return len(past) < FEWEST_STEPS or sum(past) < protocol.budget


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


def _too_large(cell: Cell, contender: str, largest: float) -> str | None:
    if not CONTENDERS[contender].keeps_rows:
        return None
    numbers = cell.rows * sum(weight.numel() for weight in trainable(cell.make()).values())
    if 4 * numbers <= largest / 4:  # float32; up to four copies are alive at once in the libraries measured
        return None
    return f"left out: its gradients of single rows take {4 * numbers / 1e9:.1f} GB, several times"


def _short(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".split("\n")[0][:200]
