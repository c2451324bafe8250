"""Pairs of normal mixtures that dominate one release, and their privacy loss.

The outputs x of a pair (P, Q) are real numbers, and the loss ``log dP/dQ`` increases with x. For Poisson sampling with
rate q and noise sigma, in units of the sensitivity, and ``M(c) = (1 - q) N(0) + q N(c)``:

- removing an example: P = M(1), Q = N(0);
- adding an example: P = N(0), Q = M(-1), which is the pair above with exchanged roles and reversed outputs;
- replacing an example: P = M(1), Q = M(-1).

Sources for the domination: Zhu, Dong, Wang 2022 (arXiv:2106.08567) and Lebeda et al. 2024 (arXiv:2405.20769).
"""

from __future__ import annotations

import enum
import math
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from dpengine.accounting.events import Relation

Floats = npt.NDArray[np.float64]

_erfc = np.frompyfunc(math.erfc, 1, 1)
_LARGE = 30.0  # y above which 1 is small compared with e^y


class Direction(enum.Enum):
    """Direction of the neighboring relation."""

    REMOVE = "remove"
    ADD = "add"
    REPLACE = "replace"


DIRECTIONS = {
    Relation.ADD_OR_REMOVE_ONE: (Direction.REMOVE, Direction.ADD),
    Relation.ZERO_OUT: (Direction.REMOVE, Direction.ADD),
    Relation.REPLACE_ONE: (Direction.REPLACE,),
}
"""Directions of each relation. Each direction is composed over the complete run."""


@dataclass(frozen=True)
class Masses:
    """Masses of P and Q between adjacent outputs.

    Each mass is a difference of two tails, and its rounding error is relative to the larger one.

    Attributes:
        p, q: The masses ``(C,)``.
        p_tails, q_tails: The larger of the two tails ``(C,)``.
    """

    p: Floats
    q: Floats
    p_tails: Floats
    q_tails: Floats


@dataclass(frozen=True)
class LossPair:
    """The pair of one release.

    Attributes:
        rate: Probability that the example is in the batch, in (0, 1].
        sigma: Standard deviation of the noise over the sensitivity, positive.
        direction: Direction of the neighboring relation.
    """

    rate: float
    sigma: float
    direction: Direction

    def loss(self, x: Floats) -> Floats:
        """Returns the loss at outputs x, to a few units in the last place."""
        if self.direction is Direction.REMOVE:
            return self._log_ratio(x)
        if self.direction is Direction.ADD:
            return -self._log_ratio(-x)
        return self._log_ratio(x) - self._log_ratio(-x)

    def output(self, y: Floats) -> Floats:
        """Returns the outputs with losses y; minus or plus infinity if the loss is always above or below y."""
        if self.direction is Direction.REMOVE:
            return self._output_of_ratio(y)
        if self.direction is Direction.ADD:
            return -self._output_of_ratio(-y)
        return self._output_of_difference(y)

    def masses(self, x: Floats) -> Masses:
        """Returns the masses between adjacent outputs x, which ascend and may be infinite at the ends."""
        parts = {mean: between((x - mean) / self.sigma) for mean in {self._p_mean, self._q_mean, 0.0}}
        p, p_tails = self._mixed(parts, self._p_mean)
        q, q_tails = self._mixed(parts, self._q_mean)
        return Masses(p, q, p_tails, q_tails)

    @property
    def _p_mean(self) -> float:
        return 0.0 if self.direction is Direction.ADD else 1.0

    @property
    def _q_mean(self) -> float:
        return 0.0 if self.direction is Direction.REMOVE else -1.0

    def _mixed(self, parts: dict[float, tuple[Floats, Floats]], mean: float) -> tuple[Floats, Floats]:
        if mean == 0 or self.rate == 1:
            return parts[mean]
        (near, near_tails), (far, far_tails) = parts[0.0], parts[mean]
        return (1 - self.rate) * near + self.rate * far, (1 - self.rate) * near_tails + self.rate * far_tails

    @property
    def largest_loss(self) -> float:
        """Upper limit of the losses. It is finite for adding an example, because the example may not be sampled."""
        bounded = self.direction is Direction.ADD and self.rate < 1
        return -math.log1p(-self.rate) if bounded else math.inf

    def reach(self, tail: float) -> tuple[float, float]:
        """Returns outputs below which P has a mass of less than 1e-20, and above which less than ``tail``."""
        return -9.5 * self.sigma, self._p_mean + self.sigma * math.sqrt(max(1.0, -2 * math.log(tail)))

    def _log_ratio(self, x: Floats) -> Floats:
        """Returns ``log(1 - q + q e^t)``, where ``t`` is the log ratio of N(1) over N(0)."""
        t = (2 * x - 1) / self.sigma / self.sigma / 2
        if self.rate == 1:
            return t
        low = np.minimum(t, _LARGE)
        with np.errstate(over="ignore"):
            near = np.log1p(self.rate * np.expm1(low))
            far = t + math.log(self.rate) + np.log1p((1 - self.rate) / self.rate * np.exp(-np.maximum(t, _LARGE)))
        return np.where(t <= _LARGE, near, far)

    def _output_of_ratio(self, y: Floats) -> Floats:
        """Returns the inverse of `_log_ratio`."""
        variance, q = self.sigma * self.sigma, self.rate
        if q == 1:
            return variance * y + 0.5
        with np.errstate(divide="ignore", invalid="ignore"):
            inside = np.expm1(np.minimum(y, _LARGE)) / q
            near = np.where(inside > -1, np.log1p(np.maximum(inside, -1)), -np.inf)
            far = y - math.log(q) + np.log1p(-(1 - q) * np.exp(-np.maximum(y, _LARGE)))
        return variance * np.where(y <= _LARGE, near, far) + 0.5

    def _output_of_difference(self, y: Floats) -> Floats:
        """Returns outputs of the pair M(1), M(-1): ``sigma^2 (y/2 + asinh((1-q)/q e^(1/(2 sigma^2)) sinh(y/2)))``."""
        variance = self.sigma * self.sigma
        if self.rate == 1:
            return variance * y / 2
        half = np.abs(y) / 2
        with np.errstate(divide="ignore"):
            log_sinh = half + np.log(-np.expm1(-2 * half)) - math.log(2)
        log_inside = log_sinh + math.log((1 - self.rate) / self.rate) + 1 / variance / 2
        near = np.arcsinh(np.exp(np.minimum(log_inside, _LARGE)))
        inner = np.where(log_inside <= _LARGE, near, log_inside + math.log(2))
        return np.sign(y) * variance * (half + inner)


def between(z: Floats) -> tuple[Floats, Floats]:
    """Returns the standard normal masses between adjacent points, and the larger of the two tails of each."""
    tail = _tail(np.abs(z))
    low, high = z[:-1], z[1:]
    inner, outer = tail[:-1], tail[1:]
    straddling = 1 - inner - outer
    mass = np.where(low >= 0, inner - outer, np.where(high <= 0, outer - inner, straddling))
    return mass, np.maximum(inner, outer)


def _tail(z: Floats) -> Floats:
    """Returns the standard normal mass beyond z, to a few units in the last place, even for large z."""
    # Error functions of numerical libraries lose digits for large z, irregularly from point to point. That matters for
    # narrow cells, whose masses are differences. The function of the C library does not.
    return np.asarray(_erfc(z / math.sqrt(2)), dtype=np.float64) / 2


class Pair(Protocol):
    """Interface of pairs, which are frozen. See `LossPair` for the methods."""

    def __hash__(self) -> int:
        """Returns the hash, because pairs are cache keys."""

    @property
    def sigma(self) -> float:
        """Scale of the outputs."""

    @property
    def largest_loss(self) -> float:
        """Upper limit of the losses."""

    def loss(self, x: Floats) -> Floats:
        """Returns the loss at outputs x, which increases with x."""

    def output(self, y: Floats) -> Floats:
        """Returns the outputs with losses y."""

    def masses(self, x: Floats) -> Masses:
        """Returns the masses between adjacent outputs."""

    def reach(self, tail: float) -> tuple[float, float]:
        """Returns the range of relevant outputs."""
