"""Arguments out of range raise an error with the argument's name."""

import math
from fractions import Fraction

import pytest

from dpengine.accounting import (
    Charge,
    FixedSizeGaussianEvent,
    GaussianEvent,
    PoissonGaussianEvent,
    Relation,
    bounds_of,
    calibrate,
    central_limit_epsilon,
    delta_of,
    epsilon,
    epsilon_of,
    suggested_delta,
)
from dpengine.accounting.accountant import accountant_name
from dpengine.accounting.arguments import MAX_COUNT
from dpengine.errors import InvalidBudgetError

RUN = {"noise_multiplier": 3.0, "sample_rate": 256 / 60_000, "delta": 5.5e-6}
TOO_MANY = [MAX_COUNT + 1, 2**63, 10**31, 10**36, 10**5000]


def message_of(call):
    with pytest.raises(InvalidBudgetError) as caught:
        call()
    return str(caught.value)


@pytest.mark.parametrize("steps", TOO_MANY, ids=lambda steps: f"{steps.bit_length()}-bits")
def test_a_count_beyond_the_largest_is_rejected_by_name(steps):
    for name, call in {
        "steps": lambda: epsilon(**RUN, steps=steps),
        "steps=": lambda: calibrate(target_epsilon=1.0, target_delta=1e-5, sample_rate=0.1, steps=steps),
        "count=": lambda: Charge(GaussianEvent(1.0), steps),
        "num_examples=": lambda: FixedSizeGaussianEvent(steps, 10, 1.0),
        "num_examples": lambda: suggested_delta(steps),
    }.items():
        text = message_of(call)
        assert name in text and "2**62" in text
        assert len(text) < 300


def test_a_large_count_is_reported_by_its_size():
    assert "steps=about 10**31 " in message_of(lambda: epsilon(**RUN, steps=10**31))
    assert "steps=about -10**5000 " in message_of(lambda: epsilon(**RUN, steps=-(10**5000)))
    assert f"steps={2**62 + 1} " in message_of(lambda: epsilon(**RUN, steps=2**62 + 1))


@pytest.mark.parametrize("steps", [MAX_COUNT - 1, MAX_COUNT])
@pytest.mark.parametrize("relation", list(Relation))
def test_the_largest_count_matches_the_closed_form(steps, relation):
    mu = math.sqrt(steps) / 3.0 * (2 if relation is Relation.REPLACE_ONE else 1)
    # The loss is N(mu^2 / 2, mu^2), so epsilon lies some standard deviations above mu^2 / 2.
    for accountant in ("gdp", "pld", "prv"):
        spent = epsilon(**RUN | {"sample_rate": 1.0}, steps=steps, accountant=accountant, relation=relation)
        assert mu**2 / 2 < spent < mu**2 / 2 + 5 * mu
    if relation is not Relation.REPLACE_ONE:
        assert spent < epsilon(**RUN | {"sample_rate": 1.0}, steps=steps, accountant="rdp") < math.inf


@pytest.mark.one_in(5, "sigma", others="slow")
@pytest.mark.parametrize("sigma", [3.0, 1e5, 1e8, 1e9, 1e10])
def test_epsilon_of_the_largest_sampled_count_is_at_least_the_normal_limit(sigma):
    steps = MAX_COUNT
    run = RUN | {"noise_multiplier": sigma, "steps": steps}
    # With many small losses the limit is exact. If a single loss is not small, the limit does not apply, and the mean
    # of all losses is a lower bound (delta is far below 1/2).
    q = RUN["sample_rate"]
    mean = steps * q * q / sigma / sigma / 2 * (0.9 if sigma < 10 else 1)
    floor = max(mean, central_limit_epsilon(**run)) if sigma > 10 else mean
    upper, by_rdp = epsilon(**run), epsilon(**run, accountant="rdp")
    assert floor * (1 - 1e-3) <= upper <= by_rdp < math.inf
    lower, estimate, above = bounds_of((Charge(PoissonGaussianEvent(q, sigma), steps),), RUN["delta"])
    assert 0 <= lower <= estimate <= above == upper


def test_epsilon_increases_up_to_the_largest_count():
    for accountant in ("pld", "rdp"):
        spent = [epsilon(**RUN, steps=2**power, accountant=accountant) for power in (40, 51, 62)]
        assert spent == sorted(spent) and spent[0] > 0


@pytest.mark.parametrize("value", [10**400, -(10**400), 10**5000, Fraction(10**400)], ids=lambda v: type(v).__name__)
def test_a_number_too_large_for_a_float_is_rejected_by_name(value):
    text = message_of(lambda: epsilon(**RUN | {"noise_multiplier": value}, steps=3))
    assert "noise_multiplier=" in text and "float" in text and len(text) < 300
    assert "delta=" in message_of(lambda: epsilon(**RUN | {"delta": value}, steps=3))
    assert "epsilon=" in message_of(lambda: delta_of((), value))


@pytest.mark.parametrize("accountant", [["pld"], {"pld": 1}, None, 3, "abacus"], ids=str)
def test_an_invalid_accountant_is_rejected_with_the_choices(accountant):
    for call in (lambda: accountant_name(accountant), lambda: epsilon(**RUN, steps=3, accountant=accountant)):
        with pytest.raises(ValueError, match=r"accountant=.* is not known. Choose one of 'pld', 'rdp'"):
            call()


@pytest.mark.parametrize("relation", ["foo", 3, None, ["zero_out"]], ids=str)
def test_an_invalid_relation_is_rejected_with_the_choices(relation):
    text = message_of(lambda: epsilon(**RUN, steps=3, relation=relation))
    for one in Relation:
        assert repr(one.value) in text
    assert f"{relation!r} is not a valid Relation" in text
    assert message_of(lambda: epsilon_of((), 1e-5, relation=relation)) == text
