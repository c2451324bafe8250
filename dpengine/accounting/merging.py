"""Merging of similar releases of a long history, with little effect on a bound of epsilon.

A release costs at most as much as one with a larger rate and less noise, and at least as much as one with a smaller
rate and more noise. A history of many kinds is therefore split into cells, each of which is replaced by its most or
least expensive corner. The cost of a release is only estimated here, by its Renyi divergence at an order that suits the
history: the choice of cells affects accuracy, never soundness.
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
_LOG_DELTA = math.log(1e-6)  # of a typical delta
_MIN_NOISE, _MAX_NOISE = 1e-3, 1e100  # limits within which squares and their inverses are normal floats
_CUTS = 32  # candidate cuts of a large cell, for each of two criteria
_HALVINGS = 40


@dataclass(frozen=True)
class Kinds:
    """Distinct sampled Gaussians, in any order.

    Attributes:
        rates: Between 0 and 1, ``(K,)``.
        noise: Positive, ``(K,)``.
        counts: Number of releases of each kind, ``(K,)``.
    """

    rates: Floats
    noise: Floats
    counts: Floats

    def corner(self, cell: Integers, *, above: bool) -> tuple[float, float]:
        """Returns rate and noise of a release that costs at least, or at most, as much as each of a cell."""
        rates, noise = self.rates[cell], self.noise[cell]
        return (float(rates.max()), float(noise.min())) if above else (float(rates.min()), float(noise.max()))


def cells(kinds: Kinds, most: int, *, above: bool) -> list[Integers]:
    """Splits kinds into cells, always at the best cut, and returns the indices of the kinds in each cell.

    With ``above`` a cell is replaced by its most expensive corner, otherwise by its cheapest.
    """
    cutter = _Cutter(kinds, above)
    found = [(-0.0, 0, cutter.cut(np.arange(len(kinds.rates))))]  # a heap; the number breaks ties
    for number in range(1, 2 * most - 1, 2):
        for i, part in enumerate(heapq.heappop(found)[2].parts):
            cut = cutter.cut(part)
            heapq.heappush(found, (-cut.gain, number + i, cut))
    return [cut.cell for _, _, cut in found]


def typical(kinds: Kinds, cell: Integers) -> tuple[float, float]:
    """Returns rate and noise of a release with about the mean cost of a cell: an estimate, not a bound."""
    if len(cell) == 1:
        return kinds.corner(cell, above=True)
    expensive, cheap = (np.log(kinds.corner(cell, above=above)) for above in (True, False))
    order, counts = _order(kinds), kinds.counts[cell]
    aim = float(counts @ _cost(kinds.rates[cell], kinds.noise[cell], order) / counts.sum())
    low, high = 0.0, 1.0  # position between the cheapest and the most expensive corner
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        rate, noise = np.exp(cheap + middle * (expensive - cheap))
        too_much = _cost(np.array([rate]), np.array([noise]), order)[0] > aim
        low, high = (low, middle) if too_much else (middle, high)
    return float(rate), float(noise)


@dataclass(frozen=True)
class _Cut:
    """A cell, its parts if it has several kinds, and the decrease of the error by cutting."""

    cell: Integers
    parts: tuple[Integers, ...]
    gain: float


class _Cutter:
    """Cuts cells, with the error of replacing them."""

    def __init__(self, kinds: Kinds, above: bool):
        self._counts, self._order = kinds.counts, _order(kinds)
        self._costs = kinds.counts * _cost(kinds.rates, kinds.noise, self._order)
        sign = 1.0 if above else -1.0
        self._sign, self._axes = (
            sign,
            (sign * kinds.rates, -sign * kinds.noise),
        )  # larger is closer to the corner

    def cut(self, cell: Integers) -> _Cut:
        """Returns the best straight cut of a cell."""
        if len(cell) == 1:
            return _Cut(cell, (), -math.inf)
        counts = self._counts[cell].sum()
        whole = counts * self._corner_costs(*(axis[cell].max(keepdims=True) for axis in self._axes))[0]
        best = _Cut(cell, (), -math.inf)
        for axis in self._axes:
            ordered = cell[np.argsort(axis[cell], kind="stable")]
            places = self._places(ordered)
            first = np.cumsum(self._counts[ordered])[places - 1]
            below = [np.maximum.accumulate(one[ordered])[places - 1] for one in self._axes]
            beyond = [np.maximum.accumulate(one[ordered][::-1])[::-1][places] for one in self._axes]
            both = first * self._corner_costs(*below) + (counts - first) * self._corner_costs(*beyond)
            gains = self._sign * (whole - both)
            at = int(np.argmax(gains))
            if gains[at] > best.gain:
                best = _Cut(cell, (ordered[: places[at]], ordered[places[at] :]), float(gains[at]))
        return best

    def _places(self, ordered: Integers) -> Integers:
        """Returns candidate cuts: all, or those at equal fractions of the members and of the cost."""
        last = len(ordered) - 1
        if last <= 2 * _CUTS:
            return np.arange(1, last + 1)
        shares = np.cumsum(self._costs[ordered])
        at = np.searchsorted(shares, np.linspace(0, shares[-1], _CUTS))
        return np.unique(np.concatenate([at, at + 1, np.linspace(1, last, _CUTS, dtype=np.int64)]).clip(1, last))

    def _corner_costs(self, rates: Floats, noise: Floats) -> Floats:
        return _cost(self._sign * rates, -self._sign * noise, self._order)


def _order(kinds: Kinds) -> int:
    """Returns the order of the best bound on epsilon."""
    best, found = math.inf, _ORDERS[0]
    for order in _ORDERS:
        epsilon = (float(kinds.counts @ _cost(kinds.rates, kinds.noise, order)) - _LOG_DELTA) / (order - 1)
        if epsilon > best:
            break
        best, found = epsilon, order
    return found


def _cost(rates: Floats, noise: Floats, order: int) -> Floats:
    """Log of the moment ``E[(dP/dQ)^order]`` of releases (Mironov, Talwar, Zhang 2019, 1908.10530)."""
    noise = np.clip(noise, _MIN_NOISE, _MAX_NOISE)
    total = np.full(len(rates), -np.inf)
    with np.errstate(all="ignore"):
        for j in range(2, order + 1):
            exponent = (j * j - j) / 2 / noise / noise
            weight = math.log(math.comb(order, j)) + (order - j) * np.log1p(-rates) + j * np.log(rates)
            total = np.logaddexp(total, weight + exponent + np.log(-np.expm1(-exponent)))
        return np.asarray(np.logaddexp(0.0, total))
