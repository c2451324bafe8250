"""Gaussian and discrete Gaussian mechanisms: their distribution, addresses, and arguments that raise."""

import math

import numpy as np
import pytest
import torch
from scipy import stats

from dpengine.errors import InvalidBudgetError, PrivacyError
from dpengine.noise import GaussianNoise, NoiseSource
from dpengine.noise.discrete import add_discrete_normal_


def test_noise_has_the_requested_standard_deviation_and_zero_mean():
    """Tolerance: 5 standard deviations. Those of a million draws are 0.0014 (ratio of variances) and 0.001 (mean)."""
    sums = torch.full((1_000_000,), 7.0)
    GaussianNoise(NoiseSource.seeded(1)).add(sums, std=2.5, step=0)
    noise = (sums.double() - 7.0) / 2.5
    assert abs(noise.var().item() - 1) < 5 * 0.0014 and abs(noise.mean().item()) < 5 * 0.001


def test_every_step_gets_different_noise():
    noise, source = [], NoiseSource.seeded(1)
    mechanism = GaussianNoise(source)
    for step in range(3):
        noise.append(torch.zeros(10_000))
        mechanism.add(noise[-1], std=1.0, step=step)
    assert len(torch.unique(torch.cat(noise))) > 29_900  # float32: a few coincide by chance


def test_noise_of_slices_equals_slices_of_the_noise():
    whole, parts = torch.zeros(1000), [torch.zeros(300), torch.zeros(700)]
    GaussianNoise(NoiseSource.seeded(1)).add(whole, std=1.5, step=4)
    mechanism = GaussianNoise(NoiseSource.seeded(1))
    mechanism.add(parts[0], std=1.5, step=4)
    mechanism.add(parts[1], std=1.5, step=4, start=300)
    assert torch.cat(parts).equal(whole)


def test_two_domains_of_one_source_are_two_mechanisms():
    source, one, other = NoiseSource.seeded(1), torch.zeros(100), torch.zeros(100)
    GaussianNoise(source).add(one, std=1.0, step=0)
    GaussianNoise(source, domain="momentum").add(other, std=1.0, step=0)
    assert not torch.isin(one, other).any()


@pytest.mark.parametrize(("step", "start"), [(5, 0), (5, 99), (4, 0), (4, 10_000), (0, 0)])
@pytest.mark.hazard("N2", "N3")
def test_an_address_that_was_used_is_rejected_and_the_sums_are_untouched(step, start):
    """A second vector at the same address, or an earlier step."""
    mechanism, sums = GaussianNoise(NoiseSource.seeded(1)), torch.zeros(100)
    mechanism.add(torch.zeros(100), std=1.0, step=5)
    with pytest.raises(PrivacyError, match="cancels"):
        mechanism.add(sums, std=1.0, step=step, start=start)
    assert sums.equal(torch.zeros(100))


def test_an_address_whose_draw_failed_counts_as_used():
    source = NoiseSource.seeded(1)
    mechanism = GaussianNoise(source)
    with pytest.raises(ValueError, match="contiguous"):
        mechanism.add(torch.zeros(2, 2), std=1.0, step=5)
    with pytest.raises(PrivacyError, match="cancels"):
        mechanism.add(torch.zeros(4), std=1.0, step=5)


def test_a_restored_mechanism_rejects_addresses_that_were_used():
    mechanism, other = GaussianNoise(NoiseSource.seeded(1)), GaussianNoise(NoiseSource.seeded(1))
    mechanism.add(torch.zeros(10), std=1.0, step=5)
    other.load_state_dict(mechanism.state_dict())
    with pytest.raises(PrivacyError, match="cancels"):
        other.add(torch.zeros(10), std=1.0, step=5)
    other.add(torch.zeros(10), std=1.0, step=6)


def test_a_standard_deviation_of_zero_adds_nothing():
    mechanism, sums = GaussianNoise(NoiseSource.seeded(1)), torch.linspace(-1, 1, 100)
    mechanism.add(sums, std=0.0, step=0)
    assert sums.equal(torch.linspace(-1, 1, 100))
    mechanism.add(sums, std=1.0, step=0)  # and no address is used up


@pytest.mark.parametrize("std", [-1.0, math.nan, math.inf])
@pytest.mark.hazard("B1")
def test_a_standard_deviation_out_of_range_is_rejected(std):
    sums = torch.zeros(3)
    with pytest.raises(InvalidBudgetError, match="std must be finite and nonnegative"):
        GaussianNoise(NoiseSource.seeded(1)).add(sums, std=std, step=0)
    assert sums.equal(torch.zeros(3))


@pytest.mark.parametrize("std", [0.0, 1.0])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.hazard("N12")
def test_sums_narrower_than_float32_are_rejected(dtype, std):
    """Bfloat16 sums absorb noise."""
    with pytest.raises(TypeError, match="absorbs noise"):
        GaussianNoise(NoiseSource.seeded(1)).add(torch.zeros(3, dtype=dtype), std=std, step=0)


BAD_SIGMAS = [-1.0, math.nan, math.inf, 2.0**49]


def drawn(size, sigma, step=0, seed=0, **settings):
    sums = torch.zeros(size, dtype=torch.int64)
    return add_discrete_normal_(sums, sigma, source=NoiseSource.seeded(seed), step=step, **settings).numpy()


@pytest.mark.parametrize("sigma", [0.3, 1.0, 2.7, 40.0])
@pytest.mark.hazard("N9")
def test_the_distribution_is_that_of_the_formula(sigma):
    """200,000 draws: chi-square test at 1e-4, with values of less than 10 expected draws merged."""
    found = drawn(200_000, sigma, seed=1)
    reach = math.ceil(6 * sigma)
    places = np.arange(-reach, reach + 1)
    probabilities = np.exp(-np.square(places) / (2 * sigma**2))
    probabilities /= np.exp(-np.square(np.arange(-60 * reach - 60, 60 * reach + 61)) / (2 * sigma**2)).sum()
    counts = np.array([(found == place).sum() for place in places])
    is_frequent = probabilities * len(found) >= 10
    observed = np.append(counts[is_frequent], len(found) - counts[is_frequent].sum())
    expected = np.append(probabilities[is_frequent], 1 - probabilities[is_frequent].sum()) * len(found)
    if expected[-1] < 10:
        observed, expected = observed[:-1], expected[:-1] * (observed[:-1].sum() / expected[:-1].sum())
    assert stats.chisquare(observed, expected).pvalue > 1e-4


def variance_of(sigma):
    """Returns the variance of the discrete Gaussian, which is below ``sigma ** 2``."""
    reach = np.arange(1, math.ceil(40 * sigma) + 2, dtype=np.float64)
    weights = np.exp(-np.square(reach) / (2 * sigma * sigma))
    return float(2 * (weights @ np.square(reach)) / (1 + 2 * weights.sum()))


@pytest.mark.parametrize("sigma", [0.3, 3.0, 1e6])
def test_mean_and_variance(sigma):
    """100,000 draws; both are within 5 standard deviations."""
    found = drawn(100_000, sigma, seed=2).astype(np.float64)
    variance = variance_of(sigma) if sigma < 1e4 else sigma**2
    assert abs(found.mean()) < 5 * math.sqrt(variance / 1e5)
    assert abs(found.var() - variance) < 5 * math.sqrt((3 * sigma**4 + variance) / 1e5)


def test_draws_follow_from_their_address():
    assert np.array_equal(drawn(1000, 5.0), drawn(1000, 5.0))
    for other in ({"step": 1}, {"seed": 1}, {"domain": "other"}, {"start": 1000}):
        assert not np.array_equal(drawn(1000, 5.0), drawn(1000, 5.0, **other))


def test_noise_is_added_in_place_and_zero_sigma_adds_nothing():
    sums = torch.arange(6).view(2, 3)
    assert add_discrete_normal_(sums, 0.0, source=NoiseSource.seeded(0), step=0) is sums
    assert torch.equal(sums, torch.arange(6).view(2, 3))
    add_discrete_normal_(sums, 50.0, source=NoiseSource.seeded(0), step=0)
    assert np.array_equal(sums.flatten().numpy() - np.arange(6), drawn(6, 50.0))
    assert drawn(0, 1.0).shape == (0,)


@pytest.mark.parametrize(
    ("sums", "sigma", "error", "message"),
    [
        *((torch.zeros(3, dtype=torch.int64), bad, InvalidBudgetError, "sigma must be") for bad in BAD_SIGMAS),
        (torch.zeros(3), 1.0, TypeError, "int64"),
    ],
)
def test_discrete_noise_raises_for_sigma_out_of_range_and_for_real_sums(sums, sigma, error, message):
    with pytest.raises(error, match=message):
        add_discrete_normal_(sums, sigma, source=NoiseSource.seeded(0), step=0)
