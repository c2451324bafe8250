"""Warns if two engines train on one data set and an account lacks the privacy cost of the other."""

from __future__ import annotations

import itertools
import weakref
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Any

from dpengine.accounting.events import Event, PoissonGaussianEvent, UnclaimedEvent
from dpengine.accounting.ledger import Charge, Ledger
from dpengine.errors import notice
from dpengine.ledger_file.run_ledger import RunLedger


@dataclass
class _Shares:
    """What a ledger was charged for which data set, by its number."""

    at: int  # the one it is charged for now
    since: Counter[Event]  # what it held when that began
    before: dict[int, Counter[Event]] = field(default_factory=dict)

    def move(self, number: int, held: Counter[Event]) -> None:
        """From here on it is charged for another data set."""
        self.before[self.at] = self.before.get(self.at, Counter()) + (held - self.since)
        self.at, self.since = number, held


_shares: weakref.WeakKeyDictionary[Ledger, _Shares] = weakref.WeakKeyDictionary()


@dataclass(frozen=True)
class _Last:
    """Who released last of a data set. Its account holds all that was before it, or a notice was given."""

    dataset: Callable[[], Any]  # weak where that can be, so that data are not kept alive
    ledger: Ledger  # also of an engine that is gone: what it released is not
    others: Counter[Event]  # what its account held from elsewhere when it began
    number: int  # of the data set

    def spent(self) -> Counter[Event]:
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
        dataset: The data set of the run; None if it is not known.
        account: Returns the charges of the account that states the privacy cost of the run.
        is_last: Whether no other run was charged for the data set, and the ledger for no other data set, since the last
            call of ``before_charge``. It need not be called then.
    """

    dataset: Any
    account: Callable[[], Iterable[Charge]]
    is_last: bool = field(default=False, init=False)
    ledger: Ledger | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        """Begins to notice the charges of other runs."""
        self.is_last = self.dataset is None
        _checks.add(self)

    def before_charge(self, charged: Ledger | RunLedger) -> None:
        """Warns if needed."""
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
    """Notes that a ledger is charged for a data set from now on, and compares it with the last one."""
    own, held = _counts(ledger.totals), _counts(account)
    number = next(_numbers) if last is None else last.number
    if shares is None:
        _shares[ledger] = _Shares(number, own)
    else:
        shares.move(number, own)
    _last_of[:] = [one for one in _last_of if one is not last and one.dataset() is not None]
    _last_of.append(_Last(_way_to(dataset), ledger, held - own, number))
    of_this = (own | held) - _of_other_data(ledger, number)
    if last is not None and last.ledger is not ledger and last.spent() - of_this:
        notice(
            "DPE012",
            "Another engine trained on the same data set in this process, and the account of this one does not hold "
            "what it spent. Their costs add up: use one engine for both, or load the state of the other before the "
            "first step (load_state_dict, load_checkpoint).",
            key=f"two engines, data set {number}",
        )


def _of_other_data(ledger: Ledger, number: int) -> Counter[Event]:
    """What a ledger was charged here for other data sets than one. Which one a loaded state was for, nobody says."""
    shares = _shares[ledger]
    counts = Counter[Event]()
    for of, share in shares.before.items():
        counts += share if of != number else Counter()
    return counts + (_counts(ledger.totals) - shares.since if shares.at != number else Counter())


def _counts(charges: Iterable[Charge]) -> Counter[Event]:
    counts = Counter[Event]()
    for charge in charges:
        counts[_rounded(charge.event)] += charge.count
    return counts


def _rounded(event: Event) -> Event:
    """Returns the event without what another account may lack: the last digits of its rate, an unamplified event."""
    if isinstance(event, UnclaimedEvent):
        return replace(event, unamplified=None)
    if isinstance(event, PoissonGaussianEvent):
        return replace(event, sample_rate=float(f"{event.sample_rate:.12g}"))
    return event


def _way_to(dataset: Any) -> Callable[[], Any]:
    try:
        return weakref.ref(dataset)
    except TypeError:  # a list, say, which stays alive from here on
        return lambda: dataset
