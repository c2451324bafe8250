"""Counts of a hundred million draws, in chunks, and tests of their distribution.

Kolmogorov and Smirnov's distance is looked at on the ends of fixed cells instead of at every draw, so that nothing is
sorted. It can only be smaller than the true one, so the p-value is never too small; and it is smaller by the mass of
one cell at most, which is a quarter of what 1e8 draws make of it by chance, or less.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import numpy as np
import torch
from scipy import stats
from torch import Tensor

HUNDRED_MILLION = 100_000_000
CHUNK = 2**22
REACH, CELLS_PER_UNIT = 10, 2**14  # of normals: no normal of 64-bit words is beyond 9.5
Draw = Callable[[int, int], Tensor]  # (number of the first draw, count) -> float64 normals


def chunks(total: int, size: int = CHUNK) -> Iterator[tuple[int, int]]:
    """First number and count of each chunk."""
    for start in range(0, total, size):
        yield start, min(size, total - start)


def counts_of_normals(draw: Draw, total: int) -> np.ndarray:
    """Returns the number of draws in each cell of equal width; those outside of ``REACH`` are lost."""
    cells = 2 * REACH * CELLS_PER_UNIT
    found = torch.zeros(cells, dtype=torch.float64)
    for start, count in chunks(total):
        found += torch.histc(draw(start, count), bins=cells, min=-REACH, max=REACH)
    return found.numpy()


def counts_of_words(words: Callable[[int, int], np.ndarray], total: int) -> np.ndarray:
    """``(4, 65536)``: how often each 16-bit part of 64-bit words had each value; the last one is the highest."""
    found = np.zeros((4, 2**16), dtype=np.int64)
    for start, count in chunks(total):
        parts = words(start, count).view(np.uint16).reshape(-1, 4)
        for place in range(4):
            found[place] += np.bincount(parts[:, place], minlength=2**16)
    return found


def distance_p(counts: np.ndarray, masses: np.ndarray) -> float:
    """The p-value of Kolmogorov and Smirnov for counts in ordered cells of these masses."""
    total = counts.sum()
    distance = np.abs(np.cumsum(counts) / total - np.cumsum(masses)).max()
    return float(stats.kstwobign.sf(distance * total**0.5))


def cells_p(counts: np.ndarray, masses: np.ndarray, cells: int | None = None) -> float:
    """The p-value of chi-square, on both sides: counts that are too even are no chance either.

    Args:
        counts: In ordered cells.
        masses: Of the cells, adding up to 1.
        cells: Into about how many of equal mass they are joined; at the least so that each expects 100.
    """
    total = counts.sum()
    least = max(100.0, 0 if cells is None else total / cells)
    whole = np.floor(np.cumsum(masses * total) / least)
    # Where the rounded sum steps up, a joined cell ends.
    group = np.concatenate([[0], np.cumsum(np.diff(whole) > 0)])
    group = np.minimum(group, max(0, group[-1] - 1))  # the last one may be short
    observed, expected = np.bincount(group, counts), np.bincount(group, masses * total)
    statistic = np.square(observed - expected) @ (1 / expected)
    law = stats.chi2(len(expected) - 1)
    return float(2 * min(law.sf(statistic), law.cdf(statistic)))


def masses_of_normals() -> np.ndarray:
    """The masses of the cells of ``counts_of_normals``."""
    ends = np.arange(-REACH * CELLS_PER_UNIT, REACH * CELLS_PER_UNIT + 1) / CELLS_PER_UNIT
    below = np.diff(stats.norm.cdf(ends[: len(ends) // 2 + 1]))
    return np.concatenate([below, below[::-1]])


def p_values_of_normals(draw: Draw, total: int = HUNDRED_MILLION) -> dict[str, float]:
    """Returns p-values by name."""
    counts, masses = counts_of_normals(draw, total), masses_of_normals()
    return {
        "lost": float(counts.sum() == total),  # 0 if any draw is beyond the cells
        "Kolmogorov-Smirnov": distance_p(counts, masses),
        "chi-square, 100 cells": cells_p(counts, masses, 100),
        "chi-square, 10000 cells": cells_p(counts, masses, 10_000),
        "chi-square, all cells": cells_p(counts, masses),
    }


def p_values_of_words(words: Callable[[int, int], np.ndarray], total: int = HUNDRED_MILLION) -> dict[str, float]:
    """Returns p-values by name, for each 16-bit part, each of its bytes and each of its bits."""
    counts = counts_of_words(words, total)
    found = {}
    for place, part in enumerate(counts):
        low, high = part.reshape(256, 256).sum(axis=0), part.reshape(256, 256).sum(axis=1)
        bits = np.array([part[(np.arange(2**16) >> bit) & 1 == 1].sum() for bit in range(16)])
        z = (bits - total / 2) / (total / 4) ** 0.5
        found |= {
            f"Kolmogorov-Smirnov of part {place}": distance_p(part, np.full(2**16, 2.0**-16)),
            f"chi-square of part {place}": cells_p(part, np.full(2**16, 2.0**-16)),
            f"chi-square of byte {2 * place}": cells_p(low, np.full(256, 1 / 256)),
            f"chi-square of byte {2 * place + 1}": cells_p(high, np.full(256, 1 / 256)),
            f"chi-square of the bits of part {place}": float(stats.chi2.sf(z @ z, 16)),
        }
    return found


@dataclass
class Correlation:
    """Sums of products of pairs, and of their squares less one: both have variance 1 for a pair, and mean 0."""

    pairs: int = 0
    sums: np.ndarray = field(default_factory=lambda: np.zeros(2))

    def add(self, one: Tensor, other: Tensor) -> None:
        """Adds pairs of standard normals."""
        self.pairs += one.numel()
        squares = torch.dot(one.square(), other.square()) - one.square().sum() - other.square().sum() + one.numel()
        self.sums += [float(torch.dot(one, other)), float(squares) / 2]

    def p_values(self) -> list[float]:
        """Returns p-values of values and of squares: sums of so many products are normal."""
        return [float(2 * stats.norm.sf(abs(total) / self.pairs**0.5)) for total in self.sums]
