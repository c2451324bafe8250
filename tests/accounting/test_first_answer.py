import math

import pytest

from dpengine.accounting import (
    Charge,
    FixedSizeGaussianEvent,
    NonPrivateEvent,
    PoissonGaussianEvent,
    Relation,
    UnclaimedEvent,
    epsilon_of,
)
from dpengine.accounting.quick_bound import first_answer
from dpengine.accounting.renyi_orders import epsilon_by_orders

PLAIN = (Charge(PoissonGaussianEvent(0.01, 1.0), 100),)
ONE_SIZE = (Charge(FixedSizeGaussianEvent(1000, 10, 4.0), 10),)
DELTA = 1e-5


def test_the_first_accountant_that_can_answers():
    answer = first_answer(PLAIN, DELTA, ("rdp", "pld"))
    assert (answer.accountant_used, answer.refusals) == ("rdp", ())
    assert answer.epsilon == epsilon_of(PLAIN, DELTA, "rdp")
    answer = first_answer(PLAIN, DELTA, ("gdp", "rdp"))
    assert answer.accountant_used == "rdp"
    assert "gdp" in answer.refusals[0]


def test_an_infinite_answer_is_asked_about_once_more():
    tiny = (Charge(PoissonGaussianEvent(1e-7, 1e-160)),)  # the example takes part less often than delta
    assert first_answer(tiny, DELTA, ("rdp",)).epsilon == math.inf
    answer = first_answer(tiny, DELTA, ("rdp", "pld"))
    assert (answer.epsilon, answer.accountant_used) == (0.0, "pld")


def test_rdp_looks_at_given_orders():
    assert first_answer(PLAIN, DELTA, ("rdp",), orders=[1.5]).epsilon == epsilon_by_orders(PLAIN, DELTA, [1.5])[0]


def test_a_release_with_a_bound_for_one_relation_alone_gets_it():
    answer = first_answer(ONE_SIZE, DELTA)
    assert (answer.accountant_used, answer.relation) == ("pld", Relation.ZERO_OUT)
    assert answer.epsilon == epsilon_of(ONE_SIZE, DELTA, "pld", Relation.ZERO_OUT)


@pytest.mark.parametrize(
    ("history", "used"),
    [((), "pld"), ((Charge(NonPrivateEvent()),), "pld"), ((*PLAIN, Charge(UnclaimedEvent("shuffled"))), None)],
)
def test_there_is_always_an_answer(history, used):
    answer = first_answer(history, DELTA)
    assert answer.accountant_used == used
    assert answer.epsilon == (0.0 if not history else math.inf)
    if used is None:
        assert "shuffled" in answer.refusals[0]


def test_no_accountant_that_can_answer_gives_infinity():
    answer = first_answer(ONE_SIZE, DELTA, ("rdp",))
    assert (answer.epsilon, answer.accountant_used, len(answer.refusals)) == (math.inf, None, 2)
