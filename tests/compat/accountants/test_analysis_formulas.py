"""The formulas as functions, and manually composed privacy random variables."""

import inspect
import math

import numpy as np
import pytest
from scipy import integrate, stats

from dpengine.accounting import Charge, bounds_of, epsilon_bounds, release_event
from dpengine.compat.opacus.accountants.analysis import gdp, rdp
from dpengine.compat.opacus.accountants.analysis.prv import (
    DiscretePRV,
    Domain,
    PoissonSubsampledGaussianPRV,
    TruncatedPrivacyRandomVariable,
    compose_heterogeneous,
    compute_safe_domain_size,
    discretize,
)

DELTA = 1e-5


def test_divergences_have_the_shape_of_the_orders():
    single = rdp.compute_rdp(q=0.01, noise_multiplier=1.0, steps=10, orders=2.5)
    several = rdp.compute_rdp(q=0.01, noise_multiplier=1.0, steps=10, orders=[2.5, 4, 70])
    assert isinstance(single, float)
    assert several.shape == (3,)
    assert several[0] == single
    assert rdp.compute_rdp(q=1.0, noise_multiplier=2.0, steps=10, orders=4) == pytest.approx(10 * 4 / 8)


@pytest.mark.parametrize(("q", "sigma", "value"), [(0.0, 1.0, 0.0), (0.1, 0.0, math.inf)])
def test_divergences_at_extreme_rates_and_noise(q, sigma, value):
    assert rdp.compute_rdp(q=q, noise_multiplier=sigma, steps=5, orders=[2.0, 3.5]).tolist() == [value, value]


def test_epsilon_follows_from_divergences():
    orders = [1.5, 2, 3, 5, 9, 20]
    values = rdp.compute_rdp(q=0.02, noise_multiplier=1.5, steps=300, orders=orders)
    epsilon, best = rdp.get_privacy_spent(orders=orders, rdp=values, delta=DELTA)
    expected = [
        value + math.log1p(-1 / order) - math.log(DELTA * order) / (order - 1)
        for order, value in zip(orders, values, strict=True)
    ]
    assert epsilon == pytest.approx(min(expected))
    assert best == orders[int(np.argmin(expected))]


def test_a_best_order_at_the_end_of_the_range_warns():
    with pytest.warns(UserWarning, match="first one"):
        rdp.get_privacy_spent(orders=[20, 30], rdp=[100.0, 200.0], delta=DELTA)
    with pytest.warns(UserWarning, match="last one"):
        rdp.get_privacy_spent(orders=[2, 3], rdp=[1e-6, 1e-6], delta=DELTA)


def test_epsilon_of_divergences_is_never_negative_and_may_be_infinite():
    assert rdp.get_privacy_spent(orders=2.0, rdp=1e-9, delta=0.9) == (0.0, 2.0)
    epsilon, order = rdp.get_privacy_spent(orders=[2.0, 3.0], rdp=[math.inf, math.nan], delta=DELTA)
    assert epsilon == math.inf
    assert math.isnan(order)
    with pytest.raises(ValueError, match="2 orders"):
        rdp.get_privacy_spent(orders=[2.0, 3.0], rdp=[1.0], delta=DELTA)


@pytest.mark.parametrize("sigma", [0.4, 1.0, 3.0, 200.0])
def test_mu_equals_the_formula_of_the_paper(sigma):
    run = {"steps": 100, "noise_multiplier": sigma, "sample_rate": 0.01}
    assert gdp.compute_mu_poisson(**run) == pytest.approx(0.1 * math.sqrt(math.expm1(sigma**-2)))
    phi = stats.norm.cdf
    inside = math.exp(sigma**-2) * phi(1.5 / sigma) + 3 * phi(-0.5 / sigma) - 2
    assert gdp.compute_mu_uniform(**run) == pytest.approx(0.1 * math.sqrt(2 * inside), rel=1e-6)


@pytest.mark.parametrize("kind", ["poisson", "uniform"])
@pytest.mark.parametrize("sigma", [0.0, 0.01, 0.5, 1.0, 1e5])
def test_the_approximations_never_fail(kind, sigma):
    run = {"steps": 1000, "noise_multiplier": sigma, "sample_rate": 0.01}
    mu = getattr(gdp, f"compute_mu_{kind}")(**run)
    epsilon = getattr(gdp, f"compute_eps_{kind}")(**run, delta=DELTA)
    assert epsilon == gdp.eps_from_mu(mu=mu, delta=DELTA) >= 0
    if 0 < epsilon < math.inf:
        assert gdp.delta_eps_mu(eps=epsilon, mu=mu) == pytest.approx(DELTA, rel=1e-6)


def test_epsilon_and_delta_of_mu_are_inverse_functions():
    def delta(eps, mu):
        return stats.norm.cdf(-eps / mu + mu / 2) - math.exp(eps) * stats.norm.cdf(-eps / mu - mu / 2)

    assert delta(gdp.eps_from_mu(mu=1.3, delta=1e-6), 1.3) == pytest.approx(1e-6)
    assert gdp.delta_eps_mu(eps=2.0, mu=0.7) == pytest.approx(delta(2.0, 0.7))


@pytest.mark.parametrize(("rate", "sigma"), [(0.02, 1.0), (0.4, 0.7), (1.0, 2.0)])
def test_the_prv_distribution_matches_sampled_losses(rate, sigma):
    prv = PoissonSubsampledGaussianPRV(rate, sigma)
    x = np.random.default_rng(0).normal(size=400_000) * sigma
    x[: round(rate * len(x))] += 1  # under the mixture
    losses = np.log1p(rate * np.expm1((2 * x - 1) / 2 / sigma**2))
    points = np.quantile(losses, [0.05, 0.3, 0.5, 0.9, 0.999])
    assert prv.cdf(points) == pytest.approx([0.05, 0.3, 0.5, 0.9, 0.999], abs=5 * 0.5 / math.sqrt(len(x)))
    mass = integrate.quad(prv.pdf, points[1], points[3], limit=200)[0]
    assert mass == pytest.approx(float(prv.cdf(points[3]) - prv.cdf(points[1])), rel=1e-7)
    assert prv.rdp(4.5) == pytest.approx(
        float(rdp.compute_rdp(q=rate, noise_multiplier=sigma, steps=1, orders=4.5)), rel=1e-12
    )


def test_a_truncated_prv_is_a_normalized_distribution():
    prv = PoissonSubsampledGaussianPRV(0.3, 0.8)
    cut = TruncatedPrivacyRandomVariable(prv, -0.2, 1.0)
    assert cut.cdf([-0.3, -0.2, 1.0, 2.0]).tolist() == [0.0, 0.0, 1.0, 1.0]
    assert cut.pdf([-0.3, 1.5]).tolist() == [0.0, 0.0]
    points = np.linspace(-0.2, 1.0, 100_001)
    middle = (points[1:] + points[:-1]) / 2
    assert cut.mean() == pytest.approx(float(middle @ np.diff(cut.cdf(points))), abs=1e-7)


def test_a_domain_is_evenly_spaced():
    domain = Domain.create_aligned(-1.05, 2.0, 0.1)
    assert domain.size % 2 == 0
    assert domain.t_min == pytest.approx(-1.1)
    assert domain.t_max >= 2.0 - 1e-9
    assert domain.dt == pytest.approx(0.1)
    assert np.diff(domain.ts) == pytest.approx(np.full(domain.size - 1, 0.1))
    assert domain[3] == pytest.approx(domain.ts[3])
    moved = domain.shift_right(0.03)
    assert (moved.shifts, moved.size) == (0.03, domain.size)
    assert moved.ts == pytest.approx(domain.ts + 0.03)
    with pytest.raises(ValueError, match="even"):
        Domain(0.0, 1.0, 3)
    with pytest.raises(TypeError, match="int"):
        Domain(0.0, 1.0, 4.0)


RELEASES = [(1.5, 0.02, 300), (1.2, 0.05, 31), (0.9, 0.02, 100)]  # noise, rate, count


@pytest.fixture(scope="module")
def composed():
    """Composes as a script for Opacus does."""
    prvs = [PoissonSubsampledGaussianPRV(rate, sigma) for sigma, rate, _ in RELEASES]
    counts = [count for _, _, count in RELEASES]
    reach = compute_safe_domain_size(prvs, counts, 0.01, DELTA / 1000)
    domain = Domain.create_aligned(-reach, reach, 1e-3)
    dprvs = [discretize(TruncatedPrivacyRandomVariable(prv, domain.t_min, domain.t_max), domain) for prv in prvs]
    return compose_heterogeneous(dprvs=dprvs, num_self_compositions=counts)


@pytest.mark.slow
def test_manually_computed_losses_give_the_bounds_of_the_releases(composed):
    charges = [Charge(release_event(noise_multiplier=s, sample_rate=q), n) for s, q, n in RELEASES]
    lower, estimate, upper = composed.compute_epsilon(DELTA, DELTA / 1000, 0.01)
    true_lower, _, true_upper = bounds_of(charges, DELTA, "pld")
    assert lower <= true_upper
    assert true_lower <= upper <= 1.005 * true_upper
    assert lower <= estimate <= upper


def test_epsilon_from_the_composed_masses_is_nearly_equal(composed):
    _, estimate, _ = composed.compute_epsilon(DELTA, DELTA / 1000, 0.01)
    single = DiscretePRV(composed.pmf, composed.domain)
    assert len(single) == composed.domain.size
    assert composed.pmf.sum() == pytest.approx(1.0)
    low, middle, high = single.compute_epsilon(DELTA, DELTA / 1000, 0.01)
    assert low < middle < high
    assert middle == pytest.approx(estimate, rel=2e-3)
    assert high == pytest.approx(middle + 0.01, rel=1e-3)
    assert single.compute_delta_estimate(middle) == pytest.approx(DELTA, rel=1e-6)


def test_changed_masses_change_epsilon(composed):
    dprv = DiscretePRV(composed.pmf, composed.domain)
    changed = discretize(TruncatedPrivacyRandomVariable(PoissonSubsampledGaussianPRV(0.1, 1.0), -5, 5), dprv.domain)
    before = changed.compute_epsilon(DELTA, DELTA / 1000, 0.01)
    changed.pmf = composed.pmf
    assert changed.compute_epsilon(DELTA, DELTA / 1000, 0.01) != before


def test_epsilon_at_delta_zero_is_infinite(composed):
    assert composed.compute_epsilon(0.0, 0.0, 0.01) == (math.inf, math.inf, math.inf)


def test_composing_incompatible_prvs_raises(composed):
    other = DiscretePRV(np.full(4, 0.25), Domain(0.0, 3.0, 4))
    with pytest.raises(ValueError, match="same points"):
        compose_heterogeneous([composed, other], [1, 1])
    with pytest.raises(ValueError, match="counts"):
        compose_heterogeneous([composed], [1, 2])
    with pytest.raises(ValueError, match="masses"):
        len(DiscretePRV(np.ones(3), Domain(0.0, 3.0, 4)))


def test_tiny_noise_and_large_losses_are_discretized():
    prv = PoissonSubsampledGaussianPRV(0.5, 0.05)
    domain = Domain.create_aligned(-300, 300, 0.05)
    composed = compose_heterogeneous([discretize(TruncatedPrivacyRandomVariable(prv, -300, 300), domain)], [3])
    assert composed.compute_epsilon(DELTA, 0.0, 0.1)[2] > 600


def test_composed_losses_add_up():
    domain = Domain(-1.0, 4.0, 6)
    first, second = (DiscretePRV(np.eye(6)[place], domain) for place in (2, 3))  # losses 1 and 2
    found = compose_heterogeneous([first, second], [2, 1])
    assert found.domain.ts[int(np.argmax(found.pmf))] == pytest.approx(4.0)
    assert found.pmf.max() == pytest.approx(1.0)


@pytest.mark.parametrize(("sample_rate", "noise_multiplier", "steps"), [(0.01, 0.8, 1000), (0.05, 1.0, 200)])
def test_the_gdp_limit_can_be_below_epsilon_and_its_docstring_warns(sample_rate, noise_multiplier, steps):
    estimate = gdp.compute_eps_poisson(
        steps=steps, noise_multiplier=noise_multiplier, sample_rate=sample_rate, delta=1e-5
    )
    bounds = epsilon_bounds(noise_multiplier=noise_multiplier, sample_rate=sample_rate, steps=steps, delta=1e-5)
    assert estimate < bounds[0]
    for function in (gdp.compute_eps_poisson, gdp.compute_eps_uniform):
        assert "may be BELOW the true epsilon" in " ".join(inspect.getdoc(function).split())
