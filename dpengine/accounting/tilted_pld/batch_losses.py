"""Dominating `LossPair` of a release over a batch that is not plain Poisson, and the table of such events."""

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
    """Uniform subsets of one size, where one example takes the place of another.

    With P0, Q0 the Gaussians of the sum at its two ends and q the share of the data set, delta at ``e^eps >= 1`` is at
    most that of ``(1 - q) Q0 + q P0`` against ``Q0``. The relation has no direction, so below 1 it is that of the pair
    with its roles exchanged. One pair has both: its positive losses are those of the first, its negative ones those of
    the second, and what is left has loss 0.

    Source: Balle, Barthe, Gaboardi 2018 (arXiv:1807.01647); Zhu, Dong, Wang 2022 (arXiv:2106.08567).

    Attributes:
        rate: q, below or at 1.
        noise_multiplier: Over the add/remove sensitivity, half of how far the sum moves.
    """

    rate: float
    noise_multiplier: float

    @property
    def sigma(self) -> float:
        """Standard deviation over how far the sum moves."""
        return self.noise_multiplier / 2

    @property
    def largest_loss(self) -> float:
        """There is none."""
        return math.inf

    def loss(self, x: Floats) -> Floats:
        """Loss at outputs x; 0 at 0."""
        positive = self._taken.loss(np.maximum(x, 0.0) + 0.5)
        return np.where(x >= 0, positive, self._added.loss(np.minimum(x, 0.0) - 0.5))

    def output(self, y: Floats) -> Floats:
        """The output at which the loss is y."""
        positive = np.maximum(self._taken.output(np.maximum(y, 0.0)) - 0.5, 0.0)
        negative = np.minimum(self._added.output(np.minimum(y, 0.0)) + 0.5, 0.0)
        return np.where(y > 0, positive, np.where(y < 0, negative, 0.0))

    def masses(self, x: Floats) -> Masses:
        """The masses between neighbouring outputs x, rising."""
        above, below = self._taken.masses(np.maximum(x, 0.0) + 0.5), self._added.masses(np.minimum(x, 0.0) - 0.5)
        at_zero = (1 - self.rate) * math.erf(0.5 / self.sigma / math.sqrt(2))
        here = np.where((x[:-1] <= 0) & (x[1:] > 0), at_zero, 0.0)
        return Masses(
            above.p + below.p + here,
            above.q + below.q + here,
            np.where(x[:-1] >= 0, above.p_tails, np.maximum(above.p_tails, below.p_tails)) + here,
            np.where(x[:-1] >= 0, above.q_tails, np.maximum(above.q_tails, below.q_tails)) + here,
        )

    def reach(self, tail: float) -> tuple[float, float]:
        """Outputs below which P has less than 1e-20, and above which it has less than ``tail``."""
        return self._added.reach(tail)[0] + 0.5, self._taken.reach(tail)[1] - 0.5

    @property
    def _taken(self) -> LossPair:
        return LossPair(self.rate, self.sigma, Direction.REMOVE)

    @property
    def _added(self) -> LossPair:
        return LossPair(self.rate, self.sigma, Direction.ADD)


@dataclass(frozen=True)
class MixturePair:
    """A unit that adds one of several norms s, by chance p: ``sum p N(s)`` against ``N(0)``, or the other way round.

    Source: Choquette-Choo et al. 2024 (arXiv:2310.15526).

    Attributes:
        norms: None negative.
        probabilities: Of sum 1 at most, or more in the direction REMOVE.
        sigma: Standard deviation of the noise.
        direction: REMOVE or ADD.
    """

    norms: tuple[float, ...]
    probabilities: tuple[float, ...]
    sigma: float
    direction: Direction

    @property
    def largest_loss(self) -> float:
        """Bounds the loss of adding a unit that may be absent: its absence keeps a part of each probability."""
        absent = math.fsum(p for s, p in zip(self.norms, self.probabilities, strict=True) if s == 0)
        return -math.log(absent) if self.direction is Direction.ADD and absent > 0 else math.inf

    def loss(self, x: Floats) -> Floats:
        """The loss at outputs x."""
        return self._log_ratio(x) if self.direction is Direction.REMOVE else -self._log_ratio(-x)

    def output(self, y: Floats) -> Floats:
        """The output at which the loss is y; minus or plus infinity where it is always above or below."""
        return self._output_of_ratio(y) if self.direction is Direction.REMOVE else -self._output_of_ratio(-y)

    def masses(self, x: Floats) -> Masses:
        """The masses between neighbouring outputs x, rising, ends at infinity included."""
        sign = 1.0 if self.direction is Direction.REMOVE else -1.0
        mixed, mixed_tails = np.zeros(len(x) - 1), np.zeros(len(x) - 1)
        for norm, chance in zip(self.norms, self.probabilities, strict=True):
            mass, tails = between((x - sign * norm) / self.sigma)
            mixed, mixed_tails = mixed + chance * mass, mixed_tails + chance * tails
        plain, plain_tails = between(x / self.sigma)
        if self.direction is Direction.REMOVE:
            return Masses(mixed, plain, mixed_tails, plain_tails)
        return Masses(plain, mixed, plain_tails, mixed_tails)

    def reach(self, tail: float) -> tuple[float, float]:
        """Outputs below which P has less than 1e-20, and above which it has less than ``tail``."""
        farthest = max(self.norms) if self.direction is Direction.REMOVE else 0.0
        return -9.5 * self.sigma, farthest + self.sigma * math.sqrt(max(1.0, -2 * math.log(tail)))

    def _log_ratio(self, x: Floats) -> Floats:
        found = np.full(np.shape(x), -np.inf)
        variance = self.sigma * self.sigma
        for s, p in zip(self.norms, self.probabilities, strict=True):
            if p > 0:
                found = np.logaddexp(found, math.log(p) + (x - s / 2) * (s / variance))
        return found

    def _output_of_ratio(self, y: Floats) -> Floats:
        """Bisection, because the ratio increases with x."""
        if max(self.norms) == 0:
            return np.where(y >= 0, np.inf, -np.inf)
        least = min(norm for norm in self.norms if norm > 0)
        widest = (np.abs(y) + 800.0) * self.sigma * self.sigma / least + max(self.norms)
        low, high = -widest, widest
        for _ in range(_HALVINGS):
            middle = (low + high) / 2
            above = self._log_ratio(middle) > y
            low, high = np.where(above, low, middle), np.where(above, middle, high)
        return np.where(self._log_ratio(-widest) > y, -np.inf, high)


_ROUNDED_UP = 1 + 1e-9  # factor of truncation probabilities, whose tails a library computes
_LEAST_NORM = 1e-12  # relative to the largest; increasing a norm is an upper bound
_NEVER = 1e-300  # negligible compared with any supported delta


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
    """The attacker knows whether the others fill the batch. Then an included example displaces another one."""
    open_, full, rate = cut_of(event)
    free = LossPair(event.sample_rate, event.noise_multiplier, direction)
    if full == 0 or rate == 0:
        return ((1.0, free),)
    displacing = LossPair(rate, event.noise_multiplier / 2, Direction.REPLACE)
    return ((open_, free), (full, displacing))  # both from above: together they may be a little more than 1


def cut_of(event: TruncatedGaussianEvent) -> tuple[float, float, float]:
    """Bounds the probabilities that the others leave room or fill the batch, and that the example is then in it."""
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
    probabilities, total = event.probabilities, math.fsum(event.probabilities)
    if total > 1 and direction is Direction.ADD:  # more mass of Q would lower the loss
        probabilities = tuple(probability / total for probability in probabilities)
    return ((1.0, MixturePair(norms, probabilities, event.noise_multiplier / largest, direction)),)


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
"""Entries by event type."""
