"""Warns if two engines train on one data set, and one engine does not account for the privacy cost of the other."""

from __future__ import annotations

import itertools
import weakref
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from dpengine.accounting.events import Event
from dpengine.accounting.ledger import Charge, Ledger
from dpengine.errors import notice
from dpengine.ledger_file.run_ledger import RunLedger
from dpengine.sampling.check import examples_of, overlap


@dataclass
class _ChargesByDataset:
    """Charges of a ledger by data set.

    Attributes:
        current: Number of the data set for which the ledger is charged now.
        at_start: Charges of the ledger when it was first charged for the current data set.
        earlier: Charges for earlier data sets, by number.
    """

    current: int
    at_start: Counter[Event]
    earlier: dict[int, Counter[Event]] = field(default_factory=dict)

    def begin(self, number: int, charged: Counter[Event]) -> None:
        """Records that the ledger is charged for another data set from now on."""
        self.earlier[self.current] = self.earlier.get(self.current, Counter()) + (charged - self.at_start)
        self.current, self.at_start = number, charged


_charges_of: weakref.WeakKeyDictionary[Ledger, _ChargesByDataset] = weakref.WeakKeyDictionary()


@dataclass(frozen=True)
class _LastLedger:
    """The last ledger that was charged for a data set. It holds all earlier charges, or a warning was given."""

    dataset: Callable[[], Any]  # a weak reference if possible
    parts: list[tuple[Callable[[], Any], Any]]  # references to the underlying data sets, and indices of the examples
    ledger: Ledger  # kept after its engine is deleted, because its charges remain
    others: Counter[Event]  # charges of its account from other ledgers when it began
    number: int  # number of the data set

    def overlaps(self, parts: list[tuple[Any, Any]]) -> bool:
        """Returns True if some examples are also in other parts."""
        return any(dataset() is other and overlap(a, b) for dataset, a in self.parts for other, b in parts)

    def charges(self) -> Counter[Event]:
        return self.others + (_counts(self.ledger.totals) - _of_other_data(self.ledger, self.number))


_last_ledgers: list[_LastLedger] = []  # one for each data set
_numbers = itertools.count()


_checks: weakref.WeakSet[SharedDatasetCheck] = weakref.WeakSet()


@dataclass(eq=False)
class SharedDatasetCheck:
    """Warns, before a charge, if another engine was charged for the same data set and the account lacks that cost.

    The check runs at each charge and not at the start of an engine, because a state may be loaded in between, and
    either of two engines may charge first.

    Attributes:
        loader: The data loader of the run, or the data set if the loop draws its own batches. None if neither is known.
        dataset: The data set of the run.
        account: Returns the charges of the account that states the privacy cost of the run.
        is_last: True if, since the last call of ``before_charge``, no other run was charged for the data set and the
            ledger was charged for no other data set. Then the call may be omitted.
    """

    loader: Any
    account: Callable[[], Iterable[Charge]]
    dataset: Any = field(init=False)
    is_last: bool = field(default=False, init=False)
    ledger: Ledger | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        """Registers the check, so that other runs reset ``is_last``."""
        self.dataset = getattr(self.loader, "dataset", self.loader)
        self.is_last = self.dataset is None
        _checks.add(self)

    def before_charge(self, charged: Ledger | RunLedger) -> None:
        """Warns if the account lacks charges of another engine."""
        self.ledger = charged.ledger if isinstance(charged, RunLedger) else charged
        last = next((last for last in _last_ledgers if last.dataset() is self.dataset), None)
        charges = _charges_of.get(self.ledger)
        if last is None or charges is None or last.ledger is not self.ledger or charges.current != last.number:
            _compare(self.dataset, self.ledger, last, charges, self.account())
        for check in _checks:
            if check.dataset is not None and (check.dataset is self.dataset or check.ledger is self.ledger):
                check.is_last = check is self


def _compare(
    dataset: Any,
    ledger: Ledger,
    last: _LastLedger | None,
    charges: _ChargesByDataset | None,
    account: Iterable[Charge],
) -> None:
    """Records that a ledger is charged for a data set from now on, and compares it with the last such ledger."""
    in_ledger, in_account = _counts(ledger.totals), _counts(account)
    number = next(_numbers) if last is None else last.number
    if charges is None:
        _charges_of[ledger] = _ChargesByDataset(number, in_ledger)
    else:
        charges.begin(number, in_ledger)
    parts = examples_of(dataset)
    alive = [entry for entry in _last_ledgers if any(part() is not None for part, _ in entry.parts)]
    _last_ledgers[:] = [entry for entry in alive if entry is not last]
    others = [entry for entry in _last_ledgers if entry.overlaps(parts)] if last is None else [last]
    references = [(_reference(part), indices) for part, indices in parts]
    _last_ledgers.append(_LastLedger(_reference(dataset), references, ledger, in_account - in_ledger, number))
    accounted = (in_ledger | in_account) - _of_other_data(ledger, number)
    if any(entry.ledger is not ledger and entry.charges() - accounted for entry in others):
        notice(
            "DPE012",
            f"Another engine trained on {'some examples of this' if last is None else 'the same'} data set in this "
            "process, and the account of this engine lacks its privacy cost. The costs add up: use one engine for "
            "both, or load the state of the other before the first step (load_state_dict, load_checkpoint).",
            key=f"two engines, data set {number}",
        )


def _of_other_data(ledger: Ledger, number: int) -> Counter[Event]:
    """Returns the charges of a ledger for other data sets in this process. That of a loaded state is unknown."""
    charges = _charges_of[ledger]
    counts = Counter[Event]()
    for dataset_number, charged in charges.earlier.items():
        counts += charged if dataset_number != number else Counter()
    return counts + (_counts(ledger.totals) - charges.at_start if charges.current != number else Counter())


def _counts(charges: Iterable[Charge]) -> Counter[Event]:
    counts = Counter[Event]()
    for charge in charges:
        counts[charge.event.rounded()] += charge.count
    return counts


def _reference(dataset: Any) -> Callable[[], Any]:
    try:
        return weakref.ref(dataset)
    except TypeError:  # for example a list, which then stays alive
        return lambda: dataset
