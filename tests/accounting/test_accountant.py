"""Queries that all accountants share, the trade-off curve, and the choice of the first applicable accountant."""

import itertools
import math
import random
from statistics import NormalDist

import pytest

from dpengine.accounting import (
    ACCOUNTANTS,
    Charge,
    FixedSizeGaussianEvent,
    GaussianEvent,
    NonPrivateEvent,
    PoissonGaussianEvent,
    Relation,
    UnclaimedEvent,
    advantage_of,
    central_limit_epsilon,
    delta_of,
    epsilon,
    epsilon_of,
    mu_gdp,
    privacy_profile,
    privacy_spent,
    trade_off,
)
from dpengine.accounting.accountant import discretization_of
from dpengine.accounting.quick_bound import first_answer
from dpengine.accounting.renyi_orders import epsilon_by_orders
from dpengine.accounting.tilted_pld import lattice, loss_grid, pld, tilted
from dpengine.errors import AccountingRefusedError, InvalidBudgetError

SAMPLED = (Charge(PoissonGaussianEvent(0.02, 1.5), 200),)
MIXED = (
    Charge(PoissonGaussianEvent(0.02, 1.5), 30),
    Charge(GaussianEvent(40.0), 7),
    Charge(PoissonGaussianEvent(0.02, 3.0), 20, "void"),
    Charge(PoissonGaussianEvent(0.05, 1.5), 10),
    Charge(GaussianEvent(33.3), 3, "clip"),
)
QUESTIONS = [
    lambda history, accountant: epsilon_of(history, 1e-5, accountant),
    lambda history, accountant: delta_of(history, 0.5, accountant),
    lambda history, accountant: advantage_of(history, accountant),
    lambda history, accountant: mu_gdp(history, 1e-5, accountant),
]


@pytest.mark.parametrize("accountant", ACCOUNTANTS)
@pytest.mark.hazard("A5")
def test_an_empty_history_has_epsilon_zero(accountant):
    for question in QUESTIONS:
        assert question((), accountant) == 0.0
    spent = privacy_spent((), 1e-5, accountant)
    assert (spent.epsilon, spent.mu, spent.advantage, spent.steps) == (0.0, 0.0, 0.0, 0)
    assert privacy_profile((), [1e-5], accountant) == ((1e-5, 0.0),)


@pytest.mark.parametrize("accountant", ACCOUNTANTS)
@pytest.mark.parametrize("delta", [0, 1, 2, -1e-5, math.nan, math.inf, "1e-5", True, None])
@pytest.mark.hazard("A6")
def test_a_delta_outside_zero_one_is_rejected(accountant, delta):
    for history in ((), (Charge(GaussianEvent(1.0)),)):
        with pytest.raises(InvalidBudgetError, match="delta="):
            epsilon_of(history, delta, accountant)


@pytest.mark.parametrize("accountant", ["pld", "rdp"])
@pytest.mark.hazard("A6")
def test_epsilon_is_never_negative(accountant):
    weak = (Charge(PoissonGaussianEvent(0.001, 100.0)),)
    for delta in (1e-9, 0.1, 0.5, 0.99):
        assert epsilon_of(weak, delta, accountant) >= 0
    assert epsilon_of(weak, 0.5, accountant) == 0


@pytest.mark.parametrize("accountant", [pytest.param("pld", marks=pytest.mark.slow), "rdp"])
@pytest.mark.hazard("A3")
def test_split_and_permuted_histories_agree(accountant):
    pieces = [Charge(c.event, 1, c.kind) for c in MIXED for _ in range(c.count)]
    random.Random(0).shuffle(pieces)
    for question in QUESTIONS:
        assert question(pieces, accountant) == question(MIXED, accountant) > 0
        for order in itertools.islice(itertools.permutations(MIXED), 0, 120, 41):
            assert question(order, accountant) == question(MIXED, accountant)


@pytest.mark.parametrize("accountant", ["pld", "rdp"])
@pytest.mark.hazard("A3")
def test_each_charge_of_a_mixed_history_raises_epsilon(accountant):
    whole = epsilon_of(MIXED, 1e-5, accountant)
    for left_out in range(len(MIXED)):
        assert epsilon_of(MIXED[:left_out] + MIXED[left_out + 1 :], 1e-5, accountant) < whole


@pytest.mark.parametrize("accountant", ACCOUNTANTS)
@pytest.mark.hazard("O76")
def test_a_step_without_noise_has_infinite_epsilon_and_mu(accountant):
    for event in (NonPrivateEvent(), GaussianEvent(0.0), PoissonGaussianEvent(0.5, 0.0)):
        history = (Charge(GaussianEvent(1.0), 3), Charge(event))
        assert epsilon_of(history, 1e-5, accountant) == math.inf
        assert delta_of(history, 3.0, accountant) == advantage_of(history, accountant) == 1.0
        assert mu_gdp(history, accountant=accountant) == math.inf


@pytest.mark.parametrize("accountant", ACCOUNTANTS)
def test_an_unclaimed_release_is_rejected_with_its_reason(accountant):
    history = (Charge(GaussianEvent(1.0)), Charge(UnclaimedEvent("batches were shuffled"), 3))
    for question in (*QUESTIONS, lambda h, a: privacy_spent(h, 1e-5, a), lambda h, a: privacy_profile(h, [1e-5], a)):
        with pytest.raises(AccountingRefusedError, match="batches were shuffled"):
            question(history, accountant)


@pytest.mark.parametrize("name", ["clt", "PLD", "", None])
def test_unknown_accountants_list_the_choices(name):
    with pytest.raises(ValueError, match="'pld', 'rdp', 'gdp', 'prv', 'dp_accounting', 'dp_accounting_rdp'"):
        epsilon_of(SAMPLED, 1e-5, name)


@pytest.mark.one_in(2, "rate", others="slow")
@pytest.mark.parametrize(
    ("rate", "sigma", "steps", "eps", "mu", "advantage"),
    [(2048 / 60000, 2.15, 600, 1.664, 0.433, 0.162), (1024 / 32561, 2.738, 480, 1.0, 0.27, 0.103)],
)
def test_privacy_spent_matches_published_values(rate, sigma, steps, eps, mu, advantage):
    spent = privacy_spent((Charge(PoissonGaussianEvent(rate, sigma), steps),), 1e-5)
    assert spent.epsilon == pytest.approx(eps, rel=2e-3)
    assert spent.mu == pytest.approx(mu, abs=5e-4 if mu > 0.3 else 5e-3)
    assert spent.advantage == pytest.approx(advantage, abs=5e-4)
    assert (spent.delta, spent.steps, spent.accountant_used) == (1e-5, steps, "pld")


def test_the_curve_of_mu_bounds_the_profile_and_the_advantage():
    mu = mu_gdp(SAMPLED)
    covering = (Charge(GaussianEvent(1 / mu)),)
    for delta, eps in privacy_profile(SAMPLED, [1e-9, 1e-7, 1e-5, 1e-3, 1e-1]):
        assert eps <= epsilon_of(covering, delta, "gdp") * (1 + 1e-9)
    assert advantage_of(SAMPLED) <= advantage_of(covering, "gdp")


@pytest.mark.parametrize("accountant", ["pld", "rdp"])
def test_delta_inverts_epsilon_and_the_profile_holds_epsilons(accountant):
    deltas = [1e-7, 1e-3, 1e-5]
    profile = privacy_profile(SAMPLED, deltas, accountant)
    assert [delta for delta, _ in profile] == [1e-3, 1e-5, 1e-7]
    for delta, eps in profile:
        assert eps == epsilon_of(SAMPLED, delta, accountant)
        assert delta_of(SAMPLED, eps, accountant) == pytest.approx(delta, rel=1e-3)


def test_advantage_is_below_the_probability_of_being_sampled():
    history = (Charge(PoissonGaussianEvent(0.01, 0.3), 5),)
    assert advantage_of(history) <= 1 - 0.99**5 + 1e-9


def test_discretization_is_the_grid_spacing_or_none():
    assert 1e-7 < discretization_of(SAMPLED, 1e-5) < 1e-2
    assert discretization_of(SAMPLED, 1e-5, "rdp") is None
    assert discretization_of((Charge(GaussianEvent(1.0)),), 1e-5) is None


def test_epsilon_of_equals_the_epsilon_of_a_dp_sgd_run():
    assert epsilon(noise_multiplier=1.5, sample_rate=0.02, steps=200, delta=1e-5) == epsilon_of(SAMPLED, 1e-5)
    assert epsilon(noise_multiplier=1.5, sample_rate=0.02, steps=0, delta=1e-5) == 0.0
    for steps in (-1, 1.5, True):
        with pytest.raises(InvalidBudgetError, match="steps="):
            epsilon(noise_multiplier=1.5, sample_rate=0.02, steps=steps, delta=1e-5)


@pytest.mark.parametrize("eps", [-0.1, math.inf, math.nan, "1"])
def test_delta_of_rejects_an_illegal_epsilon(eps):
    with pytest.raises(InvalidBudgetError, match="epsilon="):
        delta_of(SAMPLED, eps)


def test_results_do_not_depend_on_earlier_queries():
    answers = []
    for clear in (True, False, True):
        if clear:
            for cached in (pld._on_lattices, lattice._plan_for, loss_grid.sketch):
                cached.cache_clear()
            tilted._releases.clear()
            tilted._transforms.clear()
        answers.append((epsilon_of(MIXED, 1e-5), epsilon_of(SAMPLED, 1e-7), epsilon_of(MIXED, 1e-5)))
    assert len(set(answers)) == 1


RATES = (0.0, 0.001, 0.01, 0.1, 0.5, 0.9, 1.0)


@pytest.mark.parametrize("mu", [0.3, 1.0, 3.0])
def test_the_trade_off_of_a_gaussian_is_a_close_upper_bound_of_the_closed_form(mu):
    normal = NormalDist()
    for rate, power in trade_off((Charge(GaussianEvent(1 / mu)),), RATES):
        exact = rate if rate in (0.0, 1.0) else normal.cdf(mu + normal.inv_cdf(rate))
        assert exact - 1e-9 <= power <= exact + 0.01
        assert power >= rate


@pytest.mark.slow
def test_the_trade_off_of_a_sampled_run_is_bounded_by_the_advantage_and_rises():
    history = (Charge(PoissonGaussianEvent(0.02, 1.0), 300),)
    curve = trade_off(history, RATES)
    powers = [power for _, power in curve]
    assert powers == sorted(powers)
    assert max(power - rate for rate, power in curve) <= advantage_of(history) + 1e-12
    assert powers[2] > 0.01


def test_trade_off_endpoints():
    assert trade_off((), [0.3]) == ((0.3, pytest.approx(0.3)),)
    assert trade_off((Charge(NonPrivateEvent()),), [0.3]) == ((0.3, 1.0),)
    with pytest.raises(InvalidBudgetError):
        trade_off((), [1.5])


def test_the_central_limit_is_an_approximation_that_falls_below_the_truth():
    run = {"noise_multiplier": 0.7, "sample_rate": 0.001, "steps": 10_000, "delta": 1e-6}
    assert central_limit_epsilon(**run) == pytest.approx(1.101, abs=1e-3)  # published: 1.101 for a truth of 1.6369
    assert central_limit_epsilon(**run) < 0.7 * epsilon(**run)
    assert central_limit_epsilon(**{**run, "steps": 0}) == 0.0
    assert central_limit_epsilon(**{**run, "noise_multiplier": 0.0}) == math.inf


PLAIN = (Charge(PoissonGaussianEvent(0.01, 1.0), 100),)
ONE_SIZE = (Charge(FixedSizeGaussianEvent(1000, 10, 4.0), 10),)
DELTA = 1e-5


def test_first_answer_uses_the_first_applicable_accountant():
    answer = first_answer(PLAIN, DELTA, ("rdp", "pld"))
    assert (answer.accountant_used, answer.refusals) == ("rdp", ())
    assert answer.epsilon == epsilon_of(PLAIN, DELTA, "rdp")
    answer = first_answer(PLAIN, DELTA, ("gdp", "rdp"))
    assert answer.accountant_used == "rdp"
    assert "gdp" in answer.refusals[0]


def test_an_infinite_epsilon_is_retried_with_the_next_accountant():
    tiny = (Charge(PoissonGaussianEvent(1e-7, 1e-160)),)  # the sampling rate is below delta
    assert first_answer(tiny, DELTA, ("rdp",)).epsilon == math.inf
    answer = first_answer(tiny, DELTA, ("rdp", "pld"))
    assert (answer.epsilon, answer.accountant_used) == (0.0, "pld")


def test_rdp_uses_the_given_orders():
    assert first_answer(PLAIN, DELTA, ("rdp",), orders=[1.5]).epsilon == epsilon_by_orders(PLAIN, DELTA, [1.5])[0]


def test_an_event_with_a_bound_under_one_relation_uses_that_relation():
    answer = first_answer(ONE_SIZE, DELTA)
    assert (answer.accountant_used, answer.relation) == ("pld", Relation.ZERO_OUT)
    assert answer.epsilon == epsilon_of(ONE_SIZE, DELTA, "pld", Relation.ZERO_OUT)


@pytest.mark.parametrize(
    ("history", "used"),
    [((), "pld"), ((Charge(NonPrivateEvent()),), "pld"), ((*PLAIN, Charge(UnclaimedEvent("shuffled"))), None)],
)
def test_empty_noiseless_and_unbounded_histories_have_an_epsilon(history, used):
    answer = first_answer(history, DELTA)
    assert answer.accountant_used == used
    assert answer.epsilon == (0.0 if not history else math.inf)
    if used is None:
        assert "shuffled" in answer.refusals[0]


def test_epsilon_is_infinite_without_an_applicable_accountant():
    answer = first_answer(ONE_SIZE, DELTA, ("rdp",))
    assert (answer.epsilon, answer.accountant_used, len(answer.refusals)) == (math.inf, None, 2)
