"""What the accountants know of releases over batches that are not plain Poisson: one row for each kind of event."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from .batch_events import FixedSizeGaussianEvent, MixtureGaussianEvent, TruncatedGaussianEvent
from .batch_pairs import FixedSizePair, MixturePair
from .events import Relation
from .loss_grid import Mixture
from .loss_pairs import Direction, LossPair

_ROUNDED_UP = 1 + 1e-9  # probabilities of a cut, whose tails a library computes
_LEAST_NORM = 1e-12  # of the largest; a larger one only helps the attacker
_NEVER = 1e-300  # beside any delta that is answered


@dataclass(frozen=True)
class BatchLaw:
    """One kind of event.

    Attributes:
        name: For sentences.
        mixture: Pairs that dominate one release together, by direction.
        relations: Which data sets may be neighbours.
        distance: How far the sum can move at most, over the noise's standard deviation.
        exact: Whether the pairs are those of some data set, and not an upper bound themselves.
    """

    name: str
    mixture: Callable[[Any, Direction], Mixture]
    relations: tuple[Relation, ...]
    distance: Callable[[Any], float]
    exact: bool = False


def _truncated(event: TruncatedGaussianEvent, direction: Direction) -> Mixture:
    """Whether the others alone fill the batch is told the attacker; then one that takes part displaces another."""
    open_, full, rate = cut_of(event)
    free = LossPair(event.sample_rate, event.noise_multiplier, direction)
    if full == 0 or rate == 0:
        return ((1.0, free),)
    displacing = LossPair(rate, event.noise_multiplier / 2, Direction.REPLACE)
    return ((open_, free), (full, displacing))  # both from above: together they may be a little more than 1


def cut_of(event: TruncatedGaussianEvent) -> tuple[float, float, float]:
    """How often the others alone leave room in a batch, and fill it, and the example takes part then; from above.

    Args:
        event: The release.

    Returns:
        Three probabilities. The second is 0 where it is too small to count.
    """
    from scipy import stats  # takes a second to import

    n, q, most = event.num_examples, event.sample_rate, event.largest_batch
    full = float(stats.binom.sf(most - 1, n - 1, q)) * _ROUNDED_UP
    if full < _NEVER:
        return 1.0, 0.0, 0.0
    above = float(stats.binom.sf(most, n, q)) * _ROUNDED_UP
    room = float(stats.binom.cdf(most - 1, n - 1, q)) * _ROUNDED_UP
    return min(1.0, room), min(1.0, full), min(1.0, most / n * above / full * _ROUNDED_UP**2)


def _fixed_size(event: FixedSizeGaussianEvent, direction: Direction) -> Mixture:
    return ((1.0, FixedSizePair(event.batch_size / event.num_examples, event.noise_multiplier)),)


def _mixture(event: MixtureGaussianEvent, direction: Direction) -> Mixture:
    largest = max(event.norms)
    norms = tuple(0.0 if norm == 0 else max(norm / largest, _LEAST_NORM) for norm in event.norms)
    return ((1.0, MixturePair(norms, event.probabilities, event.noise_multiplier / largest, direction)),)


BATCH_LAWS = {
    TruncatedGaussianEvent: BatchLaw(
        "batches that are cut to a largest size", _truncated, (Relation.ZERO_OUT,), lambda e: 2 / e.noise_multiplier
    ),
    FixedSizeGaussianEvent: BatchLaw(
        "batches of one size",
        _fixed_size,
        (Relation.REPLACE_ONE, Relation.ZERO_OUT),
        lambda e: 2 / e.noise_multiplier,
    ),
    MixtureGaussianEvent: BatchLaw(
        "units that add one of several norms",
        _mixture,
        (Relation.ADD_OR_REMOVE_ONE, Relation.ZERO_OUT),
        lambda e: max(e.norms) / e.noise_multiplier,
        exact=True,
    ),
}
"""By the type of the event."""
