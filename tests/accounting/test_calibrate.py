import math
import random

import pytest

from dpengine.accounting import Charge, GaussianEvent, Relation, calibration, epsilon, epsilon_of, release_event
from dpengine.accounting.noise_calibration import least_noise_for
from dpengine.errors import AccountingRefusedError, CalibrationError, InvalidBudgetError

GOLDEN = [  # target epsilon, rate, steps, noise multiplier, relative tolerance
    (3.0, 256 / 60000, 2340, 0.6937, 2e-3),
    (0.5, 1024 / 32561, 480, 4.978, 2e-3),
    (1.0, 1024 / 32561, 480, 2.738, 2e-3),
    (3.0, 1024 / 32561, 480, 1.236, 2e-3),
    (1.0, 0.1, 1000, 11.86561, 1e-4),
]


@pytest.mark.one_in(5, "target", others="slow")
@pytest.mark.parametrize(("target", "rate", "steps", "golden", "tolerance"), GOLDEN)
def test_published_calibrations_are_met(target, rate, steps, golden, tolerance):
    found = calibration(target_epsilon=target, target_delta=1e-5, sample_rate=rate, steps=steps)
    assert found.noise_multiplier == pytest.approx(golden, rel=tolerance)
    assert found.noise_multiplier <= golden * (1 + 1e-4)
    assert_is_tight(found, target, 1e-5, rate)


@pytest.mark.slow
def test_earlier_charges_are_composed():
    spent = (Charge(GaussianEvent(2.0), 3), Charge(release_event(noise_multiplier=1.5, sample_rate=0.05), 40))
    found = calibration(target_epsilon=6.0, target_delta=1e-5, sample_rate=0.02, steps=200, spent=spent)
    without_history = calibration(target_epsilon=6.0, target_delta=1e-5, sample_rate=0.02, steps=200)
    assert found.noise_multiplier > without_history.noise_multiplier
    least = epsilon_of(spent, 1e-5, accountant="pld", relation=Relation.ADD_OR_REMOVE_ONE)
    whole = (*spent, Charge(release_event(noise_multiplier=found.noise_multiplier, sample_rate=0.02), 200))
    assert epsilon_of(whole, 1e-5, accountant="pld", relation=Relation.ADD_OR_REMOVE_ONE) == found.epsilon <= 6.0
    assert found.epsilon > 6.0 * (1 - 1e-3)
    with pytest.raises(CalibrationError, match="with the earlier charges"):
        calibration(target_epsilon=0.99 * least, target_delta=1e-5, sample_rate=0.02, steps=200, spent=spent)


def assert_is_tight(found, target, delta, rate, accountant="pld", relation=Relation.ADD_OR_REMOVE_ONE, tol=1e-5):
    """Asserts that the returned noise meets the target by the reporting accountant and slightly less noise does not."""

    def reported(sigma):
        return epsilon(
            noise_multiplier=sigma,
            sample_rate=rate,
            steps=found.steps,
            delta=delta,
            accountant=accountant,
            relation=relation,
        )

    assert found.epsilon == reported(found.noise_multiplier) <= target
    assert reported(found.noise_multiplier * (1 - 3 * tol)) > target or found.epsilon >= target * (1 - tol)


def random_target(rng):
    return {
        "target_epsilon": math.exp(rng.uniform(math.log(0.05), math.log(20))),
        "target_delta": 10 ** rng.uniform(-8, -3),
        "rate": 10 ** rng.uniform(-3, -0.01),
        "steps": int(10 ** rng.uniform(0, 3.5)),
    }


def check_random_target(rng, accountant):
    case = random_target(rng)
    target, delta, rate = case["target_epsilon"], case["target_delta"], case["rate"]
    try:
        found = calibration(
            target_epsilon=target, target_delta=delta, sample_rate=rate, steps=case["steps"], accountant=accountant
        )
    except CalibrationError:
        assert accountant == "rdp"  # its orders are bounded; the PLD accountant reaches all of these targets
        return
    assert found.accountant_used == accountant
    if found.noise_multiplier > 0.01:
        assert_is_tight(found, target, delta, rate, accountant)
    else:
        assert found.epsilon <= target


@pytest.mark.one_in(3, "seed")
@pytest.mark.parametrize("seed", range(6))
@pytest.mark.hazard("A9")
def test_random_targets_are_met(seed):
    check_random_target(random.Random(seed), "pld")


@pytest.mark.one_in(3, "seed")
@pytest.mark.parametrize("seed", range(30))
@pytest.mark.hazard("A9")
def test_random_targets_are_met_by_rdp(seed):
    check_random_target(random.Random(1000 + seed), "rdp")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("target", "delta", "rate", "steps"), [(0.0943, 5.7e-7, 0.0033, 3), (0.202, 8.9e-8, 0.00104, 26)]
)
@pytest.mark.hazard("A9")
def test_targets_below_the_grid_of_the_first_guess_are_met(target, delta, rate, steps):
    found = calibration(target_epsilon=target, target_delta=delta, sample_rate=rate, steps=steps)
    assert_is_tight(found, target, delta, rate)


@pytest.mark.nightly
@pytest.mark.hazard("A9")
def test_two_hundred_random_targets_are_met():
    rng = random.Random(2)
    for _ in range(200):
        check_random_target(rng, "pld")


@pytest.mark.parametrize("accountant", ["pld", "gdp", "rdp"])
@pytest.mark.parametrize("relation", [Relation.ADD_OR_REMOVE_ONE, Relation.REPLACE_ONE])
@pytest.mark.hazard("A9")
def test_runs_without_sampling_are_calibrated_too(accountant, relation):
    for target, delta, steps in [(1.0, 1e-5, 100), (0.01, 1e-9, 3), (30.0, 1e-6, 10_000)]:
        if accountant == "rdp" and target == 0.01:
            continue  # below the smallest epsilon of its orders
        arguments = {"sample_rate": 1.0, "steps": steps, "accountant": accountant, "relation": relation}
        found = calibration(target_epsilon=target, target_delta=delta, **arguments)
        assert_is_tight(found, target, delta, 1.0, accountant, relation)
        exact = epsilon_of((Charge(GaussianEvent(found.noise_multiplier), steps),), delta, "gdp", relation)
        assert exact <= target


def test_replace_one_needs_more_noise():
    arguments = {"target_epsilon": 2.0, "target_delta": 1e-5, "sample_rate": 0.05, "steps": 100}
    found = calibration(**arguments, relation=Relation.REPLACE_ONE)
    assert found.noise_multiplier > 1.2 * calibration(**arguments).noise_multiplier
    assert_is_tight(found, 2.0, 1e-5, 0.05, relation=Relation.REPLACE_ONE)


def test_a_looser_tolerance_never_exceeds_the_target():
    arguments = {"target_epsilon": 1.0, "target_delta": 1e-5, "sample_rate": 0.05, "steps": 100}
    best = calibration(**arguments, tol=1e-6)
    loose = calibration(**arguments, tol=1e-2)
    assert loose.epsilon <= 1.0
    assert best.epsilon >= 1.0 - 2e-6
    assert best.noise_multiplier * (1 - 1e-6) <= loose.noise_multiplier <= best.noise_multiplier * 1.02


def test_a_very_large_target_gets_the_smallest_supported_noise():
    found = calibration(target_epsilon=5e4, target_delta=1e-5, sample_rate=0.5, steps=1)
    assert found.noise_multiplier == pytest.approx(0.01, rel=1e-4)
    assert found.epsilon <= 5e4


@pytest.mark.parametrize(
    ("accountant", "target", "delta", "steps"), [("rdp", 1e-4, 1e-9, 10_000_000), ("pld", 1e-9, 1e-5, 1000)]
)
def test_an_unreachable_target_names_the_smallest_epsilon(accountant, target, delta, steps):
    with pytest.raises(CalibrationError, match=r"smallest reachable here: [0-9.e-]+\.") as caught:
        calibration(target_epsilon=target, target_delta=delta, sample_rate=0.9, steps=steps, accountant=accountant)
    assert caught.value.code == "DPE008"
    assert f"epsilon={target:g} needs noise_multiplier > 1e+06" in str(caught.value)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *[("target_epsilon", value) for value in (0, -1, math.nan, math.inf, "3", None)],
        *[("target_delta", value) for value in (0, 1, 2, -1e-5, math.nan)],
        *[("sample_rate", value) for value in (0, 1.5, -0.1, math.nan)],
        *[("steps", value) for value in (0, -1, 2.0, True)],
        *[("tol", value) for value in (0, -1, math.nan)],
    ],
)
def test_invalid_arguments_are_named(name, value):
    arguments = {"target_epsilon": 1.0, "target_delta": 1e-5, "sample_rate": 0.1, "steps": 10, name: value}
    with pytest.raises(InvalidBudgetError, match=f"{name}="):
        calibration(**arguments)


def test_events_that_the_accountant_rejects_cannot_be_calibrated():
    arguments = {"target_epsilon": 1.0, "sample_rate": 0.1, "steps": 10**6}
    with pytest.raises(AccountingRefusedError, match="pld"):
        calibration(**arguments, target_delta=1e-5, accountant="gdp")
    with pytest.raises(AccountingRefusedError, match="prv"):
        calibration(**arguments | {"steps": 100}, target_delta=1e-15, accountant="prv")


@pytest.mark.slow
@pytest.mark.one_in(2, "accountant")
@pytest.mark.parametrize(
    ("accountant", "relation"),
    [
        ("prv", Relation.ADD_OR_REMOVE_ONE),
        ("prv", Relation.REPLACE_ONE),
        ("dp_accounting", Relation.REPLACE_ONE),
        ("dp_accounting_rdp", Relation.ADD_OR_REMOVE_ONE),
    ],
)
def test_other_accountants_can_be_calibrated(accountant, relation):
    arguments = {"target_delta": 1e-5, "accountant": accountant, "relation": relation, "steps": 100}
    for target, rate in [(2.0, 0.05), (3.0, 1.0)]:
        found = calibration(target_epsilon=target, sample_rate=rate, **arguments)
        assert_is_tight(found, target, 1e-5, rate, accountant, relation)
        assert found.accountant_used == accountant
    spent = (Charge(GaussianEvent(8.0)),)
    found = calibration(target_epsilon=2.0, sample_rate=0.05, spent=spent, **arguments)
    assert 2.0 * (1 - 1e-4) < found.epsilon <= 2.0


@pytest.mark.parametrize("power", [0.5, 1.0, 2.0, 8.0])
@pytest.mark.parametrize("start", [1e-2, 1.0, 1e5])
def test_noise_search_on_a_decreasing_function_is_within_the_tolerance(power, start):
    def epsilon_at(sigma):
        return 7.0 * sigma**-power

    found = least_noise_for(epsilon_at, target_epsilon=3.0, tolerance=0.01, start=start)
    assert 3.0 - 0.01 <= epsilon_at(found) <= 3.0


def test_noise_search_on_a_step_function_finds_the_jump():
    found = least_noise_for(lambda sigma: 5.0 if sigma < 2.0 else 0.0, target_epsilon=3.0, tolerance=0.01)
    assert 2.0 <= found <= 2.0 * (1 + 1e-5)


def test_noise_search_below_the_target_everywhere_returns_the_minimum():
    assert least_noise_for(lambda sigma: 0.0, target_epsilon=3.0, tolerance=0.01) == pytest.approx(1e-2)


def test_noise_search_over_a_function_that_never_reaches_the_target_raises():
    with pytest.raises(CalibrationError, match="smallest reachable here: 4"):
        least_noise_for(lambda sigma: 4.0, target_epsilon=3.0, tolerance=0.01)
