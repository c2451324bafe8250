"""The ledger: all charges in order, run-length encoded."""

import copy
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, get_args

from dpengine.errors import InvalidBudgetError, LedgerError

from . import arguments
from .events import Event, event_from_state, event_to_state
from .overviews import html_table

KINDS = ("release", "void", "clip")
"""A step, a batch that was sampled and discarded, and the noised count of adaptive clipping."""

UNKNOWN_SAMPLING = "unknown"
"""Sampling scheme of charges that were stored without its name."""

_SCHEMA = 1


@dataclass(frozen=True)
class Charge:
    """``count`` equal ledger entries. All kinds count for epsilon, because data may cause a batch to be discarded."""

    event: Event
    count: int = 1
    kind: str = "release"

    def __post_init__(self) -> None:
        if not isinstance(self.event, get_args(Event)):
            names = ", ".join(kind.__name__ for kind in get_args(Event))
            raise TypeError(f"Charge.event is a {type(self.event).__name__}; it must be one of {names}.")
        if self.kind not in KINDS:
            raise InvalidBudgetError(f"kind={self.kind!r} is not known.", fix=f"Choose one of {', '.join(KINDS)}.")
        if type(self.count) is not int or not 0 < self.count <= arguments.MAX_COUNT:
            object.__setattr__(self, "count", arguments.count("count", self.count))


class Ledger:
    """Append-only list of charges in memory. Charges are never removed, so epsilon can only grow.

    Copies and pickles of a ledger have no observers.

    Args:
        observers: Functions that observe charges; see `observe`.
    """

    def __init__(self, observers: Iterable[Callable[[Charge], object]] = ()) -> None:
        self._observers = tuple(observers)
        self._charges: list[Charge] = []
        self._counts: dict[Event, int] = {}
        self._total = 0
        self._steps = 0  # a running sum, because summing the history takes longer as the run grows

    def charge(self, event: Event, *, count: int = 1, kind: str = "release") -> None:
        """Appends ``count`` equal entries. Call it before the release that they account for.

        Args:
            event: The privacy event.
            count: Number of entries, at least 1.
            kind: One of `KINDS`.

        Raises:
            InvalidBudgetError: If an argument is out of range, or the total count exceeds the maximum.
        """  # noqa: DOC502 - the checks raise on our behalf
        charge = Charge(event, count, kind)
        _check_total(self._total + charge.count)
        self._append(charge)
        with ExitStack() as calls:  # calls all observers in order, even if one raises
            for observer in reversed(self._observers):
                calls.callback(observer, charge)

    def observe(self, observer: Callable[[Charge], object]) -> Callable[[], None]:
        """Calls a function with each new charge, until the returned function is called.

        The observer is called after the charge is in the ledger and before its release. If an observer raises, the
        charge remains, the other observers are called, and the error propagates to the caller of `charge`.
        ``load_state_dict`` does not call observers. An observer is not added twice.

        Args:
            observer: Called with a `Charge`, not merged with the charges before it.

        Returns:
            A function without arguments that removes the observer.
        """
        if observer not in self._observers:
            self._observers += (observer,)

        def remove() -> None:
            self._observers = tuple(other for other in self._observers if other != observer)

        return remove

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {"_observers": (), "_charges": list(self._charges), "_counts": dict(self._counts)}

    def _append(self, charge: Charge) -> None:
        self._total += charge.count
        self._steps += _steps(charge)
        self._counts[charge.event] = self._counts.get(charge.event, 0) + charge.count
        last = self._charges[-1] if self._charges else None
        if last is not None and (last.event, last.kind) == (charge.event, charge.kind):
            merged = copy.copy(last)  # a copy, because callers may hold the last charge; fields are already validated
            object.__setattr__(merged, "count", last.count + charge.count)
            self._charges[-1] = merged
        else:
            self._charges.append(charge)

    @property
    def history(self) -> tuple[Charge, ...]:
        """All charges in order; adjacent equal charges are merged."""
        return tuple(self._charges)

    @property
    def totals(self) -> tuple[Charge, ...]:
        """Each event once, with its count over all kinds. Determines epsilon. The size does not grow with the run."""
        return tuple(Charge(event, count) for event, count in self._counts.items())

    @property
    def steps(self) -> int:
        """Number of charged batches, released or discarded."""
        return self._steps

    def __repr__(self) -> str:
        """Returns the number of charged steps and of different events."""
        return f"{type(self).__name__}(steps={self.steps}, events={len(self._counts)})"

    def _repr_html_(self) -> str:
        """Returns the number of charges of each event and kind, for notebooks."""
        counts = Counter[str]()
        for charge in self._charges:
            counts[f"{charge.event!r}, {charge.kind}"] += charge.count
        return html_table(repr(self), counts)

    def state_dict(self) -> dict[str, Any]:
        """Returns the complete history as plain JSON values."""
        charges = [{"event": event_to_state(c.event), "count": c.count, "kind": c.kind} for c in self._charges]
        return {"schema": _SCHEMA, "charges": charges}

    def load_state_dict(self, state: Mapping[str, Any], *, merge: bool = False) -> None:
        """Loads a stored history.

        Args:
            state: Result of `state_dict`, also after a round trip through JSON.
            merge: Whether to add to the charges of this ledger. A history that is loaded into its own ledger counts
                twice, which is safe.

        Raises:
            LedgerError: If this ledger has charges and ``merge`` is not set, or if the state cannot be read. The ledger
                is then unchanged.
        """
        if self._charges and not merge:
            raise LedgerError(
                f"This ledger already has {self.steps} steps, which loading would discard.",
                fix="Load before the first step, or pass merge=True to keep both.",
            )
        charges = _charges_of_state(state)
        try:
            _check_total(self._total + sum(charge.count for charge in charges))
        except InvalidBudgetError as error:
            raise LedgerError(f"The ledger state cannot be added: {error}") from error
        for charge in charges:
            self._append(charge)


def checked_history(history: Iterable[Charge]) -> tuple[Charge, ...]:
    """Returns the charges of a history. Raises TypeError if it is not a sequence of charges."""
    if isinstance(history, (Ledger, Charge)):
        fix = "ledger.history" if isinstance(history, Ledger) else "[charge]"
        raise TypeError(f"history is a {type(history).__name__}; expected a sequence of charges. Pass {fix}.")
    charges = tuple(history)
    for charge in charges:
        if not isinstance(charge, Charge):
            kind = type(charge).__name__
            raise TypeError(
                f"The history contains a {kind}; expected charges. Pass dpengine.accounting.Charge(event, count) for "
                "each event."
            )
    _check_total(sum(charge.count for charge in charges))
    return charges


def steps_of(history: Iterable[Charge]) -> int:
    """Returns the number of charged batches in a history, released or discarded."""
    return sum(map(_steps, checked_history(history)))


def _steps(charge: Charge) -> int:
    if charge.kind == "clip":
        return 0
    return charge.count * charge.event.num_steps


def _check_total(total: int) -> None:
    if total > arguments.MAX_COUNT:
        raise InvalidBudgetError(
            f"The total count of charges would be {total:,}, which exceeds the maximum of 2**62.",
            fix="Check the counts: at a million steps per second, 2**62 take 146,000 years.",
        )


def _charges_of_state(state: Mapping[str, Any]) -> list[Charge]:
    if not isinstance(state, Mapping):
        raise _damaged(f"it is a {type(state).__name__}, not the dictionary that state_dict returned")
    if state.get("schema") != _SCHEMA:
        raise LedgerError(
            f"The ledger state has schema {state.get('schema')!r}; this version reads {_SCHEMA}.",
            fix="Load it with the version that wrote it.",
        )
    _check_keys("the state", state, ("schema", "charges"))
    charges = state["charges"]
    if not isinstance(charges, (list, tuple)):
        raise _damaged(f"charges is a {type(charges).__name__}, not a list")
    return [_charge_of(charge, f"charges[{index}]") for index, charge in enumerate(charges)]


def _charge_of(state: Any, where: str) -> Charge:
    if not isinstance(state, Mapping):
        raise _damaged(f"{where} is a {type(state).__name__}, not a dictionary")
    _check_keys(where, state, ("event", "count", "kind"))
    try:
        return Charge(event_from_state(state["event"]), state["count"], state["kind"])
    except (TypeError, InvalidBudgetError, LedgerError) as error:
        raise _damaged(f"{where}: {error}") from error


def _check_keys(where: str, state: Mapping[Any, Any], known: tuple[str, ...]) -> None:
    """Raises for missing keys, and for unknown keys, because they might increase the cost of a charge."""
    unknown, missing = [key for key in state if key not in known], [key for key in known if key not in state]
    if unknown or missing:
        reason = f"has {unknown[0]!r}, which this version does not support" if unknown else f"lacks {missing[0]!r}"
        raise _damaged(f"{where} {reason}")


def _damaged(reason: str) -> LedgerError:
    return LedgerError(f"The ledger state is damaged: {reason.rstrip('.')}.", fix="Restore it from a backup.")
