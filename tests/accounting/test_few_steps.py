"""Few releases whose losses are mostly tiny and rarely large, so that no tilt brings them to one size."""

import numpy as np
import pytest

from dpengine.accounting import Charge, PoissonGaussianEvent, Relation, bounds_of, delta_of, epsilon_of
from dpengine.accounting.composition import Composition, SampledGaussian
from dpengine.accounting.tilted_pld import lattice, pld
from dpengine.accounting.tilted_pld.loss_pairs import Direction

from .convolution import convolved
from .truth import one_step


def parts_of(rate, sigma, steps):
    return pld._parts(Composition(0.0, (SampledGaussian(rate, sigma, steps),), False), Direction.REMOVE)


@pytest.mark.one_in(4, "rate", others="slow")
@pytest.mark.one_in(2, "rate")
@pytest.mark.parametrize(
    ("rate", "sigma", "steps", "delta"),
    [
        (6.59e-6, 0.807, 3, 1e-20),
        (4.23e-7, 0.767, 9, 1e-20),
        (4.81e-6, 0.934, 92, 1e-70),
        (7.43e-6, 0.703, 51, 1e-100),
        (1.18e-6, 0.62, 2, 1e-40),
        (5.16e-6, 3.14, 11, 1e-100),
        (1.66e-6, 0.335, 37, 1e-20),
    ],
)
def test_bounds_hold_where_losses_are_small_or_large(rate, sigma, steps, delta):
    lower, estimate, upper = bounds_of((Charge(PoissonGaussianEvent(rate, sigma), steps),), delta)
    truth, error = convolved(rate, sigma, steps, delta, upper, cells=2**12)
    assert error < 2e-4 * truth
    assert 0.99 * truth < lower <= estimate <= upper
    assert lower <= truth + 2 * error
    assert truth - 2 * error <= upper <= truth * (1 + 1e-4) + 2 * error


@pytest.mark.parametrize(("rate", "sigma", "delta"), [(0.002, 1.1, 1e-12), (0.3, 0.8, 1e-6)])
def test_the_reference_is_the_closed_form_of_one_release(rate, sigma, delta):
    exact = one_step(rate, sigma, delta, "remove")
    truth, error = convolved(rate, sigma, 1, delta, exact)
    assert truth == pytest.approx(exact, abs=2 * error + 1e-7 * exact)


def test_convolution_and_fft_agree_where_both_can_be_had():
    parts, delta = parts_of(0.01, 1.2, 100), 1e-6
    with np.errstate(all="ignore"):
        by_fft = lattice.upper_epsilon(parts, delta, 2e-5).epsilon
        by_convolution = lattice._by_convolution(parts, by_fft, np.log(delta), 2e-5).epsilon
        from_below, cut_short = (
            lattice._largest_epsilon(
                lattice.convolved(parts, -by_fft, most * by_fft, 2**13, above=False), np.log(delta), 1.01 * by_fft
            )
            for most in (4.0, 1.05)  # what lies above the window must not count as more than it is
        )
    assert by_fft * (1 - 1e-5) < by_convolution < by_fft * (1 + 3e-3)
    assert 0.99 * by_fft < from_below < by_fft * (1 - 1e-9)
    assert 0.9 * by_fft < cut_short <= from_below


@pytest.mark.one_in(3, "rate")
@pytest.mark.parametrize(("rate", "sigma", "delta"), [(0.01, 1.0, 1e-6), (0.2, 6.0, 1e-30), (1e-4, 0.8, 1e-5)])
def test_asking_step_by_step_is_asking_afresh(rate, sigma, delta):
    """Counts in one range share a lattice; the result equals that of a separate lattice."""
    for steps in (65, 127, 128, 4099, 8191):
        answer = epsilon_of((Charge(PoissonGaussianEvent(rate, sigma), steps),), delta)
        with np.errstate(all="ignore"):
            alone = lattice._plan_for(parts_of(rate, sigma, steps), delta, 2e-5).epsilon
        assert answer == pytest.approx(alone, rel=5e-5)


def test_within_a_range_of_counts_epsilon_rises_with_every_step():
    answers = [epsilon_of((Charge(PoissonGaussianEvent(0.01, 1.0), steps),), 1e-6) for steps in range(8193, 8320)]
    assert answers == sorted(answers)


@pytest.mark.parametrize("reach", [2, 4, 20])
def test_a_lower_bound_counts_no_loss_above_its_window_as_infinite(reach):
    parts, eps = parts_of(0.01, 20.0, 4), 5e-4
    with np.errstate(all="ignore"):
        below = lattice.convolved(parts, -reach * eps, reach * eps, 2**12, above=False).log_delta(eps)[0]
        above = lattice.upper_log_delta(parts, eps, 1.0, 2e-5)
    assert below < above
    assert reach < 20 or below > above - 0.05


@pytest.mark.parametrize(
    ("rate", "sigma", "steps", "delta"), [(0.00013590688369, 1.78881528046, 20, 3.68571933905e-05)]
)
def test_the_lower_bound_of_a_large_delta_is_one(rate, sigma, steps, delta):
    lower, _, upper = bounds_of((Charge(PoissonGaussianEvent(rate, sigma), steps),), delta)
    truth, error = convolved(rate, sigma, steps, delta, 4 * upper, cells=2**12)
    assert 0.9 * truth < lower <= truth + 2 * error
    assert truth - 2 * error <= upper


@pytest.mark.one_in(3, "rate", others="slow")
@pytest.mark.parametrize(
    ("rate", "sigma", "steps", "delta"),
    [(1.6e-7, 3.54, 5, 1.5e-63), (1.96e-6, 4.41, 1, 3e-47), (3.55e-5, 1.83, 5, 3e-88)],
)
def test_delta_is_as_close_as_epsilon(rate, sigma, steps, delta):
    history = (Charge(PoissonGaussianEvent(rate, sigma), steps),)
    assert delta_of(history, epsilon_of(history, delta) * (1 + 1e-4)) <= delta


@pytest.mark.slow
def test_an_epsilon_next_to_nothing_is_no_error():
    history = (Charge(PoissonGaussianEvent(1.2949933072100793e-06, 182.37435719328894), 2),)
    delta = delta_of(history, 0.0, relation=Relation.REPLACE_ONE)
    assert 0 <= epsilon_of(history, delta, relation=Relation.REPLACE_ONE) < 1e-10
