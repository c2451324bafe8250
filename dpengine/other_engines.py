"""Which engine trains on which data set of this process: two that do not know of each other each state too little."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from dpengine.accounting import Ledger
from dpengine.errors import notice


@dataclass(frozen=True)
class _Training:
    """An engine and the data set that it trains on. What it charged outlives it: so does what it released."""

    engine: weakref.ref[Any]
    ledger: Ledger
    dataset: Callable[[], Any]  # weak where that can be, so that data are not kept alive

    def is_known_to(self, engine: Any) -> bool:
        """Whether the account of an engine holds what was charged here, so that nothing is left out."""
        if engine is self.engine() or engine.ledger is self.ledger:
            return True
        return self.engine() is None and not Counter(_counts(self.ledger)) - Counter(_counts(engine.ledger))


_on_data_set: dict[int, _Training] = {}  # by id of the data set


def warn_of_other_engine(engine: Any, dataset: Any) -> None:
    """Notices a second engine over one data set, also where the first is gone: neither knows what the other spends."""
    for number in [number for number, training in _on_data_set.items() if training.dataset() is None]:
        del _on_data_set[number]
    before = _on_data_set.get(id(dataset))
    if before is None or before.dataset() is not dataset or before.is_known_to(engine):
        _on_data_set[id(dataset)] = _Training(weakref.ref(engine), engine.ledger, _way_to(dataset))
        return
    notice(
        "DPE012",
        "Another engine trained on the same data set in this process; their costs add up, and neither knows of the "
        "other. Use one engine for both, or load the state of the other (engine.load_state_dict).",
        key="two engines",
    )


def _counts(ledger: Ledger) -> dict[Any, int]:
    return {charge.event: charge.count for charge in ledger.totals}


def _way_to(dataset: Any) -> Callable[[], Any]:
    try:
        return weakref.ref(dataset)
    except TypeError:  # a list, say
        return lambda: dataset
