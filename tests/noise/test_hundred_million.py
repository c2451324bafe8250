"""A hundred million draws of each source: distribution, and independence of steps, parameters and ranks.

Each p-value below 1e-6 fails. The seeds are fixed, so a run that passes will pass again. The distance of
Kolmogorov and Smirnov is taken at the ends of fixed cells, so that nothing is sorted: it can only be smaller than the
true one, by the mass of one cell at most, so the p-value is never too small.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import numpy as np
import pytest
import torch
from scipy import stats
from torch import Tensor

from dpengine.noise import NoiseSource
from dpengine.noise.discrete import add_discrete_normal_
from dpengine.noise.keyed_streams import STREAM_KINDS

HUNDRED_MILLION = 100_000_000
CHUNK = 2**22
REACH, CELLS_PER_UNIT = 10, 2**14  # of normals: no normal of 64-bit words is beyond 9.5
Draw = Callable[[int, int], Tensor]  # (number of the first draw, count) -> float64 normals


def chunks(total: int, size: int = CHUNK) -> Iterator[tuple[int, int]]:
    """Yields the start and size of each chunk."""
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
    """Returns the p-value of the Kolmogorov-Smirnov test for counts in ordered cells of these masses."""
    total = counts.sum()
    distance = np.abs(np.cumsum(counts) / total - np.cumsum(masses)).max()
    return float(stats.kstwobign.sf(distance * total**0.5))


def cells_p(counts: np.ndarray, masses: np.ndarray, cells: int | None = None) -> float:
    """Returns the two-sided p-value of the chi-square test, which also detects counts that are too even.

    Args:
        counts: In ordered cells.
        masses: Of the cells, adding up to 1.
        cells: Approximate number of merged cells of equal mass. Each merged cell expects at least 100 draws.
    """
    total = counts.sum()
    least = max(100.0, 0 if cells is None else total / cells)
    whole = np.floor(np.cumsum(masses * total) / least)
    # A merged cell ends where the rounded sum increases.
    group = np.concatenate([[0], np.cumsum(np.diff(whole) > 0)])
    group = np.minimum(group, max(0, group[-1] - 1))  # the last one may be short
    observed, expected = np.bincount(group, counts), np.bincount(group, masses * total)
    statistic = np.square(observed - expected) @ (1 / expected)
    null = stats.chi2(len(expected) - 1)
    return float(2 * min(null.sf(statistic), null.cdf(statistic)))


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


LEAST = 1e-6
SIGMA = 4.0  # of the discrete normal
STEPS, PLACES = 25, 2**22  # 1.05e8 normals: of two parameters, of which each of two ranks draws a half
DEFAULT = "chacha20"
every_kind = pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=() if kind == DEFAULT else pytest.mark.nightly) for kind in STREAM_KINDS]
)


def normals_of(source, scale=1.0):
    def draw(start, count):
        drawn = source.normal_(torch.empty(count, dtype=torch.float64), domain="noise", step=5, start=start)
        return drawn.mul_(scale)

    return draw


def words_of(source):
    return lambda start, count: source.words(count, domain="mask", step=5, block=start // 8)


def assert_by_chance(found):
    assert min(found.values()) > LEAST, found


@pytest.mark.slow
@every_kind
def test_normals_have_the_stated_distribution(kind):
    assert_by_chance(p_values_of_normals(normals_of(NoiseSource.seeded(21, kind))))


@pytest.mark.slow
@every_kind
def test_words_are_uniform_in_every_part_byte_and_bit(kind):
    assert_by_chance(p_values_of_words(words_of(NoiseSource.seeded(22, kind))))


@pytest.mark.slow
def test_discrete_normals_have_the_stated_distribution():
    source, reach = NoiseSource.seeded(23), 100
    counts = np.zeros(2 * reach + 1)
    for step, (_, count) in enumerate(chunks(HUNDRED_MILLION)):
        drawn = add_discrete_normal_(torch.zeros(count, dtype=torch.int64), SIGMA, source=source, step=step)
        counts += np.bincount(drawn.numpy() + reach, minlength=2 * reach + 1)
    masses = np.exp(-np.square(np.arange(-reach, reach + 1)) / (2 * SIGMA**2))
    masses /= masses.sum()  # beyond 25 sigma there is no mass that counts
    found = {"Kolmogorov-Smirnov": distance_p(counts, masses), "chi-square": cells_p(counts, masses)}
    assert_by_chance(found)


def correlations(source_of, steps=STEPS, places=PLACES):
    """P-values by the names of what was compared. ``source_of(step)`` draws the noise of a step."""
    found = {name: Correlation() for name in ("steps", "steps but one", "parameters", "ranks")}
    before = []
    for step in range(steps):
        source, half = source_of(step), places // 4
        # As shards do: each rank draws its own places of each parameter by their numbers in the whole vector.
        slices = [
            source.normal_(torch.empty(half, dtype=torch.float64), domain="noise", step=step, start=k * half)
            for k in range(4)
        ]
        whole = torch.cat(slices)
        for lag, name in enumerate(("steps", "steps but one"), start=1):
            if step >= lag:
                found[name].add(whole, before[-lag])
        before = [*before[-1:], whole]
        found["parameters"].add(whole[: 2 * half], whole[2 * half :])
        for first in (0, 2):
            found["ranks"].add(slices[first], slices[first + 1])
    return {
        f"{name}, {what}": p
        for name, one in found.items()
        for what, p in zip(("values", "squares"), one.p_values(), strict=True)
    }


@pytest.mark.slow
@every_kind
def test_steps_parameters_and_ranks_are_uncorrelated(kind):
    source = NoiseSource.seeded(24, kind)
    assert_by_chance(correlations(lambda step: source))


# Faults that these tests must detect


@pytest.mark.slow
def test_a_standard_deviation_that_is_too_large_by_a_thousandth_is_detected():
    found = p_values_of_normals(normals_of(NoiseSource.seeded(25), scale=1.001))
    assert found["chi-square, 100 cells"] < LEAST


class Repeating:
    """A source that ignores the step."""

    def __init__(self):
        self.source = NoiseSource.seeded(26)

    def normal_(self, out, *, domain, step, start):
        return self.source.normal_(out, domain=domain, step=0, start=start)


class SamePlaces(Repeating):
    """A source that starts the same stream on each rank."""

    def normal_(self, out, *, domain, step, start):
        return self.source.normal_(out, domain=domain, step=step, start=0)


class Flipping(Repeating):
    """A source whose next step repeats the absolute values of the noise with other signs."""

    def normal_(self, out, *, domain, step, start):
        signs = self.source.words(out.numel(), domain="signs", step=step, block=start // 8) & np.uint64(1)
        drawn = self.source.normal_(out, domain=domain, step=0, start=start).abs_()
        return drawn.mul_(torch.from_numpy(1.0 - 2.0 * signs))


@pytest.mark.parametrize(
    "source, name",
    [(Repeating(), "steps, values"), (SamePlaces(), "ranks, values"), (Flipping(), "steps, squares")],
    ids=["steps", "ranks", "sizes"],
)
def test_a_repeated_stream_is_detected(source, name):
    found = correlations(lambda step: source, steps=3, places=2**14)
    assert found[name] < LEAST
    right = NoiseSource.seeded(26)
    assert min(correlations(lambda step: right, steps=3, places=2**14).values()) > LEAST


def test_normals_of_another_distribution_are_detected():
    """Finds normals of the same mean and variance in steps of 1/64: the cells between are empty."""
    source = NoiseSource.seeded(27)
    rounded = lambda start, count: (normals_of(source)(start, count) * 64).round() / 64  # noqa: E731
    assert p_values_of_normals(rounded, 10**6)["Kolmogorov-Smirnov"] < LEAST
    assert_by_chance(p_values_of_normals(normals_of(source), 10**6))


def test_a_draw_outside_the_histogram_is_detected():
    assert counts_of_normals(lambda start, count: torch.full((count,), 11.0), 10).sum() == 0
    assert (
        p_values_of_normals(lambda start, count: torch.full((count,), 11.0).index_fill(0, torch.tensor([0]), 1.0), 10)[
            "lost"
        ]
        == 0
    )


def test_words_with_one_biased_bit_are_detected():
    source = NoiseSource.seeded(28)

    def leaning(start, count):
        words = words_of(source)(start, count)
        rarely = source.words(count, domain="other", step=5, block=start // 8) < np.uint64(2**64 // 50)
        return np.where(rarely, words | np.uint64(1 << 37), words)

    found = p_values_of_words(leaning, 10**6)
    assert found["chi-square of the bits of part 2"] < LEAST and found["chi-square of byte 4"] < LEAST
    assert found["chi-square of part 0"] > LEAST
    assert_by_chance(p_values_of_words(words_of(source), 10**6))
    assert CHUNK % 8 == 0  # otherwise two chunks would share a block
