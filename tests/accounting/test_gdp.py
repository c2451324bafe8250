"""Gaussian DP, against the closed form in 60-digit arithmetic."""

import math

import mpmath
import pytest

from dpengine.accounting import (
    Charge,
    GaussianEvent,
    NonPrivateEvent,
    PoissonGaussianEvent,
    Relation,
    central_limit_mu,
    delta_of,
    epsilon_of,
    mu_gdp,
)
from dpengine.accounting.gdp import delta_of_mu, epsilon_of_mu, largest_mu
from dpengine.errors import AccountingRefusedError

POINTS = [  # noise multiplier, steps, delta
    (1.0, 1, 1e-5),
    (0.3, 1, 1e-3),
    (2.0, 100, 1e-5),
    (600.0, 100_000, 1e-10),
    (600.0, 100_000, 1e-100),
    (1.0, 100_000, 1e-5),
    (50.0, 1000, 1e-100),
    (1e5, 10, 1e-9),
    (0.01, 1, 1e-12),
]


def exact_log_delta(mu, eps):
    with mpmath.workdps(60):
        mu, eps = mpmath.mpf(mu), mpmath.mpf(eps)

        def cdf(x):
            return mpmath.erfc(-x / mpmath.sqrt(2)) / 2

        return float(mpmath.log(cdf(mu / 2 - eps / mu) - mpmath.exp(eps) * cdf(-mu / 2 - eps / mu)))


def exact_epsilon(mu, delta):
    low, high = 0.0, mu * mu / 2 + mu * math.sqrt(-2 * math.log(delta)) + 1
    while low < (middle := (low + high) / 2) < high:
        low, high = (middle, high) if exact_log_delta(mu, middle) > math.log(delta) else (low, middle)
    return high


@pytest.mark.parametrize(("sigma", "steps", "delta"), POINTS)
@pytest.mark.parametrize("accountant", ["gdp", "pld"])
@pytest.mark.hazard("A1")
def test_unsampled_gaussians_are_exact_down_to_tiny_delta(accountant, sigma, steps, delta):
    truth = exact_epsilon(math.sqrt(steps) / sigma, delta)
    answer = epsilon_of((Charge(GaussianEvent(sigma), steps),), delta, accountant)
    assert truth * (1 - 1e-14) <= answer <= truth * (1 + 1e-9)


@pytest.mark.parametrize(("sigma", "steps", "delta"), POINTS)
def test_delta_and_mu_invert_epsilon(sigma, steps, delta):
    mu = math.sqrt(steps) / sigma
    eps = epsilon_of_mu(mu, delta)
    assert exact_log_delta(mu, eps) <= math.log(delta)
    assert math.exp(exact_log_delta(mu, eps)) <= delta_of_mu(mu, eps) <= delta * (1 + 1e-6)
    assert largest_mu(eps, delta) == pytest.approx(mu, rel=1e-8)
    assert delta_of((Charge(GaussianEvent(sigma), steps),), eps, "gdp") == pytest.approx(delta, rel=1e-6)


def test_epsilon_is_zero_where_delta_covers_everything():
    assert epsilon_of_mu(0.1, 0.5) == 0.0
    assert epsilon_of_mu(0.0, 1e-9) == 0.0
    assert epsilon_of_mu(math.inf, 1e-9) == math.inf
    assert delta_of_mu(0.0, 1.0) == 0.0


def test_advantage_at_epsilon_zero_is_the_total_variation_distance():
    # TV of N(0,1) and N(mu,1) is erf(mu / sqrt 8).
    for mu in (1e-6, 0.1, 1.0, 5.0):
        assert delta_of_mu(mu, 0.0) == pytest.approx(math.erf(mu / math.sqrt(8)), rel=1e-9)


@pytest.mark.hazard("A4")
def test_replace_one_doubles_mu():
    history = (Charge(GaussianEvent(2.0), 3),)
    for accountant in ("gdp", "pld", "rdp"):
        doubled = epsilon_of((Charge(GaussianEvent(1.0), 3),), 1e-5, accountant)
        assert epsilon_of(history, 1e-5, accountant, Relation.REPLACE_ONE) == pytest.approx(doubled, rel=1e-12)
    assert mu_gdp(history, relation=Relation.REPLACE_ONE) == pytest.approx(math.sqrt(3))
    assert mu_gdp(history, relation=Relation.ZERO_OUT) == pytest.approx(math.sqrt(3) / 2)


@pytest.mark.hazard("A2")
def test_the_gdp_accountant_rejects_sampled_releases():
    with pytest.raises(AccountingRefusedError, match="accountant='pld'"):
        epsilon_of((Charge(PoissonGaussianEvent(0.1, 1.0), 3),), 1e-5, "gdp")


def test_a_sample_rate_of_one_equals_no_sampling():
    assert epsilon_of((Charge(PoissonGaussianEvent(1.0, 1.0), 3),), 1e-5, "gdp") == epsilon_of(
        (Charge(GaussianEvent(1.0), 3),), 1e-5, "gdp"
    )


def test_mu_is_infinite_without_noise():
    assert mu_gdp((Charge(NonPrivateEvent()),)) == math.inf


@pytest.mark.parametrize("mu", [1e-300, 1e-160, 1e-19, 1e-14])
def test_a_tiny_mu_gives_a_tiny_delta(mu):
    for eps in (0.0, 1.0):
        assert delta_of_mu(mu, eps) <= mu
    assert delta_of_mu(mu, 0.0) >= 0.398 * mu
    assert epsilon_of_mu(mu, 1e-5) == 0


@pytest.mark.parametrize("delta", [1e-2, 1e-5, 1e-100])
def test_very_large_epsilons_have_a_mu(delta):
    found = [largest_mu(eps, delta) for eps in (9.9e9, 1.01e10, 1e12, 1e50, 1e200, 1e300, 1.7e308)]
    assert found[-1] < math.inf
    assert found == sorted(found)
    assert found[1] == pytest.approx(found[0], rel=0.02)
    for eps, mu in zip((1.01e10, 1e12), found[1:3], strict=True):
        assert epsilon_of_mu(mu, delta) <= eps * (1 + 1e-12)
        assert mu == pytest.approx(math.sqrt(2 * eps), rel=1e-3)


@pytest.mark.parametrize("fixed_size", [False, True])
def test_the_limit_is_the_mu_of_the_papers_integral(fixed_size):
    # Bu et al. 2020: mu^2 / (q^2 T) is the variance of the likelihood ratio for Poisson batches.
    sigma, rate, steps = 0.9, 0.01, 400
    found = central_limit_mu(noise_multiplier=sigma, sample_rate=rate, steps=steps, fixed_size=fixed_size)
    phi = mpmath.ncdf
    square = mpmath.expm1(sigma**-2)
    if fixed_size:
        square = 2 * (mpmath.exp(sigma**-2) * phi(1.5 / sigma) + 3 * phi(-0.5 / sigma) - 2)
    assert found == pytest.approx(float(rate * mpmath.sqrt(steps * square)), rel=1e-12)


def test_the_central_limit_is_not_a_bound_and_is_right_at_its_ends():
    run = {"noise_multiplier": 0.5, "sample_rate": 0.01, "steps": 1000}
    approximate_epsilon = epsilon_of_mu(central_limit_mu(**run), 1e-5)
    assert approximate_epsilon < epsilon_of([Charge(PoissonGaussianEvent(0.01, 0.5), 1000)], 1e-5)
    assert central_limit_mu(**(run | {"noise_multiplier": 0.0})) == math.inf
    assert central_limit_mu(**(run | {"steps": 0})) == 0.0
    assert central_limit_mu(**(run | {"noise_multiplier": 1e9}), fixed_size=True) >= 0
