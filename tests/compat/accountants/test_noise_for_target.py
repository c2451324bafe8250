"""The noise for a target: epsilon after the planned steps is at most the target, and little less."""

import pytest

from dpengine.compat.opacus.accountants import create_accountant
from dpengine.compat.opacus.accountants.utils import MAX_SIGMA, get_noise_multiplier

DELTA = 1e-5


def epsilon_after(mechanism, sigma, rate, steps, **keywords):
    accountant = create_accountant(mechanism)
    accountant.history = [(sigma, rate, steps)]
    return accountant.get_epsilon(DELTA, **keywords)


@pytest.mark.one_in(4, "mechanism", "target", others="slow")
@pytest.mark.one_in(2, "mechanism", "target")
@pytest.mark.parametrize("mechanism", ["rdp", "gdp", "prv"])
@pytest.mark.parametrize(("target", "tolerance"), [(0.3, 0.01), (3.0, 0.05), (30.0, 0.01)])
def test_epsilon_is_within_the_tolerance_below_the_target(mechanism, target, tolerance):
    found = get_noise_multiplier(
        target_epsilon=target,
        target_delta=DELTA,
        sample_rate=0.02,
        epochs=4,
        accountant=mechanism,
        epsilon_tolerance=tolerance,
    )
    assert target - tolerance <= epsilon_after(mechanism, found, 0.02, 200) <= target


# Where 1 / (1 / n) is below n in floating point, cutting off loses a step; and a spread of others.
LOSING = [n for n in range(1, 2001) if int(1 / (1 / n)) != n]
SPREAD = [1, 2, 3, 10, *range(11, 2001, 181), *LOSING[::20]]


def test_some_numbers_of_steps_would_lose_one():
    assert len(LOSING) > 100


@pytest.mark.one_in(6, "n", others="slow")
@pytest.mark.one_in(3, "n")
@pytest.mark.parametrize("n", SPREAD)
def test_no_step_of_an_epoch_is_lost(n):
    found = get_noise_multiplier(
        target_epsilon=2.0, target_delta=DELTA, sample_rate=1 / n, epochs=1, epsilon_tolerance=1e-4
    )
    assert 2.0 - 1e-4 <= epsilon_after("rdp", found, 1 / n, n) <= 2.0


@pytest.mark.nightly
def test_no_step_is_lost_for_any_number_of_steps_to_2000():
    for n in range(1, 2001):
        found = get_noise_multiplier(target_epsilon=2.0, target_delta=DELTA, sample_rate=1 / n, epochs=3)
        assert 2.0 - 0.01 <= epsilon_after("rdp", found, 1 / n, 3 * n) <= 2.0, n


def test_keywords_reach_the_accountant():
    found = get_noise_multiplier(target_epsilon=8.0, target_delta=DELTA, sample_rate=0.02, steps=200, alphas=[2, 3])
    assert 8.0 - 0.01 <= epsilon_after("rdp", found, 0.02, 200, alphas=[2, 3]) <= 8.0
    assert found > 1.01 * get_noise_multiplier(target_epsilon=8.0, target_delta=DELTA, sample_rate=0.02, steps=200)


def test_a_misspelt_keyword_is_refused():
    with pytest.raises(TypeError, match="'epsilon_tolerance'"):
        get_noise_multiplier(target_epsilon=3, target_delta=DELTA, sample_rate=0.1, steps=1, epsilon_tolerence=0.1)


@pytest.mark.parametrize("given", [{}, {"epochs": 1, "steps": 10}])
def test_exactly_one_of_epochs_and_steps_is_given(given):
    with pytest.raises(ValueError, match="exactly one"):
        get_noise_multiplier(target_epsilon=1.0, target_delta=DELTA, sample_rate=0.1, **given)


@pytest.mark.parametrize(
    "wrong",
    [{"target_epsilon": 0.0}, {"target_delta": 0.0}, {"sample_rate": 0.0}, {"epochs": -1}, {"epsilon_tolerance": 0.0}],
)
def test_arguments_out_of_range_are_refused(wrong):
    arguments = {"target_epsilon": 1.0, "target_delta": DELTA, "sample_rate": 0.1, "epochs": 1}
    with pytest.raises(ValueError, match=r"must|positive"):
        get_noise_multiplier(**(arguments | wrong))


def test_a_budget_that_is_too_small_is_refused():
    with pytest.raises(ValueError, match="needs noise_multiplier > 1e"):
        get_noise_multiplier(target_epsilon=1e-6, target_delta=1e-9, sample_rate=1.0, steps=10**6)
    assert MAX_SIGMA == 1e6


def test_a_target_that_little_noise_meets_is_no_endless_search():
    # The example takes part in no step with a chance above 1 - delta, so that any noise is enough.
    found = get_noise_multiplier(target_epsilon=1.0, target_delta=0.1, sample_rate=1e-3, steps=10)
    accountant = create_accountant("rdp")
    accountant.history = [(found, 1e-3, 10)]
    assert accountant.get_epsilon(0.1) <= 1.0
