"""An accountant whose history is a ledger."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any

from dpengine.accounting.ledger import Charge, Ledger
from dpengine.accounting.quick_bound import first_answer
from dpengine.accounting.rdp import ORDERS
from dpengine.errors import LedgerError, notice

from .accountant import IAccountant, check_state
from .entries import charges_of, entries_of, event_of, has_plain_form
from .history import History

KEYWORDS = ("delta", "alphas", "eps_error", "delta_error", "poisson")
"""What some accountant's ``get_epsilon`` takes. The others ignore it, since a calibration passes it on to any."""

USUAL_ORDERS = [1 + x / 10.0 for x in range(1, 100)] + list(range(12, 64))
"""Of Renyi divergences, as Opacus has them."""

ALL_ORDERS = (*USUAL_ORDERS, *(order for order in ORDERS if order > USUAL_ORDERS[-1]))
"""And larger ones, which help where epsilon is small."""

_OTHERS = ("rdp", "pld", "monte_carlo")  # who is asked where an accountant has no answer


class LedgerAccountant(IAccountant):
    """Charges a `dpengine.accounting.Ledger` and asks `dpengine.accounting` what it costs.

    Attributes:
        ledger: What was charged. May be set to that of an engine: what it charges then shows here at once. Batches that
            were given up count as steps, since why they were may depend on the data.
        history: The charges as triples; see `History` for what changing it does, and ``entries.py`` for charges that
            have no such form. Setting it replaces all. What a shared ledger is charged from then on is added here too.
    """

    def __init__(self) -> None:
        self.ledger = Ledger()
        self._list = History(self)

    @property
    def ledger(self) -> Ledger:
        """What was charged."""
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
        self._own: Ledger | None = None  # where the history is not that of one ledger

    def follow(self, ledger: Ledger) -> None:
        """Adds future charges of an engine's ledger to the history."""
        if not any(source.ledger is ledger for source in self._sources):
            self._replace_charges(self.ledger.history)
            self._sources.append(_Source(ledger, *_end(ledger)))

    @classmethod
    def counts_by_itself(cls) -> bool:
        """Returns whether the class overrides how a step is counted, which no ledger can replace."""
        return cls.step is not LedgerAccountant.step

    @property
    def history(self) -> Any:
        """Triples ``(noise_multiplier, sample_rate, steps)``, equal neighbours merged."""
        self._list._refresh()
        return self._list

    @history.setter
    def history(self, entries: Iterable[Sequence[Any]]) -> None:
        if entries is not self._list:  # as `history += ...` ends
            self._replace(list(entries))

    def step(self, *, noise_multiplier: float, sample_rate: float) -> None:
        """Charges one step.

        Args:
            noise_multiplier: Standard deviation of the noise over the sensitivity; it may change from step to step.
            sample_rate: Chance of each row to be in the batch, in (0, 1].

        Raises:
            ValueError: If either is out of range. Nothing is charged then.
        """  # noqa: DOC502 - the event raises on our behalf
        self._sources[-1].ledger.charge(event_of(noise_multiplier, sample_rate))

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._list = History(self)  # what was stored is a plain list

    def __len__(self) -> int:
        return len(self._entries())

    def state_dict(self, destination: MutableMapping[str, Any] | None = None) -> MutableMapping[str, Any]:
        """Returns the state: ``history`` and ``mechanism``, and where triples do not say all, ``ledger``.

        Args:
            destination: Where to put it; None makes an ordered dictionary.

        Returns:
            The destination, of plain values only, so that ``torch.load`` reads it with ``weights_only=True``.
        """
        state = super().state_dict(destination)
        if not all(map(has_plain_form, self.ledger.history)):
            state["ledger"] = self.ledger.state_dict()
        return state

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Replaces the history by a stored one, of this package or of Opacus.

        Args:
            state_dict: What `state_dict` returned.

        Raises:
            ValueError: If it is empty, incomplete, damaged, or of another mechanism. The history is then as it was.
        """
        check_state(state_dict, self.mechanism())
        if "ledger" not in state_dict:
            self._replace(list(state_dict["history"]))
            return
        stored = Ledger()
        try:
            stored.load_state_dict(state_dict["ledger"])
        except LedgerError as error:
            raise ValueError(f"The state holds a ledger that cannot be read: {error}") from error
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
        """An upper bound by one accountant, or if that has none by another, with a warning."""
        answer = first_answer(
            self.ledger.totals if charges is None else charges, delta, (accountant, *_OTHERS), orders=ALL_ORDERS
        )
        if answer.refusals and answer.accountant_used != accountant:
            who = answer.accountant_used
            said = f"accountant {who!r} answered instead" if who else "epsilon is infinite"
            notice(
                "DPE025", f"{answer.refusals[0]} So {said}.", key=f"{type(self).__name__} {answer.refusals[0]} {who}"
            )
        return answer.epsilon


@dataclass
class _Source:
    """A ledger that is followed, and how much of it was seen: charges, and how much the last of them counted."""

    ledger: Ledger
    place: int = 0
    count: int = 0

    def catch_up(self, own: Ledger) -> None:
        """Adds what was charged since."""
        charges, count = self.ledger.history[max(self.place - 1, 0) :], self.count
        self.place, self.count = _end(self.ledger)
        for charge in charges:
            more, count = charge.count - count, 0
            if more > 0:
                own.charge(charge.event, count=more, kind=charge.kind)


def _end(ledger: Ledger) -> tuple[int, int]:
    """How many charges there are, and how much the last of them counts."""
    charges = ledger.history
    return len(charges), charges[-1].count if charges else 0
