"""Discrete normals: their law by chi-square against the formula, addresses, and what is refused."""

import math

import numpy as np
import pytest
import torch
from scipy import stats

from dpengine.errors import InvalidBudgetError
from dpengine.noise import NoiseSource
from dpengine.noise.discrete import add_discrete_normal_


def drawn(size, sigma, step=0, seed=0, **settings):
    sums = torch.zeros(size, dtype=torch.int64)
    return add_discrete_normal_(sums, sigma, source=NoiseSource.seeded(seed), step=step, **settings).numpy()


@pytest.mark.parametrize("sigma", [0.3, 1.0, 2.7, 40.0])
@pytest.mark.hazard("N9")
def test_the_law_is_that_of_the_formula(sigma):
    """200,000 draws: chi-square at 1e-4, places of less than 10 expected draws together."""
    found = drawn(200_000, sigma, seed=1)
    reach = math.ceil(6 * sigma)
    places = np.arange(-reach, reach + 1)
    law = np.exp(-np.square(places) / (2 * sigma**2))
    law /= np.exp(-np.square(np.arange(-60 * reach - 60, 60 * reach + 61)) / (2 * sigma**2)).sum()
    counts = np.array([(found == place).sum() for place in places])
    often = law * len(found) >= 10
    observed = np.append(counts[often], len(found) - counts[often].sum())
    expected = np.append(law[often], 1 - law[often].sum()) * len(found)
    if expected[-1] < 10:
        observed, expected = observed[:-1], expected[:-1] * (observed[:-1].sum() / expected[:-1].sum())
    assert stats.chisquare(observed, expected).pvalue > 1e-4


def variance_of(sigma):
    """Returns the variance of the law, below ``sigma ** 2``."""
    reach = np.arange(1, math.ceil(40 * sigma) + 2, dtype=np.float64)
    weights = np.exp(-np.square(reach) / (2 * sigma * sigma))
    return float(2 * (weights @ np.square(reach)) / (1 + 2 * weights.sum()))


@pytest.mark.parametrize("sigma", [0.3, 3.0, 1e6])
def test_mean_and_variance(sigma):
    """100,000 draws, within 5 of their standard deviations."""
    found = drawn(100_000, sigma, seed=2).astype(np.float64)
    variance = variance_of(sigma) if sigma < 1e4 else sigma**2
    assert abs(found.mean()) < 5 * math.sqrt(variance / 1e5)
    assert abs(found.var() - variance) < 5 * math.sqrt((3 * sigma**4 + variance) / 1e5)


def test_draws_follow_from_their_address():
    assert np.array_equal(drawn(1000, 5.0), drawn(1000, 5.0))
    for other in ({"step": 1}, {"seed": 1}, {"domain": "other"}, {"start": 1000}):
        assert not np.array_equal(drawn(1000, 5.0), drawn(1000, 5.0, **other))


def test_noise_is_added_in_place_and_none_is_none():
    sums = torch.arange(6).view(2, 3)
    assert add_discrete_normal_(sums, 0.0, source=NoiseSource.seeded(0), step=0) is sums
    assert torch.equal(sums, torch.arange(6).view(2, 3))
    add_discrete_normal_(sums, 50.0, source=NoiseSource.seeded(0), step=0)
    assert np.array_equal(sums.flatten().numpy() - np.arange(6), drawn(6, 50.0))
    assert add_discrete_normal_(torch.zeros(0, dtype=torch.int64), 1.0, source=NoiseSource.seeded(0), step=0).shape == (
        0,
    )


@pytest.mark.parametrize("sigma", [-1.0, math.nan, math.inf, 2.0**49])
def test_noise_out_of_range_is_refused(sigma):
    with pytest.raises(InvalidBudgetError, match="sigma must be"):
        drawn(3, sigma)


def test_real_sums_are_refused():
    with pytest.raises(TypeError, match="int64"):
        add_discrete_normal_(torch.zeros(3), 1.0, source=NoiseSource.seeded(0), step=0)
