"""Custom accountants: required members, the calls that they receive, and checks of their results."""

import math
from fractions import Fraction

import numpy as np
import pytest

from dpengine import PrivacyEngine
from dpengine.accounting import (
    ACCOUNTANTS,
    Accountant,
    Charge,
    CyclicGaussianEvent,
    FixedSizeGaussianEvent,
    GaussianEvent,
    MatrixGaussianEvent,
    NonPrivateEvent,
    PoissonGaussianEvent,
    Relation,
    RepeatAndSelectEvent,
    UnclaimedEvent,
    advantage_of,
    bounds_of,
    calibrate,
    calibration,
    delta_of,
    epsilon,
    epsilon_of,
    mu_gdp,
    privacy_profile,
    privacy_spent,
    steps_within,
    trade_off,
)
from dpengine.accounting.accountant import discretization_of
from dpengine.errors import AccountingRefusedError, CalibrationError
from dpengine.plan import BandedInverseConfig, BandMFConfig, DPSGDConfig

SAMPLED = (Charge(PoissonGaussianEvent(0.02, 1.5), 200), Charge(PoissonGaussianEvent(0.02, 1.5), 3, "void"))
UNSAMPLED = (Charge(GaussianEvent(30.0), 40),)


class Wrapped:
    """Wraps a built-in accountant in the custom interface and records the event types of each call."""

    def __init__(self, accountant):
        self.name, self.accountant, self.asked = f"{accountant} through the contract", accountant, set()

    def epsilon(self, history, delta, relation):
        self.asked |= {type(charge.event) for charge in history}
        return epsilon_of(history, delta, self.accountant, relation)

    def delta(self, history, epsilon, relation):
        self.asked |= {type(charge.event) for charge in history}
        return delta_of(history, epsilon, self.accountant, relation)

    def bounds(self, history, delta, relation):
        return bounds_of(history, delta, self.accountant, relation)


class Fixed:
    """Returns one value for all calls."""

    name = "says"

    def __init__(self, value):
        self.value = value

    def epsilon(self, history, delta, relation):
        return self.value

    def delta(self, history, epsilon, relation):
        return self.value

    def bounds(self, history, delta, relation):
        return self.value


QUESTIONS = [
    lambda history, accountant: epsilon_of(history, 1e-5, accountant),
    lambda history, accountant: epsilon_of(history, 1e-5, accountant, Relation.ZERO_OUT),
    lambda history, accountant: delta_of(history, 0.5, accountant),
    lambda history, accountant: advantage_of(history, accountant),
    lambda history, accountant: mu_gdp(history, 1e-5, accountant),
    lambda history, accountant: privacy_profile(history, [1e-3, 1e-5], accountant),
    lambda history, accountant: trade_off(history, [0.01, 0.1], accountant),
]


@pytest.mark.parametrize(
    ("name", "history"),
    [
        pytest.param("pld", SAMPLED, marks=pytest.mark.slow),
        ("rdp", SAMPLED),
        *((name, history) for name in ("pld", "rdp") for history in (UNSAMPLED, (), (Charge(NonPrivateEvent()),))),
    ],
)
def test_a_builtin_accountant_gives_the_same_answers_through_the_contract(name, history):
    for question in QUESTIONS:
        assert question(history, Wrapped(name)) == question(history, name)
    own = privacy_spent(history, 1e-5, Wrapped(name))
    assert own.accountant_used == f"{name} through the contract"
    assert (own.epsilon, own.mu, own.advantage) == (
        (builtin := privacy_spent(history, 1e-5, name)).epsilon,
        builtin.mu,
        builtin.advantage,
    )


def test_bounds_come_from_the_optional_method():
    assert bounds_of(SAMPLED, 1e-5, Wrapped("pld")) == bounds_of(SAMPLED, 1e-5, "pld")
    assert bounds_of((), 1e-5, Fixed((1.0, 2.0, 3.0))) == (0.0, 0.0, 0.0)
    assert bounds_of(SAMPLED, 1e-5, Fixed((1.0, 2, np.float32(3)))) == (1.0, 2.0, 3.0)
    for wrong in ((1.0, 2.0), 3.0, None, (3.0, 2.0, 1.0), (math.nan, 1.0, 2.0), (1.0, "2", 3.0)):
        with pytest.raises((TypeError, ValueError), match=r"accountant 'says': bounds\(\)"):
            bounds_of(SAMPLED, 1e-5, Fixed(wrong))
    without = Fixed(1.0)
    without.bounds = None
    with pytest.raises(TypeError, match="bounds is not a method"):
        bounds_of(SAMPLED, 1e-5, without)


def test_an_accountant_without_bounds_has_none_and_no_grid():
    class Plain:
        name = "plain"
        epsilon, delta = Fixed.epsilon, Fixed.delta
        value = 0.5

    with pytest.raises(AccountingRefusedError, match="accountant 'plain' has no lower bound"):
        bounds_of(SAMPLED, 1e-5, Plain())
    assert epsilon_of(SAMPLED, 1e-5, Plain()) == 0.5
    assert discretization_of(SAMPLED, 1e-5, Plain()) is None


# Cases that do not reach the custom accountant


def test_a_release_without_noise_a_claim_or_a_charge_is_not_left_to_the_accountant():
    for answer in (Fixed(0.25), Fixed(math.nan)):
        assert epsilon_of((), 1e-5, answer) == delta_of((), 1.0, answer) == 0.0
        bare = (*SAMPLED, Charge(NonPrivateEvent()))
        assert epsilon_of(bare, 1e-5, answer) == math.inf
        assert delta_of(bare, 1.0, answer) == 1.0
        for question in QUESTIONS:
            with pytest.raises(AccountingRefusedError, match="Epsilon cannot be computed"):
                question((*SAMPLED, Charge(UnclaimedEvent("not drawn at random."))), answer)


def test_the_history_is_passed_as_it_was_charged():
    class Recording(Fixed):
        def epsilon(self, history, delta, relation):
            self.value = (history, delta, relation)
            return 1

    keeps = Recording(None)
    assert type(epsilon_of(list(SAMPLED), 1e-5, keeps, "zero-out")) is float
    assert keeps.value == (SAMPLED, 1e-5, Relation.ZERO_OUT)


# Values


@pytest.mark.parametrize("value", [math.nan, -1e-9, -math.inf, np.float64("nan")], ids=str)
def test_an_epsilon_out_of_range_raises_with_the_name(value):
    with pytest.raises(ValueError, match=r"accountant 'says': epsilon\(\) returned .*, which is not in \[0, inf\]"):
        epsilon_of(SAMPLED, 1e-5, Fixed(value))


@pytest.mark.parametrize("value", [None, "1.0", True, 1j, (1.0,), np.array([1.0])], ids=str)
def test_an_epsilon_of_a_wrong_type_raises_with_the_name(value):
    for ask in (lambda: epsilon_of(SAMPLED, 1e-5, Fixed(value)), lambda: delta_of(SAMPLED, 1.0, Fixed(value))):
        with pytest.raises(TypeError, match=r"accountant 'says': \w+\(\) returned .*, which is not a number"):
            ask()


@pytest.mark.parametrize("value", [math.nan, -0.1, 1.0001])
def test_a_delta_out_of_range_raises_with_the_name(value):
    with pytest.raises(ValueError, match=r"accountant 'says': delta\(\) returned .*, which is not in \[0, 1\]"):
        delta_of(SAMPLED, 1.0, Fixed(value))


@pytest.mark.parametrize("value", [0, 1, np.float32(0.5), Fraction(1, 2), math.inf])
def test_any_real_number_type_is_accepted_as_epsilon(value):
    assert epsilon_of(SAMPLED, 1e-5, Fixed(value)) == float(value)


# The contract


class Nameless:
    epsilon, delta = Fixed.epsilon, Fixed.delta


class WithoutDelta:
    name, epsilon = "half", Fixed.epsilon


class Inherits(Accountant):
    """Subclass of the contract without members of its own."""


@pytest.mark.parametrize(
    ("accountant", "says"),
    [
        (Nameless(), "a Nameless, which lacks name, which must be a printable str"),
        (WithoutDelta(), r"a WithoutDelta, which lacks delta\(\)"),
        (Inherits(), "an? Inherits, which lacks name"),
        (Charge(GaussianEvent(1.0)), r"a Charge, which lacks name, .*, and epsilon\(\), and delta\(\)"),
        (Wrapped, "the class Wrapped. Pass an instance"),
    ],
    ids=lambda value: "" if isinstance(value, str) else getattr(value, "__name__", type(value).__name__),
)
def test_an_object_without_a_required_member_is_rejected_by_its_name(accountant, says):
    for call in (lambda: PrivacyEngine(accountant=accountant), lambda: epsilon_of(SAMPLED, 1e-5, accountant)):
        with pytest.raises(TypeError, match=f"accountant is {says}"):
            call()


WRONG_MEMBERS = [
    *(("name", name, TypeError, "lacks name") for name in ("", " ", 3, None, "two\nlines")),
    *(("name", name, ValueError, f"a Fixed with the name '{name}' of a built-in accountant") for name in ACCOUNTANTS),
    ("charged", 3, TypeError, "a Fixed, whose charged is not a method"),
]


@pytest.mark.parametrize(("member", "value", "error", "says"), WRONG_MEMBERS)
def test_a_member_with_a_wrong_value_is_rejected(member, value, error, says):
    own = Fixed(1.0)
    setattr(own, member, value)
    with pytest.raises(error, match=says):
        PrivacyEngine(accountant=own)


# Calibration

RUN = {"sample_rate": 0.02, "steps": 300}


@pytest.mark.one_in(2, "name", "spent", "rate", others="slow")
@pytest.mark.parametrize("name", ["pld", "rdp"])
@pytest.mark.parametrize("spent", [(), UNSAMPLED])
@pytest.mark.parametrize("rate", [0.02, 1.0])
def test_noise_is_calibrated_by_the_given_accountant(name, spent, rate):
    target = {"target_epsilon": 2.0, "target_delta": 1e-5, "sample_rate": rate, "steps": 300, "spent": spent}
    own = calibration(**target, accountant=Wrapped(name))
    builtin = calibration(**target, accountant=name)
    assert own.accountant_used == f"{name} through the contract"
    assert 2.0 * (1 - 1e-4) < own.epsilon <= 2.0
    assert own.noise_multiplier == pytest.approx(builtin.noise_multiplier, rel=1e-4)


def test_the_plain_functions_take_an_accountant():
    own = Wrapped("rdp")
    sigma = calibrate(target_epsilon=2.0, target_delta=1e-5, **RUN, accountant=own)
    assert epsilon(noise_multiplier=sigma, delta=1e-5, **RUN, accountant="rdp") <= 2.0
    question = {"target_epsilon": 2.0, "target_delta": 1e-5, "sample_rate": 0.02, "noise_multiplier": sigma}
    assert steps_within(**question, accountant=own) == steps_within(**question, accountant="rdp") >= 300
    assert own.asked


def test_an_unreachable_target_raises_a_calibration_error():
    with pytest.raises(CalibrationError, match="smallest reachable here: 3"):
        calibrate(target_epsilon=2.0, target_delta=1e-5, **RUN, accountant=Fixed(3.0))


def test_earlier_charges_need_no_bound_by_another_accountant():
    spent = (Charge(RepeatAndSelectEvent(((PoissonGaussianEvent(0.01, 4.0), 50),), 3.0)),)
    with pytest.raises(AccountingRefusedError):
        epsilon_of(spent, 1e-5, "pld")
    target = {"target_epsilon": 3.0, "target_delta": 1e-5, "spent": spent, **RUN}
    own, builtin = (calibration(**target, accountant=accountant) for accountant in (Wrapped("rdp"), "rdp"))
    assert own.noise_multiplier == pytest.approx(builtin.noise_multiplier, rel=1e-4)


@pytest.mark.one_in(4, "config", others="slow")
@pytest.mark.parametrize(
    ("config", "event"),
    [
        (DPSGDConfig(iterations=100, sampling_prob=0.05), PoissonGaussianEvent),
        (DPSGDConfig(iterations=100, fixed_batch_size=50, num_examples=1000), FixedSizeGaussianEvent),
        (BandMFConfig.default(num_bands=4, iterations=100, sampling_prob=0.1), CyclicGaussianEvent),
        (BandedInverseConfig.default(num_bands=4, iterations=100, cycle_length=20), MatrixGaussianEvent),
    ],
    ids=["poisson", "fixed-size", "band-mf", "banded-inverse"],
)
def test_a_plan_is_calibrated_by_an_accountant_on_its_own_events(config, event):
    own = Wrapped("pld")
    found = config.calibrate(epsilon=3.0, delta=1e-5, accountant=own)
    assert own.asked == {event}
    assert 2.99 < found.epsilon(1e-5, accountant=own) <= 3.0
    assert found.noise_multiplier == pytest.approx(config.calibrate(epsilon=3.0, delta=1e-5).noise_multiplier, rel=1e-4)
