"""Converts a history to rows of plain values and back, and removes local paths from the text of reports."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import PurePosixPath, PureWindowsPath
from typing import Any

from dpengine.accounting.events import event_from_state, event_to_state
from dpengine.accounting.ledger import Charge
from dpengine.errors import LedgerError

_MAX_LENGTH = 500
_FOLDERS = re.compile(
    r"""(?: file:/*                             # a file URL, or a path that
          | (?<![\w:/\\.~-])                    # is not part of a web URL, a relative path, a DOI or a fraction,
            (?: ~[\w.-]* | [A-Za-z]: )? )       # with an optional home directory or drive
        [/\\]+ (?=[^\s/\\]) (?: [^\s/\\]+ [/\\]+ )*  # folders
        ( [^\s/\\]* )                           # and the last component, which is kept""",
    re.VERBOSE,
)


def public_text(text: str) -> str:
    """Returns the text on one line of at most 500 characters. Absolute paths are reduced to their last component."""
    line = " ".join("".join(c if c.isprintable() else " " for c in text).split())
    for path in (PureWindowsPath(line), PurePosixPath(line)):
        if path.is_absolute() and not path.anchor == str(path):
            line = path.name  # the whole text is a path, possibly with spaces
    line = _FOLDERS.sub(r"\1", line)
    return line if len(line) <= _MAX_LENGTH else line[: _MAX_LENGTH - 1] + "…"


def public_values(value: Any) -> Any:
    """Applies `public_text` to every text in nested mappings and sequences; numbers stay as they are."""
    if isinstance(value, str):
        return public_text(value)
    if isinstance(value, Mapping):
        return {public_text(str(key)): public_values(item) for key, item in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [public_values(item) for item in value]
    if value is None or isinstance(value, (bool, int, float)):
        return value
    return float(value) if hasattr(value, "__float__") else public_text(str(value))


_COLUMNS = ("noise_multiplier", "sample_rate", "cycle_length", "sq_sensitivities", "run", "reason")
_ADDED = {"non-private": {"noise_multiplier": 0.0}, "gaussian": {"sample_rate": 1.0}}
"""Columns in the rows of an event type that are not fields of the event."""


def rows_of(history: Iterable[Charge]) -> list[dict[str, Any]]:
    """Returns a run-length encoding of the history. Discarded batches are encoded as steps of the same cost."""
    rows: list[dict[str, Any]] = []
    numbers: dict[str, int] = {}
    for charge in history:
        state = event_to_state(charge.event)
        event_type = state["type"]
        row = {"law": event_type} | {column: public_values(state.get(column)) for column in _COLUMNS}
        more = {key: value for key, value in state.items() if key not in ("type", *_COLUMNS)}
        row["more"] = public_values(more) if more else None
        row |= _ADDED.get(event_type, {})
        if row["run"] is not None:  # a random name, which is replaced by a number
            row["run"] = numbers.setdefault(state["run"], len(numbers) + 1)
        row |= {"kind": "clip" if charge.kind == "clip" else "step", "steps": charge.count}
        if rows and all(rows[-1][key] == row[key] for key in row if key != "steps"):
            rows[-1]["steps"] += charge.count
        else:
            rows.append(row)
    return rows


def as_reported(history: Iterable[Charge]) -> tuple[Charge, ...]:
    """Returns the history as `rows_of` encodes it: discarded batches are steps, which have the same cost."""
    return charges_of(rows_of(history))


def charges_of(rows: Sequence[Mapping[str, Any]]) -> tuple[Charge, ...]:
    """Restores the charges from the result of `rows_of`, with discarded batches as steps."""
    charges: list[Charge] = []
    for row in rows:
        columns = [name for name in _COLUMNS if row[name] is not None and name not in _ADDED.get(row["law"], ())]
        fields = {name: row[name] for name in columns} | (row["more"] or {})
        if "run" in fields:
            fields["run"] = str(fields["run"])
        event = event_from_state({"type": row["law"], **fields})
        charge = Charge(event, row["steps"], "clip" if row["kind"] == "clip" else "release")
        _check_row(row, charge, len(charges))
        charges.append(charge)
    return tuple(charges)


def _check_row(row: Mapping[str, Any], charge: Charge, index: int) -> None:
    """Rejects a row that differs from the row of its charge, because an ignored column could hide a cost."""
    (expected,) = rows_of([charge])
    for column in expected.keys() - {"run"}:
        if row[column] != expected[column]:
            raise LedgerError(
                f"history[{index}].{column} is {row[column]!r}, but a {row['law']} row must have {expected[column]!r}.",
                fix="Restore it from a backup.",
            )
