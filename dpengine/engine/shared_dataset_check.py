"""Warns if two engines train on one data set and an account lacks the privacy cost of the other."""

from __future__ import annotations

import itertools
import weakref
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Any

from dpengine.accounting.events import Event, PoissonGaussianEvent
from dpengine.accounting.ledger import Charge, Ledger
from dpengine.errors import notice


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


_by_id: dict[int, _Last] = {}  # of the data set
_numbers = itertools.count()


def notice_other_engine(dataset: Any, ledger: Ledger, known: Callable[[], Iterable[Charge]]) -> None:
    """Notices that another engine released of a data set what an account does not hold. To be called before a release.

    It is asked then, and not when an engine begins, since a state may be loaded in between; and since of two that have
    begun, either may be the first to release.
    """
    last = _by_id.get(id(dataset))
    if last is not None and last.dataset() is not dataset:  # the id of one that is gone
        last = None
    shares = _shares.get(ledger)
    if last is not None and shares is not None and last.ledger is ledger and shares.at == last.number:
        return
    for number in [number for number, other in _by_id.items() if other.dataset() is None]:
        del _by_id[number]
    own, held = _counts(ledger.totals), _counts(known())
    number = next(_numbers) if last is None else last.number
    if shares is None:
        _shares[ledger] = _Shares(number, own)
    else:
        shares.move(number, own)
    _by_id[id(dataset)] = _Last(_way_to(dataset), ledger, held - own, number)
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
    """The event without the last digits of its rate, which an account that was written by others may round else."""
    if isinstance(event, PoissonGaussianEvent):
        return replace(event, sample_rate=float(f"{event.sample_rate:.12g}"))
    return event


def _way_to(dataset: Any) -> Callable[[], Any]:
    try:
        return weakref.ref(dataset)
    except TypeError:  # a list, say, which stays alive from here on
        return lambda: dataset
