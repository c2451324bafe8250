import math

import pytest

from dpengine.accounting import (
    Charge,
    PoissonGaussianEvent,
    Relation,
    bounds_of,
    calibrate,
    calibration,
    delta,
    delta_of,
    epsilon,
    epsilon_bounds,
    epsilon_of,
    steps_within,
)
from dpengine.errors import AccountingRefusedError, InvalidBudgetError

RUN = {"noise_multiplier": 1.5, "sample_rate": 0.02, "steps": 200}
HISTORY = (Charge(PoissonGaussianEvent(0.02, 1.5), 200),)
TARGET = {"target_epsilon": 2.0, "target_delta": 1e-5, "sample_rate": 0.02}


@pytest.mark.parametrize("accountant", ["pld", "rdp"])
def test_epsilon_of_a_run_equals_that_of_its_history(accountant):
    spent = epsilon(**RUN, delta=1e-5, accountant=accountant)
    assert spent == epsilon_of(HISTORY, 1e-5, accountant) > 0
    assert delta(**RUN, epsilon=1.0, accountant=accountant) == delta_of(HISTORY, 1.0, accountant) > 0


def test_bounds_are_those_of_the_history():
    assert epsilon_bounds(**RUN, delta=1e-5) == bounds_of(HISTORY, 1e-5)
    with pytest.raises(AccountingRefusedError, match="no lower bound"):
        epsilon_bounds(**RUN, delta=1e-5, accountant="rdp")


@pytest.mark.parametrize(
    ("short", "relation"),
    [
        ("add_remove", Relation.ADD_OR_REMOVE_ONE),
        ("zero_out", Relation.ZERO_OUT),
        ("replace-one", Relation.REPLACE_ONE),
    ],
)
def test_relations_have_short_names(short, relation):
    assert epsilon(**RUN, delta=1e-5, relation=short) == epsilon_of(HISTORY, 1e-5, relation=relation)


@pytest.mark.parametrize("relation", ["remove_add", 3, None])
def test_an_unknown_relation_is_rejected(relation):
    with pytest.raises(ValueError, match="is not a valid Relation"):
        epsilon(**RUN, delta=1e-5, relation=relation)


def test_calibrate_returns_the_noise_of_calibration():
    found = calibration(**TARGET, steps=200)
    assert calibrate(**TARGET, steps=200) == found.noise_multiplier
    assert 2.0 * (1 - 1e-3) <= found.epsilon <= 2.0


@pytest.mark.one_in(4, "sigma", "accountant", others="slow")
@pytest.mark.one_in(2, "sigma", "accountant")
@pytest.mark.parametrize(("sigma", "rate"), [(1.5, 0.02), (0.7, 0.001), (8.0, 1.0), (3.0, 0.5)])
@pytest.mark.parametrize("accountant", ["pld", "rdp"])
def test_steps_within_a_budget_is_the_largest_count_that_fits(sigma, rate, accountant):
    run = {"noise_multiplier": sigma, "sample_rate": rate, "accountant": accountant}
    most = steps_within(**run, target_epsilon=2.0, target_delta=1e-5)
    assert most > 1
    assert epsilon(**run, steps=most, delta=1e-5) <= 2.0 < epsilon(**run, steps=most + 1, delta=1e-5)


def test_steps_within_a_budget_can_be_zero_and_an_unlimited_count_raises():
    assert steps_within(target_epsilon=0.1, target_delta=1e-5, noise_multiplier=0.3, sample_rate=1.0) == 0
    assert steps_within(target_epsilon=0.1, target_delta=1e-5, noise_multiplier=0.0, sample_rate=0.5) == 0
    with pytest.raises(InvalidBudgetError, match="does not limit"):
        steps_within(target_epsilon=1.0, target_delta=0.5, noise_multiplier=1e9, sample_rate=1e-9)


def test_epsilon_is_zero_without_steps_and_infinite_without_noise():
    assert epsilon(noise_multiplier=1.5, sample_rate=0.02, steps=0, delta=1e-5) == 0.0
    assert epsilon(noise_multiplier=0.0, sample_rate=0.02, steps=1, delta=1e-5) == math.inf


def test_a_misspelled_argument_is_rejected_with_a_suggestion():
    with pytest.raises(TypeError, match="noise_multiplier"):
        epsilon(noise_multiplyer=1.0, sample_rate=0.1, steps=1, delta=1e-5)
