import itertools
import math
import random

import pytest

from dpengine.accounting import (
    ACCOUNTANTS,
    Charge,
    GaussianEvent,
    NonPrivateEvent,
    PoissonGaussianEvent,
    UnclaimedEvent,
    advantage_of,
    delta_of,
    epsilon,
    epsilon_of,
    mu_gdp,
    privacy_profile,
    privacy_spent,
)
from dpengine.accounting.accountant import discretization_of
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
def test_nothing_charged_costs_nothing(accountant):
    for question in QUESTIONS:
        assert question((), accountant) == 0.0
    spent = privacy_spent((), 1e-5, accountant)
    assert (spent.epsilon, spent.mu, spent.advantage, spent.steps) == (0.0, 0.0, 0.0, 0)
    assert privacy_profile((), [1e-5], accountant) == ((1e-5, 0.0),)


@pytest.mark.parametrize("accountant", ACCOUNTANTS)
@pytest.mark.parametrize("delta", [0, 1, 2, -1e-5, math.nan, math.inf, "1e-5", True, None])
@pytest.mark.hazard("A6")
def test_a_delta_outside_zero_one_is_refused(accountant, delta):
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
def test_every_charge_of_a_mixed_history_counts(accountant):
    whole = epsilon_of(MIXED, 1e-5, accountant)
    for left_out in range(len(MIXED)):
        assert epsilon_of(MIXED[:left_out] + MIXED[left_out + 1 :], 1e-5, accountant) < whole


@pytest.mark.parametrize("accountant", ACCOUNTANTS)
def test_a_release_without_noise_makes_everything_infinite(accountant):
    for event in (NonPrivateEvent(), GaussianEvent(0.0), PoissonGaussianEvent(0.5, 0.0)):
        history = (Charge(GaussianEvent(1.0), 3), Charge(event))
        assert epsilon_of(history, 1e-5, accountant) == math.inf
        assert delta_of(history, 3.0, accountant) == advantage_of(history, accountant) == 1.0
        assert mu_gdp(history, accountant=accountant) == math.inf


@pytest.mark.parametrize("accountant", ACCOUNTANTS)
def test_an_unclaimed_release_is_refused_with_its_reason(accountant):
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
def test_the_numbers_of_the_report_are_the_published_ones(rate, sigma, steps, eps, mu, advantage):
    spent = privacy_spent((Charge(PoissonGaussianEvent(rate, sigma), steps),), 1e-5)
    assert spent.epsilon == pytest.approx(eps, rel=2e-3)
    assert spent.mu == pytest.approx(mu, abs=5e-4 if mu > 0.3 else 5e-3)
    assert spent.advantage == pytest.approx(advantage, abs=5e-4)
    assert (spent.delta, spent.steps, spent.accountant_used) == (1e-5, steps, "pld")


def test_the_curve_of_mu_covers_the_profile_and_the_advantage():
    mu = mu_gdp(SAMPLED)
    covering = (Charge(GaussianEvent(1 / mu)),)
    for delta, eps in privacy_profile(SAMPLED, [1e-9, 1e-7, 1e-5, 1e-3, 1e-1]):
        assert eps <= epsilon_of(covering, delta, "gdp") * (1 + 1e-9)
    assert advantage_of(SAMPLED) <= advantage_of(covering, "gdp")


@pytest.mark.parametrize("accountant", ["pld", "rdp"])
def test_delta_inverts_epsilon_and_the_profile_is_made_of_epsilons(accountant):
    deltas = [1e-7, 1e-3, 1e-5]
    profile = privacy_profile(SAMPLED, deltas, accountant)
    assert [delta for delta, _ in profile] == [1e-3, 1e-5, 1e-7]
    for delta, eps in profile:
        assert eps == epsilon_of(SAMPLED, delta, accountant)
        assert delta_of(SAMPLED, eps, accountant) == pytest.approx(delta, rel=1e-3)


def test_advantage_is_below_the_chance_of_being_sampled_at_all():
    history = (Charge(PoissonGaussianEvent(0.01, 0.3), 5),)
    assert advantage_of(history) <= 1 - 0.99**5 + 1e-9


def test_discretization_is_that_of_the_grid_and_absent_without_one():
    assert 1e-7 < discretization_of(SAMPLED, 1e-5) < 1e-2
    assert discretization_of(SAMPLED, 1e-5, "rdp") is None
    assert discretization_of((Charge(GaussianEvent(1.0)),), 1e-5) is None


def test_epsilon_of_is_the_epsilon_of_a_plain_run():
    assert epsilon(noise_multiplier=1.5, sample_rate=0.02, steps=200, delta=1e-5) == epsilon_of(SAMPLED, 1e-5)
    assert epsilon(noise_multiplier=1.5, sample_rate=0.02, steps=0, delta=1e-5) == 0.0
    for steps in (-1, 1.5, True):
        with pytest.raises(InvalidBudgetError, match="steps="):
            epsilon(noise_multiplier=1.5, sample_rate=0.02, steps=steps, delta=1e-5)


@pytest.mark.parametrize("eps", [-0.1, math.inf, math.nan, "1"])
def test_delta_of_refuses_an_illegal_epsilon(eps):
    with pytest.raises(InvalidBudgetError, match="epsilon="):
        delta_of(SAMPLED, eps)


def test_the_answer_does_not_depend_on_what_was_asked_before():
    answers = []
    for clear in (True, False, True):
        if clear:
            for cached in (pld._on_lattices, lattice._plan_for, loss_grid.sketch):
                cached.cache_clear()
            tilted._releases.clear()
            tilted._transforms.clear()
        answers.append((epsilon_of(MIXED, 1e-5), epsilon_of(SAMPLED, 1e-7), epsilon_of(MIXED, 1e-5)))
    assert len(set(answers)) == 1
