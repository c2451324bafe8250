"""The losses of all releases at a few outputs each, side by side: to choose tilts and windows on, and no bound."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from .loss_grid import Mixture, sketch
from .loss_pairs import Floats

_AT_ONCE = 2**17  # numbers, so that they stay near the processor


@dataclass(frozen=True)
class Sketches:
    """Sketches of the pairs of all releases. Pairs are counted by R, points of a sketch by S, kinds of releases by K.

    Attributes:
        losses: ``(R, S)``, each row rising.
        log_masses: Of P ``(R, S)``; minus infinity where a sketch has ended.
        log_weights: Of each pair in its mixture ``(R,)``.
        starts: The first pair of each kind ``(K,)``.
        counts: Of each kind ``(K,)``.
    """

    losses: Floats
    log_masses: Floats
    log_weights: Floats
    starts: npt.NDArray[np.intp]
    counts: Floats

    def log_moments(self, tilts: Floats) -> Floats:
        """``log E[e^(tilt * sum of losses)]`` for each tilt."""
        of_pairs = self._of_pairs(tilts) + self.log_weights
        return np.asarray(np.logaddexp.reduceat(of_pairs, self.starts, axis=1) @ self.counts)

    def moments(self, tilt: float) -> tuple[float, float]:
        """Mean and variance of the tilted sum of losses."""
        masses, counts = self._tilted(tilt)
        means = (masses * self.losses).sum(axis=1)
        pairs = np.diff(np.append(self.starts, len(means)))
        of_kinds = np.repeat(np.add.reduceat(means * counts, self.starts) / self.counts, pairs)
        squares = (masses * (self.losses - of_kinds[:, None]) ** 2).sum(axis=1)
        return float(means @ counts), float(squares @ counts)

    def squares(self) -> float:
        """The sum of the mean squares of all losses."""
        masses, counts = self._tilted(0.0)
        return float((masses * self.losses**2).sum(axis=1) @ counts)

    def lifted(self, tilts: tuple[float, ...], share: float) -> Sketches:
        """The same where of each pair losses below are lifted to one, which have at most that share under each tilt."""
        below = np.cumsum(np.exp(self.log_masses), axis=1)
        low = np.ones(self.losses.shape, dtype=bool)
        for tilt in tilts:
            log_moments = self._of_pairs(np.array([tilt]))[0]
            low &= np.log(below) + tilt * self.losses - log_moments[:, None] <= math.log(share)
        first = np.maximum(np.argmin(low, axis=1) - 1, 0)[:, None]
        place = np.arange(self.losses.shape[1])
        kept = np.where(place < first, -np.inf, self.log_masses)
        return replace(self, log_masses=np.where(place == first, np.log(below), kept))

    def _tilted(self, tilt: float) -> tuple[Floats, Floats]:
        """Masses of each pair under the tilt, of sum 1, and how many releases are of that pair then."""
        exponents = self.log_masses + tilt * self.losses
        top = exponents.max(axis=1, keepdims=True)
        masses = np.exp(exponents - top)
        sums = masses.sum(axis=1, keepdims=True)
        logs = (top + np.log(sums))[:, 0] + self.log_weights
        pairs = np.diff(np.append(self.starts, len(logs)))
        of_kinds = np.logaddexp.reduceat(logs, self.starts)
        return masses / sums, np.exp(logs - np.repeat(of_kinds, pairs)) * np.repeat(self.counts, pairs)

    def _of_pairs(self, tilts: Floats) -> Floats:
        """The log moments of one release of each pair, ``(T, R)``."""
        many, found = max(1, _AT_ONCE // self.losses.size), []
        for start in range(0, len(tilts), many):
            exponents = self.log_masses + tilts[start : start + many, None, None] * self.losses
            top = exponents.max(axis=2)
            exponents -= top[:, :, None]
            found.append(top + np.log(np.exp(exponents, out=exponents).sum(axis=2)))
        return np.concatenate(found)


def sketches(mixtures: Sequence[Mixture], counts: Sequence[int], tail: float, points: int) -> Sketches:
    """Looks at releases from afar.

    Args:
        mixtures: The pairs of each kind of release.
        counts: How many there are of each.
        tail: Mass above the highest output that counts.
        points: Outputs, of each pair.

    Returns:
        The sketches.
    """
    rows = [[(weight, pair) for weight, pair in mixture if weight > 0] for mixture in mixtures]
    seen = [sketch(pair, tail, points) for row in rows for _, pair in row]
    widest = max(len(one.losses) for one in seen)
    return Sketches(
        np.array([np.pad(one.losses, (0, widest - len(one.losses)), "edge") for one in seen]),
        np.array([np.pad(one.log_masses, (0, widest - len(one.losses)), constant_values=-np.inf) for one in seen]),
        np.array([math.log(weight) for row in rows for weight, _ in row]),
        np.cumsum([0, *(len(row) for row in rows[:-1])]),
        np.array(counts, dtype=np.float64),
    )
