"""True epsilon at the settings of `accounting_settings`, by methods that share nothing with the accountants.

``python -m benchmarks.accounting_truths`` writes `accounting_truths.json` again, which takes some 15 minutes;
``--classes`` writes some of it again. Each truth comes with the way that it was found and a bound on its own error; a
setting for which no way answers to 1e-5 is dropped and counted. `accounting_references` holds the ways.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import json
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from . import accounting_references as references
from .accounting_settings import CLASSES, PATH, Setting, candidates

LEAST, MOST = 1e-3, 1e3
WORST_ERROR = 1e-5
SECONDS = 20


class DroppedError(Exception):
    """The reason for which a setting is not used."""


def main() -> None:
    """Writes the file of truths."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, default=PATH)
    parser.add_argument("--classes", nargs="*", default=list(CLASSES), choices=list(CLASSES))
    arguments = parser.parse_args()
    rows, dropped = [], []
    if set(arguments.classes) < set(CLASSES):
        before = json.loads(arguments.out.read_text())
        rows, dropped = (
            [row for row in before[part] if row["class"] not in arguments.classes] for part in ("settings", "dropped")
        )
    for name in arguments.classes:
        kind = CLASSES[name]
        started, found = time.process_time(), 0
        for setting in candidates(name):
            if found == kind.wanted:
                break
            row = {"class": name, **setting.as_json()}
            try:
                rows.append({**row, **truth_of(setting)})
                found += 1
            except DroppedError as error:
                dropped.append({**row, "why": str(error)})
        print(f"{name}: {found} of {kind.wanted}, {time.process_time() - started:.0f} s", flush=True)
        write(arguments.out, rows, dropped)
    print(collections.Counter(one["why"] for one in dropped))


def truth_of(setting: Setting) -> dict[str, Any]:
    """Epsilon, the way it was found, and its error."""
    try:
        with np.errstate(all="ignore"), at_most(SECONDS):
            truth = references.truth(setting)
    except (ArithmeticError, ValueError) as error:
        raise DroppedError(f"reference fails: {error}") from error
    except TimeoutError:
        raise DroppedError(f"reference takes more than {SECONDS} s") from None
    if not LEAST <= truth.epsilon <= MOST:
        raise DroppedError("out of range")
    row = {"epsilon": truth.epsilon, "error": truth.error, "reference": truth.way, "direction": truth.direction}
    if truth.way == "contour":
        row |= polished(setting, truth)
    if not row["error"] <= WORST_ERROR * row["epsilon"]:
        raise DroppedError("error of the reference above 1e-5")
    return row


def polished(setting: Setting, truth: references.Truth) -> dict[str, Any]:
    """A contour integral again in 30 digits, and how far off the first one was; nothing if that takes long."""
    try:
        with at_most(SECONDS / 2):
            off = references.off_by(setting, truth.epsilon, truth.direction)
    except (ArithmeticError, TimeoutError):
        return {}
    epsilon = truth.epsilon * (1 - off)
    return {"epsilon": epsilon, "error": 1e-15 * epsilon, "reference": "contour, 30 digits", "float64_off": off}


def write(path: Path, rows: list[dict[str, Any]], dropped: list[dict[str, Any]]) -> None:
    """One setting a line."""
    for found in (rows, dropped):
        found.sort(key=lambda row: list(CLASSES).index(row["class"]))
    parts = {name: ",\n".join(json.dumps(row) for row in found) for name, found in (("rows", rows), ("out", dropped))}
    path.write_text(f'{{"settings": [\n{parts["rows"]}\n], "dropped": [\n{parts["out"]}\n]}}\n')


@contextlib.contextmanager
def at_most(seconds: float) -> Iterator[None]:
    """Raises ``TimeoutError`` after so many seconds of processor time."""

    def stop(*_: object) -> None:
        raise TimeoutError

    before = signal.signal(signal.SIGVTALRM, stop)
    signal.setitimer(signal.ITIMER_VIRTUAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)


if __name__ == "__main__":
    main()
