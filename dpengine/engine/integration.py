"""Entry points for integrations that build the parts of a run themselves."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dpengine.accounting.ledger import Ledger
from dpengine.distributed.topology import Topology
from dpengine.ledger_file.books import asked_for
from dpengine.ledger_file.run_ledger import RunLedger

if TYPE_CHECKING:
    from .privacy_engine import PrivacyEngine
    from .run import Run


def ledger_of_run(engine: PrivacyEngine, run: str, topology: Topology, *, delta: float) -> Ledger | RunLedger:
    """Opens the ledger of an engine for a run of this name, which is then passed to `add_run`."""
    engine._books.open(topology.everyone, _asked_at(delta), first=not engine.runs)
    return engine._books.of_run(run, topology.everyone)


def add_run(engine: PrivacyEngine, run: Run) -> None:
    """Adds a run that charges a ledger of `ledger_of_run` and has taken no step yet."""
    engine._enter(run, _asked_at(run.budget.delta), (None, 1))


def _asked_at(delta: float) -> dict[str, Any]:
    """The entry of a ledger file about a run with a delta and without a target."""
    return asked_for(None, target_epsilon=None, delta=delta, epochs=None, steps=None)
