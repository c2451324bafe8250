"""Dominating pairs of releases over batches other than Poisson batches, and the table of their events."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from dpengine.accounting.batch_events import FixedSizeGaussianEvent, MixtureGaussianEvent, TruncatedGaussianEvent
from dpengine.accounting.events import Relation

from .loss_grid import Mixture
from .loss_pairs import Direction, Floats, LossPair, Masses, between

_HALVINGS = 64


@dataclass(frozen=True)
class FixedSizePair:
    """Pair of a release over uniform subsets of fixed size, when one example replaces another.

    Let P0 and Q0 be the Gaussians of the two sums, and q the batch size over the size of the data set. For
    ``e^eps >= 1``, delta is at most that of ``(1 - q) Q0 + q P0`` against ``Q0``. The relation is symmetric, so for
    ``e^eps < 1`` it is at most that of the pair with exchanged roles. This class combines both: positive losses are
    those of the first pair, negative losses those of the second, and the remaining mass has loss 0.

    Source: Balle, Barthe, Gaboardi 2018 (arXiv:1807.01647); Zhu, Dong, Wang 2022 (arXiv:2106.08567).

    Attributes:
        rate: q, at most 1.
        noise_multiplier: Standard deviation over the add/remove sensitivity, which is half the change of the sum.
    """

    rate: float
    noise_multiplier: float

    @property
    def sigma(self) -> float:
        """Standard deviation over the change of the sum."""
        return self.noise_multiplier / 2

    @property
    def largest_loss(self) -> float:
        """Infinity, because the losses are unbounded."""
        return math.inf

    def loss(self, x: Floats) -> Floats:
        """Returns the loss at outputs x; 0 at 0."""
        positive = self._removal.loss(np.maximum(x, 0.0) + 0.5)
        return np.where(x >= 0, positive, self._addition.loss(np.minimum(x, 0.0) - 0.5))

    def output(self, y: Floats) -> Floats:
        """Returns the outputs with losses y."""
        positive = np.maximum(self._removal.output(np.maximum(y, 0.0)) - 0.5, 0.0)
        negative = np.minimum(self._addition.output(np.minimum(y, 0.0)) + 0.5, 0.0)
        return np.where(y > 0, positive, np.where(y < 0, negative, 0.0))

    def masses(self, x: Floats) -> Masses:
        """Returns the masses between adjacent outputs x, which ascend."""
        above, below = self._removal.masses(np.maximum(x, 0.0) + 0.5), self._addition.masses(np.minimum(x, 0.0) - 0.5)
        at_zero = (1 - self.rate) * math.erf(0.5 / self.sigma / math.sqrt(2))
        zero_loss = np.where((x[:-1] <= 0) & (x[1:] > 0), at_zero, 0.0)
        return Masses(
            above.p + below.p + zero_loss,
            above.q + below.q + zero_loss,
            np.where(x[:-1] >= 0, above.p_tails, np.maximum(above.p_tails, below.p_tails)) + zero_loss,
            np.where(x[:-1] >= 0, above.q_tails, np.maximum(above.q_tails, below.q_tails)) + zero_loss,
        )

    def reach(self, tail: float) -> tuple[float, float]:
        """Returns outputs below which P has a mass of less than 1e-20, and above which less than ``tail``."""
        return self._addition.reach(tail)[0] + 0.5, self._removal.reach(tail)[1] - 0.5

    @property
    def _removal(self) -> LossPair:
        return LossPair(self.rate, self.sigma, Direction.REMOVE)

    @property
    def _addition(self) -> LossPair:
        return LossPair(self.rate, self.sigma, Direction.ADD)


@dataclass(frozen=True)
class MixturePair:
    """Pair of a unit whose gradient has norm s with probability p: ``sum p N(s)`` against ``N(0)``, or reversed.

    Source: Choquette-Choo et al. 2024 (arXiv:2310.15526).

    Attributes:
        norms: Norms s, not negative.
        probabilities: Probabilities p. Their sum is at most 1; it may be larger in the direction REMOVE.
        sigma: Standard deviation of the noise.
        direction: REMOVE or ADD.
    """

    norms: tuple[float, ...]
    probabilities: tuple[float, ...]
    sigma: float
    direction: Direction

    @property
    def largest_loss(self) -> float:
        """Upper limit of the losses. It is finite for adding a unit that is absent with positive probability."""
        absent = math.fsum(p for s, p in zip(self.norms, self.probabilities, strict=True) if s == 0)
        return -math.log(absent) if self.direction is Direction.ADD and absent > 0 else math.inf

    def loss(self, x: Floats) -> Floats:
        """Returns the loss at outputs x."""
        return self._log_ratio(x) if self.direction is Direction.REMOVE else -self._log_ratio(-x)

    def output(self, y: Floats) -> Floats:
        """Returns the outputs with losses y; minus or plus infinity if the loss is always above or below y."""
        return self._output_of_ratio(y) if self.direction is Direction.REMOVE else -self._output_of_ratio(-y)

    def masses(self, x: Floats) -> Masses:
        """Returns the masses between adjacent outputs x, which ascend and may be infinite at the ends."""
        sign = 1.0 if self.direction is Direction.REMOVE else -1.0
        mixed, mixed_tails = np.zeros(len(x) - 1), np.zeros(len(x) - 1)
        for norm, probability in zip(self.norms, self.probabilities, strict=True):
            mass, tails = between((x - sign * norm) / self.sigma)
            mixed, mixed_tails = mixed + probability * mass, mixed_tails + probability * tails
        noise, noise_tails = between(x / self.sigma)
        if self.direction is Direction.REMOVE:
            return Masses(mixed, noise, mixed_tails, noise_tails)
        return Masses(noise, mixed, noise_tails, mixed_tails)

    def reach(self, tail: float) -> tuple[float, float]:
        """Returns outputs below which P has a mass of less than 1e-20, and above which less than ``tail``."""
        farthest = max(self.norms) if self.direction is Direction.REMOVE else 0.0
        return -9.5 * self.sigma, farthest + self.sigma * math.sqrt(max(1.0, -2 * math.log(tail)))

    def _log_ratio(self, x: Floats) -> Floats:
        log_ratio = np.full(np.shape(x), -np.inf)
        variance = self.sigma * self.sigma
        for s, p in zip(self.norms, self.probabilities, strict=True):
            if p > 0:
                log_ratio = np.logaddexp(log_ratio, math.log(p) + (x - s / 2) * (s / variance))
        return log_ratio

    def _output_of_ratio(self, y: Floats) -> Floats:
        """Inverts `_log_ratio` by bisection, because the ratio increases with x."""
        if max(self.norms) == 0:
            return np.where(y >= 0, np.inf, -np.inf)
        smallest = min(norm for norm in self.norms if norm > 0)
        widest = (np.abs(y) + 800.0) * self.sigma * self.sigma / smallest + max(self.norms)
        low, high = -widest, widest
        for _ in range(_HALVINGS):
            middle = (low + high) / 2
            above = self._log_ratio(middle) > y
            low, high = np.where(above, low, middle), np.where(above, middle, high)
        return np.where(self._log_ratio(-widest) > y, -np.inf, high)


_ROUNDED_UP = 1 + 1e-9  # factor of truncation probabilities, which covers the rounding errors of the library
_MIN_NORM = 1e-12  # smallest norm relative to the largest; a larger norm gives an upper bound
_NEGLIGIBLE = 1e-300  # probability that is negligible compared with any supported delta


@dataclass(frozen=True)
class BatchEventPairs:
    """Dominating pairs of one type of event.

    Attributes:
        name: Name of the batches in messages.
        mixture: Returns the pairs that together dominate one release, for an event and a direction.
        relations: Supported neighboring relations.
        distance: Returns the largest change of the sum over the standard deviation of the noise.
        exact: Whether the pairs are attained by some data set, so that they also give lower bounds.
    """

    name: str
    mixture: Callable[[Any, Direction], Mixture]
    relations: tuple[Relation, ...]
    distance: Callable[[Any], float]
    exact: bool = False


def _truncated(event: TruncatedGaussianEvent, direction: Direction) -> Mixture:
    """Returns the pairs for an attacker who knows if other examples fill the batch, so that one may be displaced."""
    not_full, full, rate = truncation_of(event)
    free = LossPair(event.sample_rate, event.noise_multiplier, direction)
    if full == 0 or rate == 0:
        return ((1.0, free),)
    displacing = LossPair(rate, event.noise_multiplier / 2, Direction.REPLACE)
    return ((not_full, free), (full, displacing))  # upper bounds, whose sum may be slightly more than 1


def truncation_of(event: TruncatedGaussianEvent) -> tuple[float, float, float]:
    """Bounds the probabilities of the truncation.

    Returns upper bounds on the probabilities that the other examples do not fill the batch, that they fill it, and
    that the example is in the batch if they fill it.
    """
    from scipy import stats  # takes a second to import

    n, q, largest = event.num_examples, event.sample_rate, event.largest_batch
    full = float(stats.binom.sf(largest - 1, n - 1, q)) * _ROUNDED_UP
    if full < _NEGLIGIBLE:
        return 1.0, 0.0, 0.0
    above = float(stats.binom.sf(largest, n, q)) * _ROUNDED_UP
    not_full = float(stats.binom.cdf(largest - 1, n - 1, q)) * _ROUNDED_UP
    return min(1.0, not_full), min(1.0, full), min(1.0, largest / n * above / full * _ROUNDED_UP**2)


def _fixed_size(event: FixedSizeGaussianEvent, direction: Direction) -> Mixture:
    return ((1.0, FixedSizePair(event.batch_size / event.num_examples, event.noise_multiplier)),)


def _mixture(event: MixtureGaussianEvent, direction: Direction) -> Mixture:
    largest = max(event.norms)
    norms = tuple(0.0 if norm == 0 else max(norm / largest, _MIN_NORM) for norm in event.norms)
    probabilities, total = event.probabilities, math.fsum(event.probabilities)
    if total > 1 and direction is Direction.ADD:  # more mass of Q would lower the loss
        probabilities = tuple(probability / total for probability in probabilities)
    return ((1.0, MixturePair(norms, probabilities, event.noise_multiplier / largest, direction)),)


BATCH_EVENT_PAIRS = {
    TruncatedGaussianEvent: BatchEventPairs(
        "truncated batches", _truncated, (Relation.ZERO_OUT,), lambda e: 2 / e.noise_multiplier
    ),
    FixedSizeGaussianEvent: BatchEventPairs(
        "batches of fixed size",
        _fixed_size,
        (Relation.REPLACE_ONE, Relation.ZERO_OUT),
        lambda e: 2 / e.noise_multiplier,
    ),
    MixtureGaussianEvent: BatchEventPairs(
        "units with one of several norms",
        _mixture,
        (Relation.ADD_OR_REMOVE_ONE, Relation.ZERO_OUT),
        lambda e: max(e.norms) / e.noise_multiplier,
        exact=True,
    ),
}
"""Pairs by type of event."""
