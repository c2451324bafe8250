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
        current: Id of the data set for which the ledger is charged now.
        at_start: Charges of the ledger when it was first charged for the current data set.
        earlier: Charges for earlier data sets, by id of the data set.
    """

    current: int
    at_start: Counter[Event]
    earlier: dict[int, Counter[Event]] = field(default_factory=dict)

    def begin(self, dataset_id: int, charged: Counter[Event]) -> None:
        """Records that the ledger is charged for another data set from now on."""
        self.earlier[self.current] = self.earlier.get(self.current, Counter()) + (charged - self.at_start)
        self.current, self.at_start = dataset_id, charged


_charges_of: weakref.WeakKeyDictionary[Ledger, _ChargesByDataset] = weakref.WeakKeyDictionary()


@dataclass(frozen=True)
class _LastLedger:
    """The last ledger that was charged for a data set.

    It contains the charges of the earlier ledgers for this data set, or a warning was given.
    """

    dataset: Callable[[], Any]  # a weak reference if possible
    parts: list[tuple[Callable[[], Any], Any]]  # references to the underlying data sets, and indices of the examples
    ledger: Ledger  # kept after its engine is deleted, because its charges remain
    others: Counter[Event]  # charges that its account took from other ledgers before its first charge
    dataset_id: int

    def overlaps(self, parts: list[tuple[Any, Any]]) -> bool:
        """Returns True if some examples are also in other parts."""
        return any(dataset() is other and overlap(a, b) for dataset, a in self.parts for other, b in parts)

    def charges(self) -> Counter[Event]:
        return self.others + (_counts(self.ledger.totals) - _charges_for_other_datasets(self.ledger, self.dataset_id))


_last_ledgers: list[_LastLedger] = []  # one for each data set
_dataset_ids = itertools.count()


_checks: weakref.WeakSet[SharedDatasetCheck] = weakref.WeakSet()


@dataclass(eq=False)
class SharedDatasetCheck:
    """Warns before a charge if another engine was charged for the same data set, and the account lacks those charges.

    The check runs before each charge and not when an engine is created, because a state may be loaded in between, and
    either of two engines may charge first.

    Attributes:
        loader: The data loader of the run, or the data set if the loop draws its own batches. None if neither is known.
        dataset: The data set of the run.
        account: Returns the charges from which the privacy cost of the run is computed.
        is_last: True if ``before_charge`` need not be called: since its last call, no other run was charged for the
            data set, and the ledger was charged for no other data set.
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
        if last is None or charges is None or last.ledger is not self.ledger or charges.current != last.dataset_id:
            _record_and_compare(self.dataset, self.ledger, last, charges, self.account())
        for check in _checks:
            if check.dataset is not None and (check.dataset is self.dataset or check.ledger is self.ledger):
                check.is_last = check is self


def _record_and_compare(
    dataset: Any,
    ledger: Ledger,
    last: _LastLedger | None,
    charges: _ChargesByDataset | None,
    account: Iterable[Charge],
) -> None:
    """Records that a ledger is charged for a data set from now on, and compares it with the last such ledger."""
    in_ledger, in_account = _counts(ledger.totals), _counts(account)
    dataset_id = next(_dataset_ids) if last is None else last.dataset_id
    if charges is None:
        _charges_of[ledger] = _ChargesByDataset(dataset_id, in_ledger)
    else:
        charges.begin(dataset_id, in_ledger)
    parts = examples_of(dataset)
    alive = [entry for entry in _last_ledgers if any(part() is not None for part, _ in entry.parts)]
    _last_ledgers[:] = [entry for entry in alive if entry is not last]
    others = [entry for entry in _last_ledgers if entry.overlaps(parts)] if last is None else [last]
    references = [(_reference(part), indices) for part, indices in parts]
    _last_ledgers.append(_LastLedger(_reference(dataset), references, ledger, in_account - in_ledger, dataset_id))
    accounted = (in_ledger | in_account) - _charges_for_other_datasets(ledger, dataset_id)
    if any(entry.ledger is not ledger and entry.charges() - accounted for entry in others):
        notice(
            "DPE012",
            f"Another engine trained on {'some examples of this' if last is None else 'the same'} data set in this "
            "process, and this engine does not account for its privacy cost. The costs add up: use one engine for "
            "both, or load the state of the other one before the first step (load_state_dict, load_checkpoint).",
            key=f"two engines, data set {dataset_id}",
        )


def _charges_for_other_datasets(ledger: Ledger, dataset_id: int) -> Counter[Event]:
    """Returns the charges of a ledger for other data sets in this process.

    Charges of a loaded state are not included, because their data set is unknown.
    """
    charges = _charges_of[ledger]
    counts = Counter[Event]()
    for other_id, charged in charges.earlier.items():
        counts += charged if other_id != dataset_id else Counter()
    return counts + (_counts(ledger.totals) - charges.at_start if charges.current != dataset_id else Counter())


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
