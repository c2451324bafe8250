"""``dpengine ledger``: what ledger files say was spent."""

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
from .main import WRONG_USE
from .screen import columns


def run(arguments: Namespace) -> int:
    """Prints what was asked for."""
    contents = [_contents(path) for path in arguments.paths]
    values, text = _ACTIONS[arguments.action](contents, arguments)
    print(json.dumps(values, ensure_ascii=False, indent=2) if arguments.json else text)
    return 0


def _contents(path: Path) -> Contents:
    if not path.is_file():
        raise CommandError(f"{path} is not there, or is no file.", exit_code=WRONG_USE)
    contents = read(path)  # one that was edited raises
    if contents.last is None:
        raise CommandError(f"{path} has no entries.", exit_code=WRONG_USE)
    return contents


def _show(contents: list[Contents], _: Namespace) -> tuple[Any, str]:
    runs = [_facts_of(name, one) for name, one in contents[0].runs.items()]
    rows = [("run", "began", "noise", "rate", "released", "given up", "reserved", "state")]
    for one in runs:
        counted = (f"{one[name]:,}" for name in ("released", "given_up", "reserved"))
        rows.append(
            (
                one["run"],
                one["date"],
                _short(one["noise_multiplier"]),
                _short(one["sample_rate"]),
                *counted,
                one["state"],
            )
        )
    return {"id": contents[0].id, "runs": runs}, columns(rows)


def _facts_of(name: str, one: RunOfFile) -> dict[str, Any]:
    about, counts = one.facts["about"], Counter[str]()
    for row in one.rows:
        counts.update({"reserved": sum(row.counts.values())} if row.reserved else row.counts)
    return {
        "run": name,
        "date": one.facts["date"] or about.get("name", ""),
        "unit": about.get("unit"),
        "relation": about.get("relation"),
        "noise_multiplier": about.get("noise_multiplier"),
        "sample_rate": about.get("sample_rate"),
        "delta": about.get("delta"),
        "released": counts["release"] + counts["clip"],
        "given_up": counts["void"],
        "reserved": counts["reserved"],
        "state": "detached" if one.closed else "open, or ended with its process",
    }


def _short(value: Any) -> str:
    return "" if value is None else f"{value:.5g}"


def _verify(contents: list[Contents], arguments: Namespace) -> tuple[Any, str]:
    one = contents[0]
    assert one.last is not None
    left_out = arguments.paths[0].stat().st_size - one.size
    dropped = f"A last line of {left_out:,} bytes was not ended, and does not count.\n" if left_out > 0 else ""
    values = {"id": one.id, "entries": one.last.seq + 1, "last": one.last.seal, "steps": steps_of(one.history)}
    text = (
        f"{arguments.paths[0]}: {values['entries']:,} entries, as they were written; {values['steps']:,} steps "
        "charged.\n"
        f"{dropped}Whether entries are missing at the end is seen beside a checkpoint, or this number: {values['last']}"
    )
    return values, text


def _total(contents: list[Contents], arguments: Namespace) -> tuple[Any, str]:
    if len({one.id for one in contents}) < len(contents):
        raise CommandError("The same ledger was given twice, or a copy of it. Give each once.", exit_code=WRONG_USE)
    runs = [run for one in contents for run in one.runs.values()]
    said = [run.facts["about"] for run in runs]
    units = sorted({about["unit"] for about in said if "unit" in about})
    if len(units) > 1:
        raise CommandError(f"Costs of different units do not add up: {', '.join(units)}.", exit_code=WRONG_USE)
    relations = {Relation(about.get("relation", Relation.ZERO_OUT.value)) for about in said}
    relation = relations.pop() if len(relations) == 1 else Relation.ZERO_OUT
    deltas = [about["delta"] for about in said if "delta" in about]
    delta = arguments.delta or (deltas[-1] if deltas else None)
    if delta is None:
        raise CommandError("No run of these files says at which delta. Give --delta.", exit_code=WRONG_USE)
    history: list[Charge] = [charge for one in contents for charge in one.history]
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
        text += f"\n{reserved:,} of them were reserved, and nobody said how many were made: a run goes on, or died."
    return values, text


_ACTIONS = {"show": _show, "verify": _verify, "total": _total}
