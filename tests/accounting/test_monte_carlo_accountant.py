"""Histories with a run that needs simulation, which only the accountant `monte_carlo` supports."""

import json
import math

import numpy as np
import pytest
from scipy import stats

from dpengine.accounting import (
    ACCOUNTANTS,
    Charge,
    GaussianEvent,
    Ledger,
    NonPrivateEvent,
    PoissonGaussianEvent,
    Relation,
    RepeatAndSelectEvent,
    SampledMatrixEvent,
    TruncatedGaussianEvent,
    advantage_of,
    bounds_of,
    calibrate,
    delta_of,
    epsilon_of,
    monte_carlo_epsilon,
    mu_gdp,
    noise_calibration,
    privacy_profile,
    privacy_spent,
    to_dp_accounting,
    verify,
)
from dpengine.accounting import events as accounting_events
from dpengine.accounting.accountant import discretization_of
from dpengine.accounting.events import event_from_state, event_to_state
from dpengine.accounting.monte_carlo import estimate as monte_carlo
from dpengine.accounting.monte_carlo import tally
from dpengine.accounting.monte_carlo.verified import threshold_for, verified_delta
from dpengine.accounting.noise_calibration import calibration, least_noise
from dpengine.errors import AccountingRefusedError, CalibrationError, InvalidBudgetError, LedgerError

from .simulated_runs import BANDS, DENSE, run


@pytest.fixture
def few(monkeypatch):
    """The accountant with a sample count small enough for tests."""
    monkeypatch.setattr(monte_carlo, "MAX_SAMPLES", 20_000)


def test_the_accountant_bounds_the_truth(few):
    event = run("cyclic", apart=1, steps=20, coefficients=(1.0,))
    history, truth = (Charge(event),), (Charge(PoissonGaussianEvent(0.4, 2.0), 20),)
    for delta in (2e-3, 1e-2):
        assert epsilon_of(truth, delta) < epsilon_of(history, delta, "monte_carlo") < 1.25 * epsilon_of(truth, delta)
    for epsilon in (0.5, 3.0):
        exact = delta_of(truth, epsilon)
        assert exact < delta_of(history, epsilon, "monte_carlo") < exact + 5 * math.sqrt(exact / 20_000) + 20 / 20_000
    assert advantage_of(history, "monte_carlo") > advantage_of(truth)
    assert mu_gdp(history, 2e-3, "monte_carlo") > 0
    spent = privacy_spent(history, 1e-2, "monte_carlo")
    assert (spent.epsilon, spent.steps) == (epsilon_of(history, 1e-2, "monte_carlo"), 20)
    profile = privacy_profile(history, [1e-2, 1e-9], "monte_carlo")
    assert profile == ((1e-2, spent.epsilon),)  # the small delta is left out
    assert discretization_of(history, 1e-2, "monte_carlo") is None


@pytest.mark.slow
def test_the_accountant_is_a_function_of_the_charges(few):
    history = (Charge(run("cold")), Charge(GaussianEvent(9.0), 3), Charge(PoissonGaussianEvent(0.1, 2.0), 4, "void"))
    found = epsilon_of(history, 1e-2, "monte_carlo")
    tally.simulation.cache_clear()
    assert epsilon_of(reversed(history), 1e-2, "monte_carlo") == found
    assert found > epsilon_of(history[:1], 1e-2, "monte_carlo")
    restored = tuple(Charge(event_from_state(event_to_state(c.event)), c.count, c.kind) for c in history)
    assert epsilon_of(restored, 1e-2, "monte_carlo") == found


@pytest.mark.slow
def test_each_other_event_next_to_a_simulated_run_raises_epsilon(few):
    truncated = Charge(TruncatedGaussianEvent(100, 0.1, 12, 0.6), 20)
    simulated = epsilon_of((Charge(run("cold")),), 1e-2, "monte_carlo", Relation.ZERO_OUT)
    other = epsilon_of((truncated,), 1e-2, relation=Relation.ZERO_OUT)
    assert epsilon_of((Charge(run("cold")), truncated), 1e-2, "monte_carlo", Relation.ZERO_OUT) > max(simulated, other)
    selected = RepeatAndSelectEvent(((GaussianEvent(9.0), 1),), 5.0)
    with pytest.raises(AccountingRefusedError, match="hyperparameter selection"):
        epsilon_of((Charge(run("cold")), Charge(selected)), 1e-2, "monte_carlo")


def test_the_accountant_rejects_a_delta_that_its_samples_do_not_verify(few):
    with pytest.raises(AccountingRefusedError, match=r"smallest verifiable delta is about 0\.0013"):
        epsilon_of((Charge(run("cold")),), 1e-5, "monte_carlo")
    with pytest.raises(AccountingRefusedError, match="smallest verifiable delta"):
        privacy_profile((Charge(run("cold")),), [1e-5], "monte_carlo")


@pytest.mark.parametrize("rest", [(), (Charge(PoissonGaussianEvent(0.1, 1.0), 9),), (Charge(GaussianEvent(3.0)),)])
@pytest.mark.parametrize("accountant", [name for name in ACCOUNTANTS if name != "monte_carlo"])
def test_other_accountants_reject_runs_that_need_simulation(accountant, rest):
    history = (Charge(run("warm")), *rest)
    questions = [
        lambda: epsilon_of(history, 1e-5, accountant),
        lambda: epsilon_of(history, 0.9999, accountant, Relation.REPLACE_ONE),
        lambda: delta_of(history, 1.0, accountant),
        lambda: advantage_of(history, accountant),
        lambda: mu_gdp(history, 1e-5, accountant),
        lambda: privacy_profile(history, [1e-5], accountant),
        lambda: privacy_spent(history, 1e-5, accountant),
    ]
    if ACCOUNTANTS[accountant].bounds is not None:
        questions.append(lambda: bounds_of(history, 1e-5, accountant))
    for question in questions:
        with pytest.raises(AccountingRefusedError, match="b-min-sep run, whose epsilon has no closed form"):
            question()


def test_the_accountant_rejects_unsupported_events():
    event = run("bins")
    refused = [
        ((Charge(GaussianEvent(1.0)),), Relation.ADD_OR_REMOVE_ONE, "accountant='pld'"),
        ((Charge(event, 2),), Relation.ADD_OR_REMOVE_ONE, "history has 2"),
        ((Charge(event), Charge(run("cold"))), Relation.ADD_OR_REMOVE_ONE, "history has 2"),
        ((Charge(event),), Relation.REPLACE_ONE, "replace-one"),
    ]
    for history, relation, reason in refused:
        for question in (epsilon_of, delta_of):
            with pytest.raises(AccountingRefusedError, match=reason):
                question(history, 0.5, "monte_carlo", relation)
    assert epsilon_of((Charge(event), Charge(NonPrivateEvent())), 1e-5, "monte_carlo") == math.inf
    assert epsilon_of((Charge(run("bins", sigma=0.0)),), 1e-5) == math.inf


def test_a_run_is_kept_in_the_ledger():
    ledger = Ledger()
    ledger.charge(run("warm", columns=DENSE))
    state = json.loads(json.dumps(ledger.state_dict()))
    read = Ledger()
    read.load_state_dict(state)
    assert read.history == ledger.history and read.steps == 7
    with pytest.raises(LedgerError):
        event_from_state({**event_to_state(run("warm")), "steps": 0})
    with pytest.raises(AccountingRefusedError, match="simulated"):
        to_dp_accounting(run("warm"))
    assert SampledMatrixEvent in accounting_events._TYPES.values()


BAD = [
    ({"noise_multiplier": -1.0}, "noise_multiplier="),
    ({"scheme": "shuffled"}, "balls-in-bins, cyclic-poisson, b-min-sep"),
    ({"cycle_length": 0}, "cycle_length="),
    ({"steps": 0}, "steps="),
    ({"coefficients": ()}, "either coefficients or columns"),
    ({"columns": ((1.0,),)}, "either coefficients or columns"),
    ({"coefficients": (1.0, -0.1)}, "negative"),
    ({"coefficients": (1.0, math.nan)}, "not finite"),
    ({"coefficients": (0.0, 1.0)}, "positive"),
    ({"coefficients": (1.0,) * 6}, "6 numbers for 5 steps"),
    ({"coefficients": (1.0,) * 4}, "4 bands overlaps"),
    ({"coefficients": (), "columns": ((1.0, 0.0),)}, "5 columns of 5"),
    ({"coefficients": (), "columns": tuple(map(tuple, np.ones((5, 5))))}, "lower-triangular"),
    ({"sample_rate": 0.0}, "sample_rate="),
    ({"scheme": "balls-in-bins"}, "sample_rate=0.5 is not supported"),
    ({"scheme": "cyclic-poisson", "warm_start": True}, "warm_start="),
]


@pytest.mark.parametrize(("change", "message"), BAD, ids=[message for _, message in BAD])
def test_bad_runs_are_rejected(change, message):
    good = {"noise_multiplier": 1.0, "scheme": "b-min-sep", "cycle_length": 3, "steps": 5, "coefficients": BANDS}
    good["sample_rate"] = 0.5
    SampledMatrixEvent(**good)
    with pytest.raises(InvalidBudgetError, match=message):
        SampledMatrixEvent(**{**good, **change})


def test_invalid_queries_are_rejected():
    event = run("cold")
    for bad in ({"seed": -1}, {"seed": 1.0}, {"seed": True}, {"seed": 0, "samples": 0}):
        with pytest.raises(InvalidBudgetError):
            monte_carlo_epsilon(event, 1e-2, **{"samples": 5000, **bad})
    with pytest.raises(InvalidBudgetError, match="delta="):
        monte_carlo_epsilon(event, 0.0, samples=5000, seed=0)
    with pytest.raises(InvalidBudgetError, match="threshold="):
        verify(event, 1.0, threshold=1.0, samples=10, seed=0)
    with pytest.raises(AccountingRefusedError, match="without noise"):
        monte_carlo_epsilon(run("cold", sigma=0.0), 1e-2, samples=5000, seed=0)
    with pytest.raises(AccountingRefusedError, match="too many to simulate"):
        monte_carlo_epsilon(run("bins", steps=10_000, apart=9000), 1e-2, samples=5000, seed=0)
    with pytest.raises(AccountingRefusedError, match="losses overflow"):
        monte_carlo_epsilon(run("cold", sigma=1e-200), 1e-2, samples=5000, seed=0)


@pytest.mark.slow
def test_calibration_charges_every_noise_that_it_tries(few, monkeypatch):
    tried, charged = set(), set()
    simulation, threshold = monte_carlo.simulation, monte_carlo.threshold_for
    monkeypatch.setattr(monte_carlo, "simulation", lambda event, *how: tried.add(event) or simulation(event, *how))
    monkeypatch.setattr(
        monte_carlo,
        "threshold_for",
        lambda delta, samples, claims: charged.add(claims) or threshold(delta, samples, claims),
    )
    found = least_noise(
        lambda sigma: run("cyclic", apart=1, steps=20, coefficients=(1.0,), sigma=sigma),
        target_epsilon=2.0, target_delta=1e-2, steps=1, accountant="monte_carlo",
    )  # fmt: skip
    (claims,) = charged
    assert len(tried) <= claims == 11
    truth = calibrate(target_epsilon=2.0, target_delta=1e-2, sample_rate=0.4, steps=20)
    assert truth < found < 1.15 * truth
    monkeypatch.undo()


@pytest.mark.slow
def test_calibration_next_to_a_simulated_run_needs_no_other_accountant(few, monkeypatch):
    monkeypatch.setattr(tally, "_POINTS", 8)
    event = run("cyclic", apart=1, steps=20, coefficients=(1.0,), sigma=3.0)
    found = calibration(
        target_epsilon=5.0, target_delta=1e-2, sample_rate=0.1, steps=10, accountant="monte_carlo",
        spent=[Charge(event)], tol=0.05,
    )  # fmt: skip
    sampled = [
        Charge(PoissonGaussianEvent(0.4, 3.0), 20),
        Charge(PoissonGaussianEvent(0.1, found.noise_multiplier), 10),
    ]
    assert 4.0 < epsilon_of(sampled, 1e-2) < found.epsilon <= 5.0


def test_calibration_by_simulation_rejects_what_it_cannot_reach(few, monkeypatch):
    settings = {"target_epsilon": 1.0, "target_delta": 1e-2, "accountant": "monte_carlo"}
    with pytest.raises(InvalidBudgetError, match=r"Pass steps=1\."):
        least_noise(lambda sigma: run("cold", sigma=sigma), steps=2, **settings)
    with pytest.raises(AccountingRefusedError, match="smallest verifiable delta"):
        least_noise(lambda sigma: run("cold", sigma=sigma), steps=1, **{**settings, "target_delta": 1e-5})
    monkeypatch.setattr(noise_calibration, "MAX_NOISE", 0.5)
    with pytest.raises(CalibrationError, match=r"noise_multiplier > 0\.5 by simulation"):
        least_noise(lambda sigma: run("cold", sigma=sigma), steps=1, **settings)


@pytest.mark.parametrize("claims", [1, 11])
def test_the_verified_delta_of_several_claims_is_that_of_a_union_bound(claims):
    samples, threshold = 5000, 2e-3
    a = threshold + np.geomspace(1e-7, 0.5, 200_000)
    divergence = threshold * np.log(threshold / a) + (1 - threshold) * np.log((1 - threshold) / (1 - a))
    best = (a + (1 - a) * np.minimum(1, claims * np.exp(-samples * divergence))).min()
    assert verified_delta(threshold, samples, claims) == pytest.approx(best, rel=1e-6)
    assert verified_delta(threshold_for(1e-2, samples, claims), samples, claims) == pytest.approx(1e-2, rel=1e-6)


@pytest.mark.parametrize("charged", [1, 11])
def test_eleven_tries_have_the_delta_of_eleven_claims_and_not_of_one(charged):
    """Exact: each of eleven wrong claims, whose delta is ``a``, is accepted with a binomial probability."""
    samples, delta = 1000, 0.05
    threshold = threshold_for(delta, samples, charged)
    a = np.linspace(threshold, delta, 500)[1:-1]
    accepted = stats.binom.cdf(math.floor(threshold * samples), samples, a)
    worst = (a + (1 - a) * (1 - (1 - accepted) ** 11)).min()  # for the best split between both kinds of error
    assert (worst <= delta) == (charged == 11)


@pytest.mark.slow
def test_epsilon_at_a_small_delta_is_near_the_truth():
    event = run("cyclic", apart=1, steps=50, sigma=1.0, coefficients=(1.0,))
    truth = epsilon_of((Charge(PoissonGaussianEvent(0.4, 1.0), 50),), 1e-5)
    assert truth < epsilon_of((Charge(event),), 1e-5, "monte_carlo") < 1.06 * truth
