"""``dpengine ledger``: charges in ledger files, and their total privacy cost."""

from __future__ import annotations

import json
from argparse import Namespace
from collections import Counter
from pathlib import Path
from typing import Any

from dpengine.accounting.accountant import epsilon_of
from dpengine.accounting.events import Relation
from dpengine.accounting.ledger import Charge, steps_of
from dpengine.accounting.rounding import round_up, round_up_delta
from dpengine.ledger_file.contents import Contents, RunOfFile, read

from .commands import CommandError
from .screen import columns


def run(arguments: Namespace) -> int:
    """Prints the result of an action."""
    contents = [_contents(path) for path in arguments.paths]
    values, text = _ACTIONS[arguments.action](contents, arguments)
    print(json.dumps(values, ensure_ascii=False, indent=2) if arguments.json else text)
    return 0


def _contents(path: Path) -> Contents:
    if not path.is_file():
        raise CommandError(f"{path} does not exist, or is not a file.")
    contents = read(path)  # raises if the file was edited
    if contents.last is None:
        raise CommandError(f"{path} has no entries.")
    return contents


def _show(contents: list[Contents], _: Namespace) -> tuple[Any, str]:
    runs = [_facts_of(name, run) for name, run in contents[0].runs.items()]
    rows = [list(_COLUMNS.values()), *([_cell(run[name]) for name in _COLUMNS] for run in runs)]
    return {"id": contents[0].id, "runs": runs}, columns(rows)


_COLUMNS = {
    "run": "run",
    "date": "began",
    "noise_multiplier": "noise",
    "sample_rate": "rate",
    "released": "released",
    "given_up": "discarded",
    "reserved": "reserved",
    "state": "state",
}
"""Title of a column by the name of its value."""


def _cell(value: Any) -> str:
    return f"{value:,}" if isinstance(value, int) else f"{value:.5g}" if isinstance(value, float) else value or ""


def _facts_of(name: str, run: RunOfFile) -> dict[str, Any]:
    about, counts = run.facts["about"], Counter[str]()
    for row in run.rows:
        counts.update({"reserved": sum(row.counts.values())} if row.reserved else row.counts)
    settings = ("unit", "relation", "noise_multiplier", "sample_rate", "delta")
    return {
        "run": name,
        "date": run.facts["date"] or about.get("name", ""),
        **{key: about.get(key) for key in settings},
        "released": counts["release"] + counts["clip"],
        "given_up": counts["void"],
        "reserved": counts["reserved"],
        "state": "detached" if run.closed else "open, or ended with its process",
    }


def _verify(contents: list[Contents], arguments: Namespace) -> tuple[Any, str]:
    (ledger,) = contents
    assert ledger.last is not None
    ignored = arguments.paths[0].stat().st_size - ledger.size
    incomplete = f"An incomplete last line of {ignored:,} bytes is ignored.\n" if ignored > 0 else ""
    last, steps = ledger.last, steps_of(ledger.history)
    values = {"id": ledger.id, "entries": last.seq + 1, "last": last.seal, "steps": steps}
    text = (
        f"{arguments.paths[0]}: {values['entries']:,} entries, unchanged; {values['steps']:,} steps charged.\n"
        f"{incomplete}To detect missing entries at the end, compare a checkpoint or this number: {values['last']}"
    )
    return values, text


def _total(contents: list[Contents], arguments: Namespace) -> tuple[Any, str]:
    if len({ledger.id for ledger in contents}) < len(contents):
        raise CommandError("A ledger, or a copy of it, was given twice. Pass each ledger once.")
    runs = [run for ledger in contents for run in ledger.runs.values()]
    abouts = [run.facts["about"] for run in runs]
    units = sorted({about["unit"] for about in abouts if "unit" in about})
    if len(units) > 1:
        raise CommandError(f"Costs of different units do not add up: {', '.join(units)}.")
    relations = {Relation(about.get("relation", Relation.ZERO_OUT.value)) for about in abouts}
    relation = relations.pop() if len(relations) == 1 else Relation.ZERO_OUT
    deltas = [about["delta"] for about in abouts if "delta" in about]
    delta = arguments.delta or (deltas[-1] if deltas else None)
    if delta is None:
        raise CommandError("No run in these files states a delta. Pass --delta.")
    history: list[Charge] = [charge for ledger in contents for charge in ledger.history]
    epsilon, reserved = epsilon_of(history, delta, arguments.accountant, relation), sum(run.reserved for run in runs)
    values = {
        "epsilon": epsilon,
        "delta": delta,
        "relation": relation.value,
        "unit": units[0] if units else None,
        "accountant": arguments.accountant,
        "steps": steps_of(history),
        "reserved": reserved,
    }
    text = (
        f"ε = {round_up(epsilon)} at δ = {round_up_delta(delta)}, {relation.value}, for each "
        f"{values['unit'] or 'unit'}: {values['steps']:,} steps charged in {len(runs):,} runs."
    )
    if reserved:
        text += (
            f"\n{reserved:,} of these steps were reserved, but may not have been executed: their run is active or was "
            "interrupted."
        )
    return values, text


_ACTIONS = {"show": _show, "verify": _verify, "total": _total}
