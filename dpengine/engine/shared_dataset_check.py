"""Warns if two engines train on one data set and an account lacks the privacy cost of the other."""

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
class _Shares:
    """Charges of a ledger by data set.

    Attributes:
        at: Number of the data set for which the ledger is charged now.
        since: Charges of the ledger when that began.
        before: Charges for earlier data sets, by number.
    """

    at: int
    since: Counter[Event]
    before: dict[int, Counter[Event]] = field(default_factory=dict)

    def move(self, number: int, charged: Counter[Event]) -> None:
        """Records that the ledger is charged for another data set from now on."""
        self.before[self.at] = self.before.get(self.at, Counter()) + (charged - self.since)
        self.at, self.since = number, charged


_shares: weakref.WeakKeyDictionary[Ledger, _Shares] = weakref.WeakKeyDictionary()


@dataclass(frozen=True)
class _Last:
    """The last ledger that was charged for a data set. It holds all earlier charges, or a warning was given."""

    dataset: Callable[[], Any]  # a weak reference if possible
    parts: list[tuple[Callable[[], Any], Any]]  # references to the data sets that it takes examples from, and indices
    ledger: Ledger  # kept after its engine is deleted: its charges remain
    others: Counter[Event]  # charges of its account from elsewhere when it began
    number: int  # of the data set

    def overlaps(self, parts: list[tuple[Any, Any]]) -> bool:
        """Returns True if some examples are also those of other parts."""
        return any(mine() is other and overlap(a, b) for mine, a in self.parts for other, b in parts)

    def charges(self) -> Counter[Event]:
        return self.others + (_counts(self.ledger.totals) - _of_other_data(self.ledger, self.number))


_last_of: list[_Last] = []  # one for each data set
_numbers = itertools.count()


_checks: weakref.WeakSet[SharedDatasetCheck] = weakref.WeakSet()


@dataclass(eq=False)
class SharedDatasetCheck:
    """Warns, before a charge, if another engine was charged for the same data set and the account lacks that cost.

    The check is made at each charge and not when an engine begins: a state may be loaded in between, and either of two
    engines may be the first to charge.

    Attributes:
        loader: The data loader of the run, or the data set if the loop draws its own batches. None if neither is known.
        dataset: The data set of the run.
        account: Returns the charges of the account that states the privacy cost of the run.
        is_last: True if no other run was charged for the data set, and the ledger for no other data set, since the last
            call of ``before_charge``. It need not be called then.
    """

    loader: Any
    account: Callable[[], Iterable[Charge]]
    dataset: Any = field(init=False)
    is_last: bool = field(default=False, init=False)
    ledger: Ledger | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        """Begins to notice the charges of other runs."""
        self.dataset = getattr(self.loader, "dataset", self.loader)
        self.is_last = self.dataset is None
        _checks.add(self)

    def before_charge(self, charged: Ledger | RunLedger) -> None:
        """Warns if the account lacks charges of another engine."""
        self.ledger = charged.ledger if isinstance(charged, RunLedger) else charged
        last = next((last for last in _last_of if last.dataset() is self.dataset), None)
        shares = _shares.get(self.ledger)
        if last is None or shares is None or last.ledger is not self.ledger or shares.at != last.number:
            _compare(self.dataset, self.ledger, last, shares, self.account())
        for check in _checks:
            if check.dataset is not None and (check.dataset is self.dataset or check.ledger is self.ledger):
                check.is_last = check is self


def _compare(
    dataset: Any,
    ledger: Ledger,
    last: _Last | None,
    shares: _Shares | None,
    account: Iterable[Charge],
) -> None:
    """Records that a ledger is charged for a data set from now on, and compares it with the last such ledger."""
    own, held = _counts(ledger.totals), _counts(account)
    number = next(_numbers) if last is None else last.number
    if shares is None:
        _shares[ledger] = _Shares(number, own)
    else:
        shares.move(number, own)
    parts = examples_of(dataset)
    _last_of[:] = [one for one in _last_of if one is not last and any(part() is not None for part, _ in one.parts)]
    others = [one for one in _last_of if one.overlaps(parts)] if last is None else [last]
    _last_of.append(_Last(_reference(dataset), [(_reference(p), i) for p, i in parts], ledger, held - own, number))
    of_this = (own | held) - _of_other_data(ledger, number)
    if any(one.ledger is not ledger and one.charges() - of_this for one in others):
        notice(
            "DPE012",
            f"Another engine trained on {'some examples of this' if last is None else 'the same'} data set in this "
            "process, and the account of this engine lacks its privacy cost. The costs add up: use one engine for "
            "both, or load the state of the other before the first step (load_state_dict, load_checkpoint).",
            key=f"two engines, data set {number}",
        )


def _of_other_data(ledger: Ledger, number: int) -> Counter[Event]:
    """Charges of a ledger for other data sets than this one, in this process.

    The data set of a loaded state is unknown.
    """
    shares = _shares[ledger]
    counts = Counter[Event]()
    for of, share in shares.before.items():
        counts += share if of != number else Counter()
    return counts + (_counts(ledger.totals) - shares.since if shares.at != number else Counter())


def _counts(charges: Iterable[Charge]) -> Counter[Event]:
    counts = Counter[Event]()
    for charge in charges:
        counts[charge.event.rounded()] += charge.count
    return counts


def _reference(dataset: Any) -> Callable[[], Any]:
    try:
        return weakref.ref(dataset)
    except TypeError:  # such as a list, which then stays alive
        return lambda: dataset
