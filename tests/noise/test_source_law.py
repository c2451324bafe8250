"""The draws are standard normal and independent over elements, steps, domains and nonces.

Every tolerance is five standard errors of the statistic, so a correct source fails one of these tests in a million.
"""

import numpy as np
import pytest
import torch
from scipy import stats

from dpengine.noise import NoiseSource
from dpengine.noise.box_muller import GROUP, PAIRS
from dpengine.noise.keyed_streams import STREAM_KINDS

MILLION = 1_000_000
SIGMAS = 5
every_kind = pytest.mark.parametrize("kind", STREAM_KINDS)


def normals(source, size=MILLION, *, domain="noise", step=0, dtype=torch.float64):
    return source.normal_(torch.empty(size, dtype=dtype), domain=domain, step=step)


def correlation(one, other):
    """In standard errors: the mean product of n independent pairs has standard deviation 1/sqrt(n)."""
    return abs((one * other).mean().item()) * one.numel() ** 0.5


@pytest.mark.one_in(2, "kind", "dtype")
@every_kind
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_moments_are_those_of_the_standard_normal(kind, dtype):
    """10 million draws: the variance ratio has standard deviation sqrt(2/1e7) = 0.00045, below 0.002 at 4."""
    drawn = normals(NoiseSource.seeded(11, kind), 10 * MILLION, dtype=dtype).double()
    error = (10 * MILLION) ** -0.5
    assert abs(drawn.mean().item()) < SIGMAS * error
    assert abs(drawn.var().item() - 1) < 0.002
    assert abs((drawn**3).mean().item()) < SIGMAS * 15**0.5 * error  # E z^6 = 15
    assert abs((drawn**4).mean().item() - 3) < SIGMAS * 96**0.5 * error  # Var z^4 = 105 - 9


@pytest.mark.one_in(2, "kind", others="slow")
@every_kind
def test_the_distribution_is_normal(kind):
    """Kolmogorov and Smirnov, a million draws, p > 1e-6; both halves of the pairs apart."""
    drawn = normals(NoiseSource.seeded(12, kind), 2048 * GROUP).numpy()
    halves = drawn.reshape(-1, 2, PAIRS)
    for part in (drawn, halves[:, 0].ravel(), halves[:, 1].ravel()):
        assert stats.kstest(part, "norm").pvalue > 1e-6


@pytest.mark.slow
@every_kind
@pytest.mark.hazard("N8")
def test_the_tails_are_as_heavy_as_they_should_be(kind):
    """Counts beyond each level are Poisson; 10 million draws hold 5.7 beyond 5 on average."""
    drawn = normals(NoiseSource.seeded(13, kind), 10 * MILLION, dtype=torch.float32).abs()
    for level in (2.0, 3.0, 4.0, 5.0):
        expected = 10 * MILLION * 2 * stats.norm.sf(level)
        count = int((drawn > level).sum())
        assert min(stats.poisson.cdf(count, expected), stats.poisson.sf(count - 1, expected)) > 1e-6


@every_kind
@pytest.mark.hazard("N2")
def test_steps_are_uncorrelated(kind):
    """Lag one and two."""
    source = NoiseSource.seeded(14, kind)
    steps = [normals(source, step=step) for step in range(3)]
    assert correlation(steps[0], steps[1]) < SIGMAS and correlation(steps[1], steps[2]) < SIGMAS
    assert correlation(steps[0], steps[2]) < SIGMAS
    assert abs((steps[0] + steps[1]).var().item() / 2 - 1) < SIGMAS * (2 / MILLION) ** 0.5


@every_kind
def test_domains_incarnations_and_keys_are_uncorrelated(kind):
    base = normals(NoiseSource.seeded(15, kind))
    others = [
        normals(NoiseSource.seeded(15, kind), domain="clip"),
        normals(NoiseSource.seeded(15, kind, nonce=1)),
        normals(NoiseSource.seeded(16, kind)),
        normals(NoiseSource.fresh(kind)),
    ]
    assert max(correlation(base, other) for other in others) < SIGMAS


@every_kind
def test_elements_are_uncorrelated_with_their_neighbours_and_partners(kind):
    """Lags that a layout in chunks, halves, blocks or lanes could betray, for values and for their squares."""
    drawn = normals(NoiseSource.seeded(17, kind), 2 * MILLION)
    squares = (drawn**2 - 1) / 2**0.5
    for lag in (1, 2, 4, 8, 16, 64, PAIRS - 1, PAIRS, PAIRS + 1, GROUP, 32 * GROUP, 2**16):
        assert correlation(drawn[lag:], drawn[:-lag]) < SIGMAS
        assert correlation(squares[lag:], squares[:-lag]) < SIGMAS


def test_the_sum_over_a_vector_has_the_variance_of_its_length():
    """400 sums of 1000: a repeated or shared value would raise it. Standard deviation of the ratio 0.071."""
    source = NoiseSource.seeded(18)
    sums = np.array([normals(source, 1000, step=step).sum().item() for step in range(400)])
    assert abs(sums.var() / 1000 - 1) < SIGMAS * (2 / 400) ** 0.5
