"""Merges similar releases of a long history, with little effect on a bound on epsilon.

A release costs at most as much as one with a larger sampling rate and less noise, and at least as much as one with a
smaller rate and more noise. Distinct releases are therefore split into cells of the plane of rate and noise, and all
releases of a cell are replaced by its most or least expensive corner. The costs of releases are estimated by the Renyi
divergence at one order. The estimates affect the accuracy of the bound, never its soundness.
"""

from __future__ import annotations

import heapq
import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Integers = npt.NDArray[np.int64]

_ORDERS = (2, 3, 4, 5, 6, 8, 11, 16, 22, 32)
_LOG_DELTA = math.log(1e-6)  # log of a typical delta
_MIN_NOISE, _MAX_NOISE = 1e-3, 1e100  # limits within which squares and their inverses are normal floats
_CUTS = 32  # number of candidate cuts of a large cell, for each of two criteria
_HALVINGS = 40


@dataclass(frozen=True)
class ReleaseKinds:
    """Distinct sampled Gaussians, in any order.

    Attributes:
        rates: Sampling rates, between 0 and 1 ``(K,)``.
        noise: Noise multipliers, positive ``(K,)``.
        counts: Number of releases of each kind, ``(K,)``.
    """

    rates: Floats
    noise: Floats
    counts: Floats

    def corner(self, cell: Integers, *, above: bool) -> tuple[float, float]:
        """Returns rate and noise of a release that costs at least (or at most) as much as each in the cell."""
        rates, noise = self.rates[cell], self.noise[cell]
        return (float(rates.max()), float(noise.min())) if above else (float(rates.min()), float(noise.max()))


def split_into_cells(kinds: ReleaseKinds, max_cells: int, *, above: bool) -> list[Integers]:
    """Splits kinds into cells, always at the best cut, and returns the indices of the kinds in each cell.

    With ``above`` a cell is replaced by its most expensive corner, otherwise by its cheapest.
    """
    cutter = _Cutter(kinds, above)
    heap = [(-0.0, 0, cutter.cut(np.arange(len(kinds.rates))))]  # (negative gain, number that breaks ties, cut)
    for number in range(1, 2 * max_cells - 1, 2):
        for i, part in enumerate(heapq.heappop(heap)[2].parts):
            cut = cutter.cut(part)
            heapq.heappush(heap, (-cut.gain, number + i, cut))
    return [cut.cell for _, _, cut in heap]


def mean_release(kinds: ReleaseKinds, cell: Integers) -> tuple[float, float]:
    """Returns rate and noise of a release with about the mean cost of a cell: an estimate, not a bound."""
    if len(cell) == 1:
        return kinds.corner(cell, above=True)
    expensive, cheap = (np.log(kinds.corner(cell, above=above)) for above in (True, False))
    order, counts = _order(kinds), kinds.counts[cell]
    mean_cost = float(counts @ _cost(kinds.rates[cell], kinds.noise[cell], order) / counts.sum())
    low, high = 0.0, 1.0  # position between the cheapest and the most expensive corner
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        rate, noise = np.exp(cheap + middle * (expensive - cheap))
        too_much = _cost(np.array([rate]), np.array([noise]), order)[0] > mean_cost
        low, high = (low, middle) if too_much else (middle, high)
    return float(rate), float(noise)


@dataclass(frozen=True)
class _Cut:
    """A cell, its two parts if it has several kinds, and the decrease of the error by cutting."""

    cell: Integers
    parts: tuple[Integers, ...]
    gain: float


class _Cutter:
    """Cuts cells such that the error of replacing them by corners decreases most."""

    def __init__(self, kinds: ReleaseKinds, above: bool):
        self._counts, self._order = kinds.counts, _order(kinds)
        self._costs = kinds.counts * _cost(kinds.rates, kinds.noise, self._order)
        self._sign = 1.0 if above else -1.0
        self._axes = (self._sign * kinds.rates, -self._sign * kinds.noise)  # larger values are closer to the corner

    def cut(self, cell: Integers) -> _Cut:
        """Returns the best cut of a cell along one axis."""
        if len(cell) == 1:
            return _Cut(cell, (), -math.inf)
        counts = self._counts[cell].sum()
        uncut = counts * self._corner_costs(*(axis[cell].max(keepdims=True) for axis in self._axes))[0]
        best = _Cut(cell, (), -math.inf)
        for axis in self._axes:
            ordered = cell[np.argsort(axis[cell], kind="stable")]
            cuts = self._candidate_cuts(ordered)
            first = np.cumsum(self._counts[ordered])[cuts - 1]
            below = [np.maximum.accumulate(values[ordered])[cuts - 1] for values in self._axes]
            beyond = [np.maximum.accumulate(values[ordered][::-1])[::-1][cuts] for values in self._axes]
            both = first * self._corner_costs(*below) + (counts - first) * self._corner_costs(*beyond)
            gains = self._sign * (uncut - both)
            index = int(np.argmax(gains))
            if gains[index] > best.gain:
                best = _Cut(cell, (ordered[: cuts[index]], ordered[cuts[index] :]), float(gains[index]))
        return best

    def _candidate_cuts(self, ordered: Integers) -> Integers:
        """Returns the positions of candidate cuts: all, or those at equal fractions of the kinds and of the cost."""
        last = len(ordered) - 1
        if last <= 2 * _CUTS:
            return np.arange(1, last + 1)
        shares = np.cumsum(self._costs[ordered])
        by_cost = np.searchsorted(shares, np.linspace(0, shares[-1], _CUTS))
        by_kinds = np.linspace(1, last, _CUTS, dtype=np.int64)
        return np.unique(np.concatenate([by_cost, by_cost + 1, by_kinds]).clip(1, last))

    def _corner_costs(self, rates: Floats, noise: Floats) -> Floats:
        return _cost(self._sign * rates, -self._sign * noise, self._order)


def _order(kinds: ReleaseKinds) -> int:
    """Returns the order with the smallest bound on epsilon."""
    best, best_order = math.inf, _ORDERS[0]
    for order in _ORDERS:
        epsilon = (float(kinds.counts @ _cost(kinds.rates, kinds.noise, order)) - _LOG_DELTA) / (order - 1)
        if epsilon > best:
            break
        best, best_order = epsilon, order
    return best_order


def _cost(rates: Floats, noise: Floats, order: int) -> Floats:
    """Returns ``log E[(dP/dQ)^order]`` of releases (Mironov, Talwar, Zhang 2019, arXiv:1908.10530)."""
    noise = np.clip(noise, _MIN_NOISE, _MAX_NOISE)
    total = np.full(len(rates), -np.inf)
    with np.errstate(all="ignore"):
        for j in range(2, order + 1):
            exponent = (j * j - j) / 2 / noise / noise
            weight = math.log(math.comb(order, j)) + (order - j) * np.log1p(-rates) + j * np.log(rates)
            total = np.logaddexp(total, weight + exponent + np.log(-np.expm1(-exponent)))
        return np.asarray(np.logaddexp(0.0, total))
