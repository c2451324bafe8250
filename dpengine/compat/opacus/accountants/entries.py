"""Conversion between the ledger's charges and triples ``(noise_multiplier, sample_rate, steps)``.

Charges without such a form become triples of at least the same cost, if there are any:

- cyclic batches: noise and rate within the group, although not all steps can include the same example;
- correlated noise, whose steps form one Gaussian mechanism: the same number of independent steps of that total cost;
- fixed-size or truncated batches: half the noise and rate 1, because one example may displace another;
- units with several examples: noise relative to the largest norm, and rate 1;
- events that noise and rate do not bound, such as events without a claimed epsilon: noise 0.

Such a triple stores the charges that it stands for, from which epsilon is computed.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from dpengine.accounting.batch_events import FixedSizeGaussianEvent, MixtureGaussianEvent, TruncatedGaussianEvent
from dpengine.accounting.events import (
    CyclicGaussianEvent,
    Event,
    GaussianEvent,
    MatrixGaussianEvent,
    PoissonGaussianEvent,
    release_event,
)
from dpengine.accounting.ledger import Charge, steps_of

Triple = tuple[float, float, int]

_ROUNDING = 1e-9


class Entry(tuple):
    """Triple that stores its charges. Adding it to a history adds these charges."""

    charges: tuple[Charge, ...]

    def __reduce__(self) -> Any:
        return tuple, (tuple(self),)


def event_of(noise_multiplier: Any, sample_rate: Any) -> Event:
    """Returns the event of a step, from numbers or arrays or tensors of one element."""
    sigma, rate = (getattr(value, "item", lambda value=value: value)() for value in (noise_multiplier, sample_rate))
    if isinstance(rate, float) and 1 < rate <= 1 + _ROUNDING:
        rate = 1.0
    event = release_event(noise_multiplier=sigma, sample_rate=rate)
    return event if sigma > 0 else PoissonGaussianEvent(rate, 0.0)


def charges_of(entries: Iterable[Sequence[Any]]) -> list[Charge]:
    """Returns the charges of the entries of a history. Entries with 0 steps have none."""
    charges: list[Charge] = []
    for entry in entries:
        if isinstance(entry, Entry):
            charges += entry.charges
            continue
        if not isinstance(entry, Sequence) or len(entry) != 3:
            raise ValueError(f"A history must contain triples (noise_multiplier, sample_rate, steps), got {entry!r}.")
        sigma, rate, steps = entry
        event = event_of(sigma, rate)
        count = getattr(steps, "item", lambda steps=steps: steps)()
        if isinstance(count, float) and count.is_integer():
            count = int(count)
        if count != 0:
            charges.append(Charge(event, count))
    return charges


def entries_of(charges: Iterable[Charge]) -> list[Triple]:
    """Returns the triples of charges, with equal successive events merged; an `Entry` if a triple is incomplete."""
    return [_entry(list(run)) for _, run in itertools.groupby(charges, key=lambda charge: charge.event)]


def is_triple(charge: Charge) -> bool:
    """Returns True if a triple fully describes the charge."""
    return isinstance(charge.event, (GaussianEvent, PoissonGaussianEvent))


def _entry(run: list[Charge]) -> Triple:
    event, count = run[0].event, sum(charge.count for charge in run)
    if isinstance(event, PoissonGaussianEvent):
        return event.noise_multiplier, event.sample_rate, count
    if isinstance(event, GaussianEvent):
        return event.noise_multiplier, 1.0, count
    steps = steps_of(Charge(charge.event, charge.count) for charge in run)
    sigma, rate = _FORMS.get(type(event), _no_bound)(event, steps)
    entry = Entry((sigma, rate, steps))
    entry.charges = tuple(run)
    return entry  # type: ignore[return-value]


def _no_bound(event: Any, steps: int) -> tuple[float, float]:
    return 0.0, 1.0


def _correlated(event: MatrixGaussianEvent, steps: int) -> tuple[float, float]:
    if event.noise_multiplier == 0:
        return 0.0, 1.0
    precision = event.precision(steps)
    return (math.sqrt(steps / precision) if precision else event.noise_multiplier), 1.0


def _largest_norm(event: MixtureGaussianEvent, steps: int) -> tuple[float, float]:
    largest = max(event.norms)
    return (event.noise_multiplier / largest if largest else event.noise_multiplier), 1.0


_FORMS: dict[type, Callable[[Any, int], tuple[float, float]]] = {
    CyclicGaussianEvent: lambda event, steps: (event.noise_multiplier, event.sample_rate),
    MatrixGaussianEvent: _correlated,
    FixedSizeGaussianEvent: lambda event, steps: (event.noise_multiplier / 2, 1.0),
    TruncatedGaussianEvent: lambda event, steps: (event.noise_multiplier / 2, 1.0),
    MixtureGaussianEvent: _largest_norm,
}
