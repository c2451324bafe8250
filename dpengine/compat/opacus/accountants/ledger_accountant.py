"""Base class of accountants whose history is a ledger."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any

from dpengine.accounting.ledger import Charge, Ledger
from dpengine.accounting.quick_bound import first_answer
from dpengine.accounting.rdp import ORDERS
from dpengine.errors import LedgerError, notice

from .accountant import IAccountant, check_state
from .entries import charges_of, entries_of, event_of, is_triple
from .history import History

KEYWORDS = ("delta", "alphas", "eps_error", "delta_error", "poisson")
"""Keywords of ``get_epsilon`` of all accountants. Each accepts and ignores those of the others."""

OPACUS_ORDERS = [1 + x / 10.0 for x in range(1, 100)] + list(range(12, 64))
"""Orders of Renyi divergences, as in Opacus."""

ALL_ORDERS = (*OPACUS_ORDERS, *(order for order in ORDERS if order > OPACUS_ORDERS[-1]))
"""These and larger orders, which give smaller bounds if epsilon is small."""

_FALLBACKS = ("rdp", "pld", "monte_carlo")  # for histories that an accountant cannot bound


class LedgerAccountant(IAccountant):
    """Accountant that charges a `dpengine.accounting.Ledger` and computes its cost by `dpengine.accounting`.

    Attributes:
        ledger: The charges. If it is set to the ledger of an engine, it includes all charges of that engine. Discarded
            batches count as steps, because the reason for discarding them may depend on the data.
        history: The charges as triples; see `History` for the effect of changes, and ``entries.py`` for charges that
            are not triples. Setting it replaces all charges; later charges of a followed ledger are added.
    """

    def __init__(self) -> None:
        self.ledger = Ledger()
        self._list = History(self)

    @property
    def ledger(self) -> Ledger:
        """Charges of this accountant and of the ledgers that it follows."""
        if self._own is None:
            return self._sources[0].ledger
        for source in self._sources:
            source.catch_up(self._own)
        return self._own

    @ledger.setter
    def ledger(self, ledger: Ledger) -> None:
        if not isinstance(ledger, Ledger):
            raise TypeError(f"ledger is a {type(ledger).__name__}; pass a dpengine.accounting.Ledger.")
        self._sources = [_Source(ledger)]
        self._own: Ledger | None = None  # set if the history differs from that of the one ledger

    def follow(self, ledger: Ledger) -> None:
        """Adds future charges of an engine's ledger to the history."""
        if not any(source.ledger is ledger for source in self._sources):
            self._replace_charges(self.ledger.history)
            self._sources.append(_Source(ledger, *_end(ledger)))

    @classmethod
    def counts_by_itself(cls) -> bool:
        """Returns True if the class overrides `step`, so that it must count each step itself."""
        return cls.step is not LedgerAccountant.step

    @property
    def history(self) -> Any:
        """Triples ``(noise_multiplier, sample_rate, steps)``, with equal successive entries merged."""
        self._list._refresh()
        return self._list

    @history.setter
    def history(self, entries: Iterable[Sequence[Any]]) -> None:
        if entries is not self._list:  # `history += ...` assigns the list itself
            self._replace(list(entries))

    def step(self, *, noise_multiplier: float, sample_rate: float) -> None:
        """Charges one step. An argument out of range is a ``ValueError``, and nothing is charged."""
        self._sources[-1].ledger.charge(event_of(noise_multiplier, sample_rate))

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._list = History(self)  # it is pickled as a plain list

    def __len__(self) -> int:
        return len(self._entries())

    def state_dict(self, destination: MutableMapping[str, Any] | None = None) -> MutableMapping[str, Any]:
        """Returns ``history``, ``mechanism`` and, if triples are incomplete, ``ledger``, all as plain values."""
        state = super().state_dict(destination)
        if not all(map(is_triple, self.ledger.history)):
            state["ledger"] = self.ledger.state_dict()
        return state

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Loads a history of this package or of Opacus. An invalid state is a ``ValueError`` and changes nothing."""
        check_state(state_dict, self.mechanism())
        if "ledger" not in state_dict:
            self._replace(list(state_dict["history"]))
            return
        stored = Ledger()
        try:
            stored.load_state_dict(state_dict["ledger"])
        except LedgerError as error:
            raise ValueError(f"The ledger in the state cannot be read: {error}") from error
        self._replace_charges(stored.history)

    def _entries(self) -> list[Any]:
        return entries_of(self.ledger.history)

    def _add(self, entries: Iterable[Sequence[Any]]) -> None:
        charges = charges_of(entries)
        ledger = self.ledger
        for charge in charges:
            ledger.charge(charge.event, count=charge.count, kind=charge.kind)

    def _replace(self, entries: Iterable[Sequence[Any]]) -> None:
        self._replace_charges(charges_of(entries))

    def _replace_charges(self, charges: Iterable[Charge]) -> None:
        ledger = Ledger()
        for charge in charges:
            ledger.charge(charge.event, count=charge.count, kind=charge.kind)
        self._own = ledger
        self._sources = [_Source(source.ledger, *_end(source.ledger)) for source in self._sources]

    def _epsilon(self, delta: float, accountant: str, charges: Sequence[Charge] | None = None) -> float:
        """Returns the upper bound of an accountant. If it has none, warns and returns that of another accountant."""
        answer = first_answer(
            self.ledger.totals if charges is None else charges, delta, (accountant, *_FALLBACKS), orders=ALL_ORDERS
        )
        if answer.refusals and answer.accountant_used != accountant:
            used = answer.accountant_used
            result = f"accountant {used!r} was used instead" if used else "epsilon is infinite"
            notice("DPE025", f"{answer.refusals[0]} Therefore {result}.", key=f"{answer.refusals[0]} {used}", of=self)
        return answer.epsilon


@dataclass
class _Source:
    """Followed ledger, with the number of charges read so far and the count of the last one."""

    ledger: Ledger
    position: int = 0
    count: int = 0

    def catch_up(self, own: Ledger) -> None:
        """Adds new charges to ``own``."""
        charges, count = self.ledger.history[max(self.position - 1, 0) :], self.count
        self.position, self.count = _end(self.ledger)
        for charge in charges:
            more, count = charge.count - count, 0
            if more > 0:
                own.charge(charge.event, count=more, kind=charge.kind)


def _end(ledger: Ledger) -> tuple[int, int]:
    """Returns the number of charges and the count of the last one."""
    charges = ledger.history
    return len(charges), charges[-1].count if charges else 0
