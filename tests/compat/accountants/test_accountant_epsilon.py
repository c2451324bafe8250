"""Epsilon under Opacus's names: values and errors, and the noise multiplier for a target epsilon."""

import math
import warnings
from dataclasses import dataclass

import pytest

from dpengine.accounting import (
    CyclicGaussianEvent,
    FixedSizeGaussianEvent,
    Ledger,
    MatrixGaussianEvent,
    RepeatAndSelectEvent,
    TruncatedGaussianEvent,
    UnclaimedEvent,
    bounds_of,
    release_event,
)
from dpengine.compat.opacus.accountants import create_accountant
from dpengine.compat.opacus.accountants.utils import MAX_SIGMA, get_noise_multiplier
from dpengine.errors import PrivacyWarning, forget_notices

MECHANISMS = ("rdp", "prv", "gdp")
DELTA = 1e-5


@dataclass(frozen=True)
class Figure:
    """Epsilon of Opacus 1.6.0 at delta 1e-5 for a history."""

    id: str
    history: list[tuple[float, float, int]]
    rdp: float
    order: float
    prv: float


# From Opacus 1.6.0, for each history and mechanism:
#   accountant = create_accountant(mechanism); accountant.history = history
#   accountant.get_epsilon(1e-5); and for "rdp" accountant.get_privacy_spent(delta=1e-5)[1]
FIGURES = [
    Figure("digits", [(1.1, 256 / 60000, 2340)], 1.09815, 12.0, 0.928228),
    Figure("little-noise", [(0.6, 0.01, 1000)], 8.66591, 2.7, 7.44418),
    Figure("much-noise", [(10.0, 0.1, 1000)], 1.31974, 14.0, 1.21903),
    Figure("one-step", [(1.0, 0.05, 1)], 1.60674, 7.0, 1.04297),
    Figure("no-sampling", [(5.0, 1.0, 20)], 4.16162, 5.9, 3.85882),
    Figure("schedule", [(1.5, 0.02, 300), (1.2, 0.02, 300), (0.9, 0.02, 100)], 2.99047, 5.6, 2.53663),
    Figure("rate-one-half", [(3.0, 0.5, 100)], 9.05975, 3.5, 8.39789),
    Figure("tiny-rate", [(0.8, 1e-4, 20000)], 0.829759, 10.9, 0.0984739),
    Figure("large-epsilon", [(0.5, 0.1, 500)], 86.0446, 1.3, 78.9742),
]
EPS_ERROR = 0.01  # which Opacus adds to the epsilon of PRV


def with_history(mechanism, history):
    accountant = create_accountant(mechanism)
    accountant.history = history
    return accountant


def with_events(mechanism, *events):
    accountant = create_accountant(mechanism)
    accountant.ledger = Ledger()
    for event, count in events:
        accountant.ledger.charge(event, count=count)
    return accountant


@pytest.mark.parametrize("figure", FIGURES, ids=lambda figure: figure.id)
def test_rdp_gives_opacus_figures(figure):
    accountant = with_history("rdp", figure.history)
    epsilon, order = accountant.get_privacy_spent(delta=DELTA)
    assert epsilon == pytest.approx(figure.rdp, rel=1e-5)
    assert order == pytest.approx(figure.order)
    assert accountant.get_epsilon(DELTA) == epsilon


@pytest.mark.parametrize(
    "figure",
    [
        pytest.param(figure, id=figure.id, marks=[] if figure.id in ("digits", "no-sampling") else pytest.mark.slow)
        for figure in FIGURES
    ],
)
def test_prv_gives_opacus_figures_without_their_error_term(figure):
    found = with_history("prv", figure.history).get_epsilon(DELTA)
    assert figure.prv - 2 * EPS_ERROR <= found <= figure.prv * 1.002


@pytest.mark.one_in(4, "figure", others="slow")
@pytest.mark.one_in(2, "figure")
@pytest.mark.parametrize("figure", FIGURES, ids=lambda figure: figure.id)
def test_gdp_is_an_upper_bound_and_no_looser_than_the_others(figure):
    accountant = with_history("gdp", figure.history)
    lower = bounds_of(accountant.ledger.history, DELTA)[0]
    found = accountant.get_epsilon(DELTA)
    assert lower <= found <= with_history("rdp", figure.history).get_epsilon(DELTA)
    assert found <= 1.002 * lower + 0.011  # the lower bound is looser for tiny rates


def test_gdp_has_no_amplification_without_poisson_sampling():
    sampled, full_batch = with_history("gdp", [(5.0, 0.01, 20)]), with_history("gdp", [(5.0, 1.0, 20)])
    assert sampled.get_epsilon(DELTA, poisson=False) == full_batch.get_epsilon(DELTA) > 10 * sampled.get_epsilon(DELTA)


def test_rdp_uses_the_given_orders():
    accountant = with_history("rdp", [(1.0, 0.01, 1000)])
    epsilon, order = accountant.get_privacy_spent(delta=DELTA, alphas=[2.5, 3])
    assert order in (2.5, 3.0)
    assert accountant.get_epsilon(DELTA, alphas=[2.5, 3]) == epsilon > accountant.get_epsilon(DELTA)
    with pytest.raises(ValueError, match="orders"):
        accountant.get_epsilon(DELTA, alphas=[1.0])


@pytest.mark.parametrize("mechanism", MECHANISMS)
@pytest.mark.hazard("O75", "O76")
def test_an_empty_history_has_epsilon_zero_and_no_noise_has_infinite_epsilon(mechanism):
    accountant = create_accountant(mechanism)
    assert accountant.get_epsilon(DELTA) == 0.0
    accountant.step(noise_multiplier=0.0, sample_rate=0.01)
    assert accountant.get_epsilon(DELTA) == math.inf
    assert accountant.history == [(0.0, 0.01, 1)]


@pytest.mark.parametrize("mechanism", MECHANISMS)
@pytest.mark.hazard("O22")
def test_a_changed_multiplier_is_composed(mechanism):
    accountant = create_accountant(mechanism)
    accountant.step(noise_multiplier=1.0, sample_rate=0.01)
    before = accountant.get_epsilon(DELTA)
    accountant.step(noise_multiplier=0.7, sample_rate=0.02)
    assert accountant.history == [(1.0, 0.01, 1), (0.7, 0.02, 1)]
    assert accountant.get_epsilon(DELTA) > before


@pytest.mark.parametrize("mechanism", MECHANISMS)
@pytest.mark.parametrize(
    "step",
    [
        {"noise_multiplier": -1.0, "sample_rate": 0.01},
        {"noise_multiplier": math.nan, "sample_rate": 0.01},
        {"noise_multiplier": 1.0, "sample_rate": 1.5},
        {"noise_multiplier": 0.0, "sample_rate": -0.5},
    ],
)
@pytest.mark.hazard("O22")
def test_a_step_that_raises_leaves_the_history_as_it_was(mechanism, step):
    accountant = with_history(mechanism, [(1.0, 0.01, 7)])
    with pytest.raises(ValueError, match=r"noise_multiplier|sample_rate"):
        accountant.step(**step)
    assert accountant.history == [(1.0, 0.01, 7)]


GRID = [
    (sigma, rate, steps, delta)
    for sigma in (0.0, 1e-3, 0.05, 1.0, 1e4)
    for rate in (1e-6, 0.1, 0.5, 1.0)
    for steps in (1, 100_000)
    for delta in (1e-12, 0.1, 0.99)
]


def assert_sound_over(grid, mechanisms):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", PrivacyWarning)
        for sigma, rate, steps, delta in grid:
            for mechanism in mechanisms:
                found = with_history(mechanism, [(sigma, rate, steps)]).get_epsilon(delta)
                assert found >= 0, (mechanism, sigma, rate, steps, delta)
                ceiling = with_history("gdp", [(sigma, 1.0, steps)]).get_epsilon(delta)
                assert found <= 2.1 * ceiling + 5e-2, (mechanism, sigma, rate, steps, delta)


@pytest.mark.hazard("O25")
def test_rdp_never_fails_over_a_grid_and_is_near_or_below_the_cost_without_sampling():
    assert_sound_over(GRID, ["rdp"])


@pytest.mark.slow
@pytest.mark.hazard("O25")
def test_no_accountant_fails_over_a_grid():
    assert_sound_over(GRID, ["prv", "gdp"])


@pytest.mark.one_in(2, "history")
@pytest.mark.parametrize(
    ("history", "delta"),
    [
        ([(0.45, 0.3, 300)], 1e-5),  # epsilon near 1e3
        ([(0.5, 0.1, 10)], 1e-1),  # a data set of ten examples
        ([(1.0, 0.5, 20)], 1e-2),
        ([(0.005, 0.01, 10)], 1e-5),  # losses too large for a grid
        ([(1.0, 0.01, 10_000)], 1e-13),  # delta below the rounding error
        ([(1.0, 0.1, 20)], 0.05),
        ([(0.6, 1.0, 5)], 0.05),
        ([(0.4, 0.5, 100)], 1e-3),
        ([(0.05, 0.01, 10)], 1e-5),
        ([(20.0, 1e-4, 10**5)], 1e-9),
        ([(0.3, 0.9, 200)], 1e-5),
    ],
)
@pytest.mark.hazard("O43")
def test_prv_always_returns_an_upper_bound(history, delta):
    forget_notices()
    accountant, rdp = with_history("prv", history), with_history("rdp", history)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = accountant.get_epsilon(delta)
    lower = bounds_of(accountant.ledger.history, delta, "pld")[0]
    assert lower <= found <= rdp.get_epsilon(delta) * (1 + 1e-9)
    if found == rdp.get_epsilon(delta):  # the accountant fell back and warned
        assert any("'rdp' answered" in str(one.message) for one in caught)
    else:
        assert not caught


def test_prv_accepts_error_tolerances_and_rejects_invalid_ones():
    accountant = with_history("prv", [(1.0, 0.01, 100)])
    assert accountant.get_epsilon(DELTA, eps_error=0.1, delta_error=1e-9) == accountant.get_epsilon(DELTA)
    for wrong in ({"eps_error": 0.0}, {"delta_error": -1e-9}):
        with pytest.raises(ValueError, match="positive"):
            accountant.get_epsilon(DELTA, **wrong)


@pytest.mark.parametrize("mechanism", MECHANISMS)
def test_a_misspelled_keyword_is_rejected_and_keywords_of_other_accountants_are_accepted(mechanism):
    accountant = with_history(mechanism, [(5.0, 1.0, 1)])
    accountant.get_epsilon(DELTA, alphas=[2, 8], eps_error=0.1, delta_error=1e-8, poisson=True)
    with pytest.raises(TypeError, match="'eps_error'"):
        accountant.get_epsilon(DELTA, eps_eror=0.1)


@pytest.mark.parametrize("mechanism", MECHANISMS)
@pytest.mark.parametrize("delta", [0.0, 1.0, -1e-5, math.nan])
def test_a_delta_out_of_range_is_rejected(mechanism, delta):
    with pytest.raises(ValueError, match="delta"):
        with_history(mechanism, [(1.0, 0.01, 1)]).get_epsilon(delta)


CYCLIC = CyclicGaussianEvent(0.1, 1.0, 5, "run")
MATRIX = MatrixGaussianEvent(2.0, 10, (1.0, 2.5), "run")
FIXED_SIZE = FixedSizeGaussianEvent(1000, 50, 4.0)
TRUNCATED = TruncatedGaussianEvent(1000, 0.05, 80, 4.0)
SELECTED = RepeatAndSelectEvent(((release_event(noise_multiplier=2.0, sample_rate=0.1), 10),), 5.0)


@pytest.mark.parametrize("mechanism", ["rdp", "gdp"])
@pytest.mark.parametrize(
    "event", [CYCLIC, MATRIX, FIXED_SIZE, TRUNCATED, SELECTED], ids=lambda event: type(event).__name__
)
def test_events_without_a_noise_multiplier_and_a_rate_are_counted(mechanism, event):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", PrivacyWarning)
        one, more = (with_events(mechanism, (event, count)).get_epsilon(DELTA) for count in (10, 20))
    assert 0 < one < more < math.inf


def test_correlated_noise_has_the_epsilon_of_its_history_entries():
    accountant = with_events("gdp", (MATRIX, 20))
    ((sigma, rate, steps),) = accountant.history
    assert (rate, steps) == (1.0, 20)
    same = with_history("gdp", [(sigma, rate, steps)])
    assert same.get_epsilon(DELTA) == pytest.approx(accountant.get_epsilon(DELTA), rel=1e-12)


@pytest.mark.parametrize("event", [CYCLIC, FIXED_SIZE, TRUNCATED, SELECTED], ids=lambda event: type(event).__name__)
def test_history_entries_of_other_events_cost_at_least_as_much(event):
    accountant = with_events("rdp", (event, 20))
    triples = with_history("rdp", [tuple(entry) for entry in accountant.history])
    assert triples.history[0][2] == 20
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", PrivacyWarning)
        assert triples.get_epsilon(DELTA) >= accountant.get_epsilon(DELTA)


@pytest.mark.parametrize("mechanism", MECHANISMS)
def test_events_without_a_claim_have_infinite_epsilon_and_a_reason(mechanism):
    forget_notices()
    accountant = with_events(mechanism, (UnclaimedEvent("batches were shuffled"), 3))
    assert accountant.history == [(0.0, 1.0, 3)]
    with pytest.warns(PrivacyWarning, match="shuffled"):
        assert accountant.get_epsilon(DELTA) == math.inf


def epsilon_after(mechanism, *entry, **keywords):
    return with_history(mechanism, [entry]).get_epsilon(DELTA, **keywords)


@pytest.mark.one_in(4, "mechanism", "target", others="slow")
@pytest.mark.one_in(2, "mechanism", "target")
@pytest.mark.parametrize("mechanism", ["rdp", "gdp", "prv"])
@pytest.mark.parametrize(("target", "tolerance"), [(0.3, 0.01), (3.0, 0.05), (30.0, 0.01)])
def test_epsilon_is_within_the_tolerance_below_the_target(mechanism, target, tolerance):
    settings = {"sample_rate": 0.02, "epochs": 4, "accountant": mechanism, "epsilon_tolerance": tolerance}
    found = get_noise_multiplier(target_epsilon=target, target_delta=DELTA, **settings)
    assert target - tolerance <= epsilon_after(mechanism, found, 0.02, 200) <= target


@pytest.mark.nightly
def test_no_step_is_lost_for_any_number_of_steps_to_2000():
    for n in range(1, 2001):
        found = get_noise_multiplier(target_epsilon=2.0, target_delta=DELTA, sample_rate=1 / n, epochs=3)
        assert 2.0 - 0.01 <= epsilon_after("rdp", found, 1 / n, 3 * n) <= 2.0, n


def test_keywords_reach_the_accountant():
    found = get_noise_multiplier(target_epsilon=8.0, target_delta=DELTA, sample_rate=0.02, steps=200, alphas=[2, 3])
    assert 8.0 - 0.01 <= epsilon_after("rdp", found, 0.02, 200, alphas=[2, 3]) <= 8.0
    assert found > 1.01 * get_noise_multiplier(target_epsilon=8.0, target_delta=DELTA, sample_rate=0.02, steps=200)


@pytest.mark.parametrize("given", [{}, {"epochs": 1, "steps": 10}])
def test_exactly_one_of_epochs_and_steps_is_given(given):
    with pytest.raises(ValueError, match="exactly one"):
        get_noise_multiplier(target_epsilon=1.0, target_delta=DELTA, sample_rate=0.1, **given)


@pytest.mark.parametrize(
    "wrong",
    [{"target_epsilon": 0.0}, {"target_delta": 0.0}, {"sample_rate": 0.0}, {"epochs": -1}, {"epsilon_tolerance": 0.0}],
)
def test_arguments_out_of_range_are_rejected(wrong):
    arguments = {"target_epsilon": 1.0, "target_delta": DELTA, "sample_rate": 0.1, "epochs": 1}
    with pytest.raises(ValueError, match=r"must|positive"):
        get_noise_multiplier(**(arguments | wrong))


def test_a_budget_that_is_too_small_is_rejected():
    with pytest.raises(ValueError, match="needs noise_multiplier > 1e"):
        get_noise_multiplier(target_epsilon=1e-6, target_delta=1e-9, sample_rate=1.0, steps=10**6)
    assert MAX_SIGMA == 1e6


def test_the_search_ends_for_a_target_that_needs_little_noise():
    # The example is in no step with probability above 1 - delta, so any noise is sufficient.
    found = get_noise_multiplier(target_epsilon=1.0, target_delta=0.1, sample_rate=1e-3, steps=10)
    assert with_history("rdp", [(found, 1e-3, 10)]).get_epsilon(0.1) <= 1.0
