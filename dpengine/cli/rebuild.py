"""``dpengine report``: the report of a run, written again from what the run left behind."""

from __future__ import annotations

import json
from argparse import Namespace
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dpengine.accounting import CyclicGaussianEvent, GaussianEvent, Ledger, PoissonGaussianEvent, Relation
from dpengine.errors import PrivacyError
from dpengine.report import PrivacyReport, RunFacts

from .commands import CommandError

STATE_FILE = "privacy_state.json"


def run(arguments: Namespace) -> int:
    """Writes the report files, and prints the statement and where the files are."""
    report = PrivacyReport(_facts(arguments.folder / STATE_FILE))
    paths = report.save(arguments.out or arguments.folder)
    if arguments.json:
        print(report.to_json())
    else:
        print(f"{report}\nwrote {'  '.join(str(path) for path in paths)}")
    return 0


def _facts(path: Path) -> RunFacts:
    try:
        state = json.loads(path.read_text(encoding="utf-8"))
        return RunFacts.from_state(state["facts"]) if "facts" in state else _facts_of_engine(state)
    except FileNotFoundError:
        raise CommandError(f"{path} is not there. Pass the folder that a run wrote {STATE_FILE} to.") from None
    except PrivacyError as error:
        raise CommandError(f"{path}: {error}") from error
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CommandError(f"{path} cannot be read: {error!r}. Restore it from a backup.") from error


def _facts_of_engine(state: Mapping[str, Any]) -> RunFacts:
    """What follows from ``engine.state_dict()`` alone: the charges are all there, what was around them is not."""
    ledger = Ledger()
    ledger.load_state_dict(state["ledger"])
    events = [charge.event for charge in ledger.history if charge.kind != "clip"]
    last = events[-1] if events else None
    plan: dict[str, Any] = {"sampling": "poisson"}
    if isinstance(last, CyclicGaussianEvent):
        plan |= {"sampling": "cyclic-poisson", "correlated_noise": {"bands": last.cycle_length}}
    if isinstance(last, (PoissonGaussianEvent, CyclicGaussianEvent, GaussianEvent)):
        rate = 1.0 if isinstance(last, GaussianEvent) else last.sample_rate
        plan |= {"sample_rate": rate, "noise_multiplier": last.noise_multiplier}
    # Zero-out is what a run states unless it was given its constants, and that is not in the state.
    return RunFacts(plan, ledger.history, state["delta"], Relation.ZERO_OUT, accountant=state["accountant"])
