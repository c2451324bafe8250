"""Computes the true epsilon for the settings of `accounting_settings`, by methods that share no code with accountants.

``python -m benchmarks.accounting_truths`` rewrites `accounting_truths.json`, which takes about 15 minutes;
``--classes`` rewrites only some classes. Each truth has its method and a bound on its error. A setting for which no
method is accurate to 1e-5 is dropped and counted. `accounting_references` implements the methods.
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

MIN_EPSILON, MAX_EPSILON = 1e-3, 1e3
WORST_ERROR = 1e-5
SECONDS = 20


class DroppedError(Exception):
    """The setting is not used; the message is the reason."""


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
        setting_class = CLASSES[name]
        started, found = time.process_time(), 0
        for setting in candidates(name):
            if found == setting_class.required:
                break
            row = {"class": name, **setting.as_json()}
            try:
                rows.append({**row, **truth_of(setting)})
                found += 1
            except DroppedError as error:
                dropped.append({**row, "why": str(error)})
        print(f"{name}: {found} of {setting_class.required}, {time.process_time() - started:.0f} s", flush=True)
        write(arguments.out, rows, dropped)
    print(collections.Counter(one["why"] for one in dropped))


def truth_of(setting: Setting) -> dict[str, Any]:
    """Returns epsilon, its method, and a bound on its error."""
    try:
        with np.errstate(all="ignore"), at_most(SECONDS):
            truth = references.truth(setting)
    except (ArithmeticError, ValueError) as error:
        raise DroppedError(f"reference fails: {error}") from error
    except TimeoutError:
        raise DroppedError(f"reference takes more than {SECONDS} s") from None
    if not MIN_EPSILON <= truth.epsilon <= MAX_EPSILON:
        raise DroppedError("out of range")
    row = {"epsilon": truth.epsilon, "error": truth.error, "reference": truth.method, "direction": truth.direction}
    if truth.method == "contour":
        row |= refined(setting, truth)
    if not row["error"] <= WORST_ERROR * row["epsilon"]:
        raise DroppedError("error of the reference above 1e-5")
    return row


def refined(setting: Setting, truth: references.Truth) -> dict[str, Any]:
    """Repeats a contour integral in 30 digits. Returns the new epsilon and the old error; {} if it takes too long."""
    try:
        with at_most(SECONDS / 2):
            off = references.relative_error(setting, truth.epsilon, truth.direction)
    except (ArithmeticError, TimeoutError):
        return {}
    epsilon = truth.epsilon * (1 - off)
    return {"epsilon": epsilon, "error": 1e-15 * epsilon, "reference": "contour, 30 digits", "float64_off": off}


def write(path: Path, rows: list[dict[str, Any]], dropped: list[dict[str, Any]]) -> None:
    """Writes one setting per line."""
    for found in (rows, dropped):
        found.sort(key=lambda row: list(CLASSES).index(row["class"]))
    parts = {name: ",\n".join(json.dumps(row) for row in found) for name, found in (("rows", rows), ("out", dropped))}
    path.write_text(f'{{"settings": [\n{parts["rows"]}\n], "dropped": [\n{parts["out"]}\n]}}\n')


@contextlib.contextmanager
def at_most(seconds: float) -> Iterator[None]:
    """Raises ``TimeoutError`` after ``seconds`` of processor time."""

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
