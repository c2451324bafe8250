"""The ledger: what was charged so far, in order, as run lengths."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, get_args

from dpengine.errors import InvalidBudgetError, LedgerError

from . import arguments
from .events import Event, event_from_state, event_to_state
from .sampled_matrix import SampledMatrixEvent

KINDS = ("release", "void", "clip")
"""A noised sum that left, a batch that was drawn but not released, and the noised count of adaptive clipping."""

_SCHEMA = 1


@dataclass(frozen=True)
class Charge:
    """``count`` equal entries. Every kind counts for epsilon: a void's reason may depend on the data."""

    event: Event
    count: int = 1
    kind: str = "release"

    def __post_init__(self) -> None:
        if not isinstance(self.event, get_args(Event)):
            names = ", ".join(kind.__name__ for kind in get_args(Event))
            raise TypeError(f"Charge.event is a {type(self.event).__name__}; it must be one of {names}.")
        if self.kind not in KINDS:
            raise InvalidBudgetError(f"kind={self.kind!r} is not known.", fix=f"Choose one of {', '.join(KINDS)}.")
        object.__setattr__(self, "count", arguments.count("count", self.count))


class Ledger:
    """Append-only list of charges in memory. Nothing is ever taken back, so epsilon can only grow."""

    def __init__(self) -> None:
        self._charges: list[Charge] = []
        self._counts: dict[Event, int] = {}

    def charge(self, event: Event, *, count: int = 1, kind: str = "release") -> None:
        """Appends ``count`` equal entries; to be called before what they pay for leaves.

        Args:
            event: What is about to be released.
            count: How often, at least 1.
            kind: One of `KINDS`.
        """
        self._append(Charge(event, count, kind))

    def _append(self, charge: Charge) -> None:
        self._counts[charge.event] = self._counts.get(charge.event, 0) + charge.count
        last = self._charges[-1] if self._charges else None
        if last is not None and (last.event, last.kind) == (charge.event, charge.kind):
            self._charges[-1] = Charge(last.event, last.count + charge.count, last.kind)
        else:
            self._charges.append(charge)

    @property
    def history(self) -> tuple[Charge, ...]:
        """All charges in order, equal neighbours merged."""
        return tuple(self._charges)

    @property
    def totals(self) -> tuple[Charge, ...]:
        """What epsilon depends on: each event once, with its count over all kinds. As short after a million steps."""
        return tuple(Charge(event, count) for event, count in self._counts.items())

    @property
    def steps(self) -> int:
        """How many batches were charged, released or void."""
        return steps_of(self.history)

    def state_dict(self) -> dict[str, Any]:
        """Returns the whole history as plain JSON values."""
        charges = [{"event": event_to_state(c.event), "count": c.count, "kind": c.kind} for c in self._charges]
        return {"schema": _SCHEMA, "charges": charges}

    def load_state_dict(self, state: Mapping[str, Any], *, merge: bool = False) -> None:
        """Takes over a stored history.

        Args:
            state: What `state_dict` returned, also after a round trip through JSON.
            merge: Adds to what this ledger already holds. Both were released, so both are kept; a history that is
                loaded on top of itself counts twice, which is safe.

        Raises:
            LedgerError: If this ledger holds charges and ``merge`` is not set, or if the state cannot be read. The
                ledger is then unchanged.
        """
        if self._charges and not merge:
            raise LedgerError(
                f"This ledger already holds {self.steps} steps, which loading would forget.",
                fix="Load before the first step, or pass merge=True to keep both.",
            )
        for charge in _read(state):
            self._append(charge)


def steps_of(history: Iterable[Charge]) -> int:
    """How many batches a history charged, released or void."""
    return sum(_batches(charge.event) * charge.count for charge in history if charge.kind != "clip")


def _batches(event: Event) -> int:
    return event.steps if isinstance(event, SampledMatrixEvent) else 1


def _read(state: Mapping[str, Any]) -> list[Charge]:
    if state.get("schema") != _SCHEMA:
        raise LedgerError(
            f"The ledger state has schema {state.get('schema')!r}; this version reads {_SCHEMA}.",
            fix="Load it with the version that wrote it.",
        )
    try:
        return [Charge(event_from_state(row["event"]), row["count"], row["kind"]) for row in state["charges"]]
    except (KeyError, TypeError, InvalidBudgetError) as error:
        raise LedgerError(f"The ledger state is damaged: {error!r}.", fix="Restore it from a backup.") from error
