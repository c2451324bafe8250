"""``dpengine report``: rebuilds the report of a run from its files."""

from __future__ import annotations

import json
from argparse import Namespace
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dpengine.accounting.accountant import ACCOUNTANTS
from dpengine.accounting.batch_events import FixedSizeGaussianEvent, TruncatedGaussianEvent
from dpengine.accounting.events import CyclicGaussianEvent, Relation
from dpengine.accounting.ledger import UNKNOWN_SAMPLING, Ledger
from dpengine.accounting.origin import origins_in, relation_of, unit_of
from dpengine.errors import CorruptFileError, PrivacyError
from dpengine.report.all_runs import excludes_of_all, loss_checked_of_all, noise_of_all
from dpengine.report.facts import DEFAULT_UNIT, AccountingFacts, RunFacts
from dpengine.report.reading import REPORT_FILE
from dpengine.report.report import PrivacyReport

from .commands import CommandError

STATE_FILE = "privacy_state.json"


def run(arguments: Namespace) -> int:
    """Writes the report files, and prints the statement and the paths."""
    path = _file(arguments.path)
    report = _report(path)
    paths = report.save(arguments.out or path.parent)
    if arguments.json:
        print(report.to_json(), end="")
    else:
        print(f"{report}\nwrote {'  '.join(str(path) for path in paths)}")
    return 0


def _file(path: Path) -> Path:
    if not path.is_dir():
        return path
    file = next((path / name for name in (REPORT_FILE, STATE_FILE) if (path / name).exists()), None)
    if file is None:
        raise CommandError(
            f"{path} has neither {REPORT_FILE} nor {STATE_FILE}. Pass the folder to which a run wrote such a file."
        )
    return file


def _report(path: Path) -> PrivacyReport:
    try:
        if path.name != STATE_FILE:
            return PrivacyReport.load(path)
        state = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(state, dict):
            raise ValueError("it is not a JSON object")
        facts = _facts_of_state(state)
    except FileNotFoundError:
        raise CommandError(f"{path} does not exist.") from None
    except CorruptFileError as error:
        raise CommandError(str(error)) from error
    except PrivacyError as error:
        raise CommandError(f"{path}: {error}") from error
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CommandError(f"{path} cannot be read: {error!r}. Restore it from a backup.") from error
    accountant = facts.accounting.accountant
    if accountant not in ACCOUNTANTS:
        raise CommandError(
            f"{path} names the accountant {accountant!r}, which is not part of dpengine, so its numbers cannot be "
            f"computed. Pass the {REPORT_FILE} that the run wrote."
        )
    return PrivacyReport(facts)


_SAMPLINGS: Mapping[type, str] = {
    CyclicGaussianEvent: "cyclic-poisson",
    TruncatedGaussianEvent: "truncated",
    FixedSizeGaussianEvent: "fixed-size",
}
"""Sampling scheme by the type of the charged event; ``"poisson"`` for other types."""


def _facts_of_state(state: Mapping[str, Any]) -> RunFacts:
    """Derives the facts from ``engine.state_dict()``, which has all charges and the names of their sampling schemes."""
    ledger = Ledger()
    ledger.load_state_dict(state["ledger"])
    events = [charge.event for charge in ledger.history if charge.kind != "clip"]
    last = events[-1] if events else None
    plan: dict[str, Any] = {"sampling": _SAMPLINGS.get(type(last), "poisson")}
    if plan["sampling"] == "cyclic-poisson":
        plan["correlated_noise"] = {"bands": getattr(last, "cycle_length", 1)}
    rate = None if last is None else last.inclusion_rate
    if rate is not None:
        plan |= {"sample_rate": rate, "noise_multiplier": getattr(last, "noise_multiplier")}  # noqa: B009
    origins = origins_in(state)
    samplings = sorted({origin.sampling for origin in origins})
    schemes = [name for name in samplings if name != UNKNOWN_SAMPLING]
    # Batches that the training loop draws have the same events as those of dpengine.
    if schemes and plan["sampling"] not in schemes:
        plan["sampling"] = schemes[0]
    relation = relation_of(origins)
    accounting = AccountingFacts(
        history=ledger.history,
        delta=state["delta"],
        relation=relation,
        accountant=state["accountant"],
        unit=unit_of(origins) or DEFAULT_UNIT,
        constants_declared=relation is Relation.ADD_OR_REMOVE_ONE or None,
    )
    return RunFacts(
        plan=plan,
        accounting=accounting,
        noise=noise_of_all(origins),
        loss_checked=loss_checked_of_all(origins),
        other_samplings=tuple(samplings) if events else (),
        excludes=tuple(excludes_of_all(origins)),
    )
