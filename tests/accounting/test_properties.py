"""Properties of epsilon at random valid settings: few draws by default, many more in the nightly run."""

import functools
import math
import warnings

import numpy as np
import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from scipy.optimize import brentq
from scipy.stats import norm

from dpengine.accounting import Charge, Relation, bounds_of, delta_of, epsilon, epsilon_of, release_event, steps_within
from dpengine.accounting.composition import MAX_DISTINCT, compose
from dpengine.accounting.tilted_pld.convolved import convolved
from dpengine.accounting.tilted_pld.loss_grid import Span, atoms_above, atoms_below, cell_ends
from dpengine.accounting.tilted_pld.loss_pairs import Direction, LossPair
from dpengine.accounting.tilted_pld.tilt import Part

from .truth import Contour

ADD_REMOVE = Relation.ADD_OR_REMOVE_ONE
LATTICE = 2e-4  # share of epsilon by which the excess of one lattice may be more than that of another


def power_of_ten(low, high):
    return st.floats(low, high).map(lambda exponent: 10.0**exponent)


RATES = power_of_ten(-7, 0) | st.just(1.0)
SIGMAS = power_of_ten(-1, 3)
STEPS = power_of_ten(0, 6).map(int) | st.integers(1, 5)
DELTAS = power_of_ten(-100, -2) | power_of_ten(-10, -2)
RELATIONS = st.sampled_from([ADD_REMOVE, Relation.REPLACE_ONE])
RUNS = st.tuples(RATES, SIGMAS, STEPS)

PROPERTIES = {}


def holds(examples, **drawn):
    """Checks a property at the given number of settings, and at 8 times as many in the nightly run."""

    def decorate(check):
        def run(times):
            quiet = settings(
                max_examples=times,
                deadline=None,
                derandomize=True,
                database=None,
                suppress_health_check=list(HealthCheck),
            )
            return quiet(given(**drawn)(check))

        PROPERTIES[check.__name__] = functools.partial(run, 8 * examples)
        return run(examples)

    return decorate


def history_of(*runs):
    return tuple(Charge(release_event(noise_multiplier=sigma, sample_rate=rate), n) for rate, sigma, n in runs)


def silent_bounds(history, delta, relation=ADD_REMOVE):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        lower, estimate, upper = bounds_of(history, delta, relation=relation)
    assert 0 <= lower <= estimate <= upper
    return lower, upper


# The whole range


@holds(3, runs=st.lists(RUNS, min_size=1, max_size=3), delta=DELTAS, relation=RELATIONS, share=st.floats(0, 2))
def test_every_legal_history_has_bounds_in_their_order(runs, delta, relation, share):
    history = history_of(*runs)
    _, upper = silent_bounds(history, delta, relation)
    assert epsilon_of(history, delta, relation=relation) == upper
    if math.isfinite(upper):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert 0 <= delta_of(history, share * upper, relation=relation) <= 1
            assert 0 <= delta_of(history, 0.0, relation=relation) <= 1


@pytest.mark.slow
@pytest.mark.parametrize("rate", [1e-3, 1 - 1e-4])
def test_schedules_of_many_kinds_have_bounds_in_their_order(rate):
    runs = [(rate * (1 - i * 1e-6), 5.0 + i / 100, 1 + i % 3) for i in range(MAX_DISTINCT + 4)]
    lower, upper = silent_bounds(history_of(*runs), 1e-6)
    assert 0.995 * upper < lower < upper < epsilon_of(history_of(*runs), 1e-6, "rdp")


@pytest.mark.one_in(6, "rate", "delta", others="slow")
@pytest.mark.one_in(3, "rate", "delta")
@pytest.mark.parametrize("delta", [1e-300, 1e-6, 0.999999])
@pytest.mark.parametrize(
    ("rate", "sigma", "steps"),
    [
        (5e-324, 1.0, 1),
        (1e-160, 0.5, 1000),
        (1e-160, 1e6, 10**12),
        (1 - 2.0**-53, 1e-3, 10**12),
        (1 - 2.0**-53, 1.0, 1),
        (0.1, 1e20, 1),
        (1.0, 1e160, 3),
    ],
)
def test_the_ends_of_the_range_are_accepted(rate, sigma, steps, delta):
    history = history_of((rate, sigma, steps))
    silent_bounds(history, delta)
    for eps in (0.0, 1e9):
        assert 0 <= delta_of(history, eps) <= 1


# Monotonicity


MORE = {
    "steps": lambda rate, sigma, steps, delta, by: (rate, sigma, math.ceil(steps * by), delta),
    "rate": lambda rate, sigma, steps, delta, by: (min(1.0, rate * by), sigma, steps, delta),
    "noise": lambda rate, sigma, steps, delta, by: (rate, sigma / by, steps, delta),
    "delta": lambda rate, sigma, steps, delta, by: (rate, sigma, steps, delta / by),
}


@holds(3, run=RUNS, delta=DELTAS, what=st.sampled_from(sorted(MORE)), by=st.floats(1.0001, 2), relation=RELATIONS)
def test_epsilon_increases_with_steps_rate_and_certainty_and_decreases_with_noise(run, delta, what, by, relation):
    *larger, smaller_delta = MORE[what](*run, delta, by)
    less, less_upper = silent_bounds(history_of(run), delta, relation)
    _, more_upper = silent_bounds(history_of(tuple(larger)), smaller_delta, relation)
    assert less <= more_upper
    if math.isfinite(less_upper):
        assert less_upper <= more_upper * (1 + LATTICE)


@holds(15, run=RUNS, delta=DELTAS, what=st.sampled_from(sorted(MORE)), by=st.floats(1.0001, 2))
def test_the_same_costs_more_by_rdp(run, delta, what, by):
    *larger, smaller_delta = MORE[what](*run, delta, by)
    less = epsilon_of(history_of(run), delta, "rdp")
    assert less <= epsilon_of(history_of(tuple(larger)), smaller_delta, "rdp") * (1 + 1e-12)


@holds(2, run=RUNS, eps=power_of_ten(-3, 1), by=st.floats(1.01, 3), relation=RELATIONS)
def test_delta_falls_with_epsilon(run, eps, by, relation):
    history = history_of(run)
    small = delta_of(history, eps, relation=relation)
    assert delta_of(history, by * eps, relation=relation) <= small * (1 + LATTICE)


@holds(2, runs=st.lists(RUNS, min_size=2, max_size=3), delta=DELTAS, data=st.data())
def test_epsilon_is_invariant_to_order_and_splits(runs, delta, data):
    pieces = []
    for rate, sigma, steps in runs:
        first = data.draw(st.integers(0, steps))
        pieces += [(rate, sigma, n) for n in (first, steps - first) if n]
    other = history_of(*data.draw(st.permutations(pieces)))
    assert compose(other) == compose(history_of(*runs))
    for accountant in ("pld", "rdp"):
        assert epsilon_of(other, delta, accountant) == epsilon_of(history_of(*runs), delta, accountant)


# Inverse queries


@holds(3, run=RUNS, delta=DELTAS, relation=RELATIONS)
def test_delta_at_the_epsilon_of_a_delta_is_that_delta(run, delta, relation):
    history = history_of(run)
    upper = epsilon_of(history, delta, relation=relation)
    assume(math.isfinite(upper))
    assert delta_of(history, upper * (1 + LATTICE), relation=relation) <= delta * (1 + 1e-2)


@holds(3, run=RUNS, eps=power_of_ten(-2, 1.5), relation=RELATIONS)
def test_epsilon_at_the_delta_of_an_epsilon_is_that_epsilon(run, eps, relation):
    history = history_of(run)
    delta = delta_of(history, eps, relation=relation)
    assume(1e-100 < delta < 1)
    assert epsilon_of(history, delta, relation=relation) <= eps * (1 + 10 * LATTICE)


TARGETS = {
    "target": power_of_ten(-1.3, 1.3),
    "delta": power_of_ten(-12, -3),
    "rate": power_of_ten(-4, 0) | st.just(1.0),
}


def check_steps(target, delta, rate, sigma, accountant):
    run = {"noise_multiplier": sigma, "sample_rate": rate, "accountant": accountant}
    steps = steps_within(target_epsilon=target, target_delta=delta, **run)
    assert epsilon(steps=steps, delta=delta, **run) <= target < epsilon(steps=steps + 1, delta=delta, **run)


@holds(2, **TARGETS, sigma=power_of_ten(-0.3, 1))
def test_steps_within_a_budget_fit_and_one_more_does_not(target, delta, rate, sigma):
    check_steps(target, delta, rate, sigma, "pld")


@holds(8, **TARGETS, sigma=power_of_ten(-0.3, 1))
def test_steps_within_a_budget_by_rdp_fit_and_one_more_does_not(target, delta, rate, sigma):
    check_steps(target, delta, rate, sigma, "rdp")


# The discrete pairs


class Exact:
    """Dominating pair by the normal distribution of scipy; losses are inverted by root finding."""

    def __init__(self, rate, sigma, direction):
        self.rate, self.sigma = rate, sigma
        self.p_mean, self.q_mean = {
            Direction.REMOVE: (1.0, 0.0),
            Direction.ADD: (0.0, -1.0),
            Direction.REPLACE: (1.0, -1.0),
        }[direction]

    def _mixed(self, of_normal, mean):
        near, far = of_normal(0.0), of_normal(mean)
        return near if mean == 0 else (1 - self.rate) * near + self.rate * far

    def _log_density(self, x, mean):
        near, far = norm.logpdf(x, 0, self.sigma), norm.logpdf(x, mean, self.sigma)
        with np.errstate(divide="ignore"):
            return near if mean == 0 else np.logaddexp(np.log1p(-self.rate) + near, np.log(self.rate) + far)

    def loss(self, x):
        return float(self._log_density(x, self.p_mean) - self._log_density(x, self.q_mean))

    def above(self, x):
        """Masses of P and Q above an output."""
        return tuple(
            self._mixed(lambda mean: norm.sf(x, mean, self.sigma), mean) for mean in (self.p_mean, self.q_mean)
        )

    def cut(self, eps):
        """The output whose loss is epsilon."""
        ends = -40 * self.sigma - 1, 40 * self.sigma + 1
        low, high = (self.loss(x) for x in ends)
        return (
            ends[0]
            if eps <= low
            else ends[1]
            if eps >= high
            else brentq(lambda x: self.loss(x) - eps, *ends, xtol=1e-14)
        )

    def delta(self, eps):
        """Delta of this pair at an epsilon, which may be below 0."""
        p, q = self.above(self.cut(eps))
        return max(p - math.exp(eps) * q, 0.0)


def hockey_stick(atoms, step, eps):
    losses = atoms.indices * step + atoms.shift
    return atoms.infinite + float(atoms.masses @ np.maximum(-np.expm1(eps - losses), 0))


PAIRS = {
    "rate": power_of_ten(-6, -0.01) | st.just(1.0),
    "sigma": power_of_ten(-0.5, 1.5),
    "direction": st.sampled_from(list(Direction)),
    "steps": st.integers(60, 2000),  # of the lattice, in the range of losses
}


def lattices(rate, sigma, direction, steps):
    """The pair, a lattice around its losses, and two sets of cells: every point, and those that accountants use."""
    pair = LossPair(rate, sigma, direction)
    low, high = (float(end) for end in pair.loss(np.array(pair.reach(1e-9))))
    step = (high - low) / steps
    every = np.arange(math.floor(low / step), math.ceil(high / step) + 1)
    span = Span(focus=2.0, tilt=1.0, tail=1e-9, share=1e-12)
    return pair, step, [lambda _: every, lambda one: cell_ends(one, span, step, above=True)]


@holds(15, **PAIRS)
def test_a_discrete_pair_holds_all_of_both_masses(rate, sigma, direction, steps):
    pair, step, kinds = lattices(rate, sigma, direction, steps)
    exact = Exact(rate, sigma, direction)
    for ends_of in kinds:
        atoms = atoms_above(((1.0, pair),), ends_of, step)
        assert math.fsum(atoms.masses) + atoms.infinite == pytest.approx(1, abs=1e-12)
        of_q = math.fsum(atoms.masses * np.exp(-atoms.indices * step))
        assert of_q <= 1 + 1e-12
        # Above the last cell it is not counted, and below the first one less of it than there is.
        ends = ends_of(pair)
        first, last = (float(x) for x in pair.output(ends[[0, -1]] * step))
        p_above, q_above = exact.above(first)
        missing = (1 - q_above) - (1 - p_above) * math.exp(-ends[0] * step) + exact.above(last)[1]
        assert of_q + missing == pytest.approx(1, abs=1e-10)


@pytest.mark.slow
@holds(5, **PAIRS)
def test_one_discrete_pair_dominates_and_another_is_dominated_at_every_epsilon(rate, sigma, direction, steps):
    pair, step, kinds = lattices(rate, sigma, direction, steps)
    exact = Exact(rate, sigma, direction)
    low, high = (float(end) for end in pair.loss(np.array(pair.reach(1e-9))))
    for ends_of in kinds:
        above, below = (make(((1.0, pair),), ends_of, step) for make in (atoms_above, atoms_below))
        for eps in [0.0, *np.linspace(low - step, high + step, 20)]:
            truth = exact.delta(eps)
            assert hockey_stick(above, step, eps) >= truth * (1 - 1e-9) - 1e-13
            assert hockey_stick(below, step, eps) <= truth * (1 + 1e-9) + 1e-13


@pytest.mark.slow
@holds(
    3,
    rate=power_of_ten(-3, -0.3),
    sigma=power_of_ten(-0.2, 1),
    count=st.integers(2, 6),
    direction=st.sampled_from(list(Direction)),
    times=st.floats(0.1, 3),
    reach=st.floats(1.5, 6),
)
def test_convolved_sums_bracket_the_truth(rate, sigma, count, direction, times, reach):
    """The window is short, so that much mass lies above it."""
    pair = LossPair(rate, sigma, direction)
    eps = times * rate / sigma * math.sqrt(count)
    above, below = (
        convolved((Part(((1.0, pair),), count),), -eps, reach * eps, 2**9, above=above).log_delta(eps)[0]
        for above in (True, False)
    )
    try:
        truth = Contour([(rate, sigma, count)], direction.value).log_delta(eps)
    except ArithmeticError:
        truth = below  # below the accuracy of the integral
    assert below - 1e-7 <= truth <= above + 1e-7


@pytest.mark.nightly
@pytest.mark.parametrize("name", PROPERTIES)
def test_properties_hold_at_many_settings(name):
    PROPERTIES[name]()()
