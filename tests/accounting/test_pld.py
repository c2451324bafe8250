"""Oracles: published values, quadrature of the two densities, and a lower bound by an exponentially tilted FFT."""

import math

import numpy as np
import pytest
from scipy import integrate, special

from dpengine.accounting import Charge, GaussianEvent, PoissonGaussianEvent, Relation, delta_of, epsilon, pld
from dpengine.accounting.composition import Composition, SampledGaussian, compose
from dpengine.accounting.gdp import epsilon_of_mu
from dpengine.errors import AccountingRefusedError

ADD_REMOVE = Relation.ADD_OR_REMOVE_ONE


def poisson(rate, sigma, steps):
    return (Charge(PoissonGaussianEvent(rate, sigma), steps),)


def extrapolated(rate, sigma, steps, delta, spacing=8e-5):
    """The error of the lower bound is linear in the spacing; what is left of it here was about 1e-6 on finer ones."""
    coarse, fine = (lower_bound(rate, sigma, steps, delta, h) for h in (spacing, spacing / 2))
    return 2 * fine - coarse


def lower_bound(rate, sigma, steps, delta, spacing):
    """A lower bound on epsilon: of the remove direction alone, each cell's mass moved to its lower end.

    The step's law is tilted by e^(t loss) so that the composed sum sits near epsilon, where FFT rounding is relative.
    """

    def loss(x):
        return np.logaddexp(np.log1p(-rate), np.log(rate) + (2 * x - 1) / (2 * sigma**2))

    bins = np.arange(math.floor(loss(-9 * sigma) / spacing), math.ceil(loss(1 + 9 * sigma) / spacing) + 1)
    with np.errstate(invalid="ignore", divide="ignore"):
        edges = sigma**2 * np.log1p(np.expm1(bins * spacing) / rate) + 0.5
    edges = np.where(np.isnan(edges), -np.inf, edges)

    def mass(z):
        z = z / sigma
        upper = special.ndtr(-z[:-1]) - special.ndtr(-z[1:])
        return np.where(z[:-1] > 0, upper, special.ndtr(z[1:]) - special.ndtr(z[:-1]))

    masses = (1 - rate) * mass(edges) + rate * mass(edges - 1)
    bins, masses = bins[:-1][masses > 0], masses[masses > 0]
    values = bins * spacing

    def log_moment(t):
        return special.logsumexp(np.log(masses) + t * values)

    tilts = np.exp(np.linspace(-4, 7, 40))
    tilt = min(tilts, key=lambda t: (steps * log_moment(t) - math.log(delta)) / t)
    weights = np.exp(np.log(masses) + tilt * values - log_moment(tilt))
    mean = np.sum(weights * bins)
    deviation = math.sqrt(steps * np.sum(weights * (bins - mean) ** 2))
    size = 1 << int(24 * deviation + 2 * len(bins) + 64).bit_length()
    composed = np.fft.irfft(np.fft.rfft(np.bincount(bins % size, weights, size)) ** steps, size)
    index = round(steps * mean) - size // 2 + np.arange(size)
    sums, law = index * spacing, np.maximum(composed[index % size], 0)

    def log_delta(eps):
        above = sums[sums > eps] - eps
        terms = law[sums > eps] * np.exp(-tilt * above) * -np.expm1(-above)
        return steps * log_moment(tilt) - tilt * eps + math.log(max(np.sum(terms), 1e-300))

    low, high = 0.0, max(float(sums[-1]), 0.0)
    for _ in range(80):
        middle = (low + high) / 2
        low, high = (middle, high) if log_delta(middle) > math.log(delta) else (low, middle)
    return low


def hockey_stick(rate, sigma, eps, *, remove, distance=1.0):
    """E[(1 - e^(eps - loss))_+] of one release, by quadrature of the densities."""
    points = np.linspace(-15 * sigma - 1, 15 * sigma + 1, 2_000_001)

    def normal(mean):
        return np.exp(-((points - mean) ** 2) / (2 * sigma**2)) / (sigma * math.sqrt(2 * math.pi))

    p, q = (1 - rate) * normal(0) + rate * normal(1), normal(0)
    if distance == 2:
        q = (1 - rate) * normal(0) + rate * normal(-1)
    p, q = (p, q) if remove else (q, p)
    return integrate.trapezoid(np.maximum(p - math.exp(eps) * q, 0), points)


@pytest.mark.parametrize(
    ("rate", "sigma", "steps", "delta", "truth", "digits"),
    [
        (256 / 60000, 1.1, 14040, 1e-5, 2.3795545, 5e-8),
        (0.001, 0.7, 10_000, 1e-6, 1.636916, 5e-7),
        (0.001, 50.0, 1000, 1e-5, 0.001114, 5e-7),
        (0.5, 1.0, 3000, 1e-5, 553.5702, 5e-5),
    ],
)
def test_published_points_are_met_from_above(rate, sigma, steps, delta, truth, digits):
    answer = epsilon(poisson(rate, sigma, steps), delta)
    assert truth - digits <= answer <= truth * (1 + 5e-5) + digits


def test_a_published_point_without_sampling_takes_the_closed_form():
    assert epsilon((Charge(GaussianEvent(600.0), 100_000),), 1e-10) == pytest.approx(3.278323, abs=5e-7)


@pytest.mark.parametrize(
    ("rate", "sigma", "steps", "delta"),
    [
        (1024 / 32561, 2.738, 480, 1e-5),
        (2048 / 60000, 2.15, 600, 1e-8),
        (0.1, 11.86561, 1000, 1e-5),
        (0.01, 1.2, 100, 1e-6),
        (0.3, 5.0, 50, 1e-9),
        (0.9, 3.0, 10, 1e-4),
    ],
)
def test_never_below_the_truth_and_close_above_it(rate, sigma, steps, delta):
    truth = extrapolated(rate, sigma, steps, delta)
    assert truth <= epsilon(poisson(rate, sigma, steps), delta) <= truth + 5e-5


@pytest.mark.parametrize(("rate", "sigma"), [(0.01, 1.0), (0.5, 2.0), (0.1, 0.5), (0.9, 5.0)])
@pytest.mark.parametrize("eps", [0.0, 0.1, 1.0])
def test_one_step_is_the_quadrature_of_the_dominating_pair(rate, sigma, eps):
    truth = max(hockey_stick(rate, sigma, eps, remove=remove) for remove in (True, False))
    answer = delta_of(poisson(rate, sigma, 1), eps)
    assert truth - 1e-11 <= answer <= truth * (1 + 1e-3) + 1e-9


@pytest.mark.parametrize(("rate", "sigma"), [(0.01, 1.0), (0.5, 2.0)])
def test_one_step_under_replace_one_is_its_own_pair(rate, sigma):
    for eps in (0.0, 0.3):
        truth = hockey_stick(rate, sigma, eps, remove=True, distance=2)
        answer = delta_of(poisson(rate, sigma, 1), eps, relation=Relation.REPLACE_ONE)
        assert truth - 1e-11 <= answer <= truth * (1 + 1e-2) + 1e-9


def test_f_a4_replace_one_costs_more_and_zero_out_the_same():
    history = poisson(0.01, 1.0, 1000)
    base = epsilon(history, 1e-5)
    assert epsilon(history, 1e-5, relation=Relation.ZERO_OUT) == base
    assert epsilon(history, 1e-5, relation=Relation.REPLACE_ONE) == pytest.approx(1.56 * base, rel=0.01)


@pytest.mark.parametrize(("sigma", "steps", "delta"), [(10.0, 100, 1e-5), (2.0, 3, 1e-9), (600.0, 100_000, 2e-6)])
def test_the_grid_reproduces_the_closed_form_as_the_rate_tends_to_one(sigma, steps, delta):
    composition = compose(poisson(1 - 2.0**-40, sigma, steps))
    spacing = pld.interval(composition, delta, ADD_REMOVE)
    truth = epsilon_of_mu(math.sqrt(steps) / sigma, delta)
    answer = pld.epsilon_on_grid(composition, delta, ADD_REMOVE, spacing)
    assert truth * (1 - 1e-9) <= answer <= truth * (1 + 1e-4)


def test_f_a1_a_delta_within_reach_of_rounding_is_refused():
    history = poisson(1e-4, 1.0, 10**6)
    with pytest.raises(AccountingRefusedError, match="accountant='rdp'"):
        epsilon(history, 1e-7)
    assert epsilon(history, 1e-7, "rdp") == pytest.approx(0.916, abs=1e-3)
    assert pld.smallest_delta(compose(history)) == pytest.approx(1e3 * 10**6 * 2.0**-53)


def test_sampled_and_unsampled_releases_compose():
    together = (
        Charge(PoissonGaussianEvent(0.05, 2.0), 100),
        Charge(GaussianEvent(30.0), 10),
        Charge(GaussianEvent(7.0)),
    )
    parts = epsilon(together[:1], 1e-6), epsilon(together[1:], 1e-6)
    assert max(parts) * 1.01 < epsilon(together, 1e-6) < epsilon(together, 1e-6, "rdp")
    # Releases over all rows bound sampled ones from above.
    all_rows = (Charge(GaussianEvent(2.0), 100), *together[1:])
    assert epsilon(together, 1e-6) < epsilon(all_rows, 1e-6)


@pytest.mark.parametrize("groups", [2, 3, 5, 6])
def test_every_group_of_a_schedule_is_composed(groups):
    schedule = tuple(Charge(PoissonGaussianEvent(0.02, 1.5 + i * 1e-6), 60 // groups) for i in range(groups))
    assert epsilon(schedule, 1e-5) == pytest.approx(epsilon(poisson(0.02, 1.5, 60), 1e-5), rel=1e-4)


def test_a_grid_that_is_too_coarse_never_costs_more_than_rdp(monkeypatch):
    history = poisson(0.02, 1.5, 100)
    tight, bound = epsilon(history, 1e-5), epsilon(history, 1e-5, "rdp")
    monkeypatch.setattr(pld, "interval", lambda *_: 1.0)
    assert tight < epsilon(history, 1e-5) == bound


def test_many_distinct_releases_are_merged_to_the_private_side():
    sigmas = [2.0 + i / 100 for i in range(90)]
    groups = tuple(SampledGaussian(0.01 + i * 1e-5, sigma, 2) for i, sigma in enumerate(sigmas))
    merged = pld._limited(groups)
    assert len(merged) <= pld._MAX_DISTINCT
    assert sum(group.count for group in merged) == 180
    for group in groups:
        assert any(m.sample_rate >= group.sample_rate and m.noise_multiplier <= group.noise_multiplier for m in merged)
    composition = Composition(0.0, groups, False)
    answer = pld.epsilon(composition, 1e-5, ADD_REMOVE)
    least = pld.epsilon(Composition(0.0, (SampledGaussian(0.01, sigmas[-1], 180),), False), 1e-5, ADD_REMOVE)
    most = pld.epsilon(Composition(0.0, (SampledGaussian(0.0109, sigmas[0], 180),), False), 1e-5, ADD_REMOVE)
    assert least < answer < most


def test_rounding_never_leaves_the_private_side():
    rng = np.random.default_rng(0)
    for value in np.exp(rng.uniform(-20, 20, 200)):
        group = SampledGaussian(min(value, 0.99), value, 1)
        many = tuple(
            SampledGaussian(group.sample_rate, value * (1 + i * 1e-9), 1) for i in range(pld._MAX_DISTINCT + 1)
        )
        for merged in pld._limited(many):
            assert merged.sample_rate >= group.sample_rate
            assert merged.noise_multiplier <= many[-1].noise_multiplier


def test_epsilon_grows_with_steps_and_falls_with_noise_and_delta():
    steps = [epsilon(poisson(0.02, 1.5, n), 1e-5) for n in (1, 2, 10, 100, 101, 1000)]
    noise = [epsilon(poisson(0.02, sigma, 100), 1e-5) for sigma in (0.5, 0.9, 1.5, 3.0, 20.0)]
    rates = [epsilon(poisson(rate, 1.5, 100), 1e-5) for rate in (1e-4, 0.01, 0.02, 0.5, 1.0)]
    deltas = [epsilon(poisson(0.02, 1.5, 100), delta) for delta in (1e-9, 1e-7, 1e-5, 1e-2)]
    assert steps == sorted(steps)
    assert rates == sorted(rates)
    assert noise == sorted(noise, reverse=True)
    assert deltas == sorted(deltas, reverse=True)


@pytest.mark.parametrize("sigma", [1e-200, 1e-3, 0.05, 1e5])
@pytest.mark.parametrize("relation", [ADD_REMOVE, Relation.REPLACE_ONE])
def test_extreme_noise_gives_a_bound_and_no_crash(sigma, relation):
    answer = epsilon(poisson(0.2, sigma, 10), 1e-5, relation=relation)
    assert answer >= 0
    assert (answer > 1) == (sigma < 1)
