"""Events of truncated batches, fixed-size batches, units with several examples, and hyperparameter selection."""

import itertools
import json
import math
from fractions import Fraction

import dp_accounting
import numpy as np
import pytest
from scipy import integrate, stats

from dpengine.accounting import (
    ACCOUNTANTS,
    Charge,
    FixedSizeGaussianEvent,
    GaussianEvent,
    Ledger,
    MixtureGaussianEvent,
    PoissonGaussianEvent,
    Relation,
    RepeatAndSelectEvent,
    TruncatedGaussianEvent,
    bounds_of,
    delta_of,
    epsilon_of,
    mu_gdp,
    to_dp_accounting,
)
from dpengine.accounting.events import event_from_state, event_to_state
from dpengine.accounting.library import library_relation
from dpengine.accounting.rdp import ORDERS
from dpengine.accounting.tilted_pld.batch_losses import BATCH_EVENT_PAIRS, FixedSizePair, MixturePair, truncation_of
from dpengine.accounting.tilted_pld.loss_pairs import Direction
from dpengine.errors import AccountingRefusedError, InvalidBudgetError

TRUNCATED = TruncatedGaussianEvent(10_000, 0.01, 110, 1.2)
FIXED = FixedSizeGaussianEvent(60_000, 600, 1.2)
MIXTURE = MixtureGaussianEvent(2.0, (0.0, 1.0, 2.0, 3.0), (0.9, 0.06, 0.03, 0.01))
SELECTED = RepeatAndSelectEvent(((PoissonGaussianEvent(0.01, 1.5), 300), (GaussianEvent(40.0), 2)), 10.0, 1.0)
RELATION = {TRUNCATED: Relation.ZERO_OUT, FIXED: Relation.REPLACE_ONE, MIXTURE: Relation.ADD_OR_REMOVE_ONE}


def normal(x, mean, sigma):
    return np.exp(-(((x - mean) / sigma) ** 2) / 2) / (sigma * math.sqrt(2 * math.pi))


def integrated(p, q, eps, x):
    return integrate.trapezoid(np.maximum(p - math.exp(eps) * q, 0), x)


@pytest.mark.slow
@pytest.mark.parametrize(("event", "steps"), [(TRUNCATED, 50), (MIXTURE, 20)])
@pytest.mark.hazard("S9")
def test_the_library_agrees_on_truncated_batches_and_mixtures(event, steps):
    relation = library_relation(RELATION[event])
    accountant = dp_accounting.pld.PLDAccountant(relation, 1e-2 if event is MIXTURE else 1e-3)
    accountant.compose(to_dp_accounting(event, steps))
    theirs = accountant.get_epsilon(1e-6)
    assert theirs * (1 - 3e-3) < epsilon_of((Charge(event, steps),), 1e-6, relation=RELATION[event]) < theirs * 1.00001


@pytest.mark.hazard("S9")
def test_truncation_probabilities_match_enumeration():
    """Enumerates seven examples: P(the other six fill the batch), and P(the seventh is kept | they do)."""
    n, q, most = 7, 0.4, 2
    full = taken = 0.0
    for pattern in itertools.product([0, 1], repeat=n):
        chance = math.prod(q if one else 1 - q for one in pattern)
        if sum(pattern[1:]) >= most:
            full += chance
            taken += chance * pattern[0] * most / sum(pattern)
    found = truncation_of(TruncatedGaussianEvent(n, q, most, 1.0))
    assert found == pytest.approx((1 - full, full, taken / full), rel=1e-8)
    assert found[0] >= (1 - full) * (1 - 1e-12)
    assert found[1] >= full * (1 - 1e-12) and found[2] >= taken / full * (1 - 1e-12)


def test_rare_batches_below_the_truncation_size_raise_epsilon():
    """At a tiny delta, one batch in 10**9 below the truncation size determines epsilon."""
    n, q, most, sigma, delta = 30, 0.52, 1, 10.0, 1e-15
    room = (1 - q) ** (n - 1)
    poisson = epsilon_of((Charge(PoissonGaussianEvent(q, sigma)),), delta / room)
    found = epsilon_of((Charge(TruncatedGaussianEvent(n, q, most, sigma)),), delta, relation=Relation.ZERO_OUT)
    assert found >= poisson > 0.2


@pytest.mark.slow
@pytest.mark.hazard("S9")
def test_truncation_raises_epsilon_only_if_it_occurs():
    plain = epsilon_of((Charge(PoissonGaussianEvent(0.01, 1.2), 50),), 1e-5)
    costs = []
    for largest in (200, 140, 120, 100):
        history = (Charge(TruncatedGaussianEvent(10_000, 0.01, largest, 1.2), 50),)
        costs.append(epsilon_of(history, 1e-5, relation=Relation.ZERO_OUT))
    assert costs[0] == pytest.approx(plain, rel=1e-5)
    assert costs == sorted(costs) and costs[-1] > 2 * plain


def test_steps_of_a_truncated_cyclic_run_are_counted_by_cycles():
    turns = TruncatedGaussianEvent(10_000, 0.01, 110, 1.2, cycle_length=4, run="a")
    cut = epsilon_of((Charge(turns, 9),), 1e-5, relation=Relation.ZERO_OUT)
    assert cut == epsilon_of((Charge(TRUNCATED, 3),), 1e-5, relation=Relation.ZERO_OUT)


SHORT = MixtureGaussianEvent(1.0, (0.0, 1.0), (0.99, 0.01 - 9e-10))


def short_delta(eps, steps=1):
    """Delta of SHORT: 1 minus the sum of its probabilities is an atom at infinite loss."""
    absent, present = SHORT.probabilities
    missing = float(1 - Fraction(absent) - Fraction(present))
    if steps > 1:  # no finite loss is as large as the epsilons of this test
        return float(1 - (1 - Fraction(missing)) ** steps)
    cut = 0.5 + math.log((math.exp(eps) - absent) / present)
    finite = absent * stats.norm.sf(cut) + present * stats.norm.sf(cut - 1) - math.exp(eps + stats.norm.logsf(cut))
    return missing + finite


@pytest.mark.parametrize("eps", [0.5, 1.0, 5.0, 20.0])
def test_missing_mixture_probability_is_infinite_loss(eps):
    truth = short_delta(eps)
    assert truth * (1 - 1e-12) <= delta_of((Charge(SHORT),), eps) <= truth * (1 + 1e-6)


@pytest.mark.slow
def test_missing_probability_adds_up_over_steps_and_bounds_delta():
    truth = short_delta(50.0, 1000)
    assert truth <= delta_of((Charge(SHORT, 1000),), 50.0) <= truth * (1 + 1e-6)
    assert epsilon_of((Charge(SHORT),), 1e-10) == math.inf
    assert bounds_of((Charge(SHORT),), 1e-10) == (0.0, math.inf, math.inf)
    delta = short_delta(1.25)
    lower, estimate, upper = bounds_of((Charge(SHORT),), delta)
    assert lower <= 1.25 <= upper < 1.25 * (1 + 1e-5) and estimate <= upper
    assert epsilon_of((Charge(SHORT),), delta) == upper
    with pytest.raises(AccountingRefusedError, match=r"sum to 9e-10 less than 1.*accountant='pld'"):
        to_dp_accounting(SHORT)
    with pytest.raises(AccountingRefusedError) as raised:
        delta_of((Charge(SHORT),), 20.0, accountant="dp_accounting")
    assert str(raised.value).count("DPE025") == 1


def test_rounded_probabilities_add_no_infinite_loss():
    rng = np.random.default_rng(0)
    for size in range(2, 40):
        chances = rng.dirichlet(np.ones(size - 1)) * 0.1
        event = MixtureGaussianEvent(1.0, tuple(range(size)), (1 - math.fsum(chances), *chances))
        assert event.missing == 0


def test_probabilities_above_1_cost_no_less_than_those_of_sum_1():
    over = MixtureGaussianEvent(1.0, (0.0, 1.0), (0.99 + 9e-10, 0.01))
    plain = MixtureGaussianEvent(1.0, (0.0, 1.0), (0.99, 0.01))
    pair = BATCH_EVENT_PAIRS[MixtureGaussianEvent].mixture(over, Direction.ADD)[0][1]
    assert math.fsum(pair.probabilities) == pytest.approx(1, abs=1e-15)
    assert epsilon_of((Charge(over, 10),), 1e-6) >= epsilon_of((Charge(plain, 10),), 1e-6) * (1 - 1e-6)


@pytest.mark.one_in(4, "rate", "eps", others="slow")
@pytest.mark.one_in(2, "rate", "eps")
@pytest.mark.parametrize(("rate", "sigma"), [(0.01, 1.2), (0.3, 0.8), (1.0, 2.0)])
@pytest.mark.parametrize("eps", [0.05, 1.0, 4.0])
def test_the_pair_of_fixed_size_subsets_matches_the_theorem_in_both_directions(rate, sigma, eps):
    pair, s = FixedSizePair(rate, sigma), sigma / 2
    x = np.linspace(-14 * s - 1, 14 * s + 2, 400_001)
    subset = (1 - rate) * normal(x, 0, s) + rate * normal(x, 1, s)
    masses = pair.masses(np.linspace(-14 * s, 14 * s, 200_001))
    # Both directions, by quadrature of the densities.
    assert np.maximum(masses.p - math.exp(eps) * masses.q, 0).sum() == pytest.approx(
        integrated(subset, normal(x, 0, s), eps, x), abs=1e-6
    )
    assert np.maximum(masses.p - math.exp(-eps) * masses.q, 0).sum() == pytest.approx(
        integrated(normal(x, 0, s), subset, -eps, x), abs=1e-6
    )
    assert masses.p.sum() == pytest.approx(1, abs=1e-12) and masses.q.sum() == pytest.approx(1, abs=1e-12)


def test_epsilon_of_fixed_size_subsets_lies_between_poisson_and_renyi():
    history, relation = (Charge(FIXED, 500),), Relation.REPLACE_ONE
    found = epsilon_of(history, 1e-5, relation=relation)
    assert found < 0.75 * epsilon_of(history, 1e-5, "dp_accounting_rdp", relation)
    assert found > 4 * epsilon_of((Charge(PoissonGaussianEvent(0.01, 1.2), 500),), 1e-5, relation=relation)
    assert bounds_of(history, 1e-5, relation=relation)[0] == 0.0  # the pair is an upper bound itself
    all_rows = FixedSizeGaussianEvent(50, 50, 2.0)
    exact = epsilon_of((Charge(GaussianEvent(2.0)),), 1e-5, relation=relation)
    assert epsilon_of((Charge(all_rows),), 1e-5, relation=relation) == pytest.approx(exact, rel=1e-9)


@pytest.mark.one_in(4, "direction", "norms", others="slow")
@pytest.mark.parametrize("direction", [Direction.REMOVE, Direction.ADD])
@pytest.mark.parametrize("norms", [(0.0, 1.0, 3.0), (0.5, 1.0, 3.0)])
def test_the_pair_of_a_mixture_matches_its_densities(direction, norms):
    chances, sigma = (0.9, 0.07, 0.03), 1.5
    pair = MixturePair(norms, chances, sigma, direction)
    sign = 1 if direction is Direction.REMOVE else -1
    x = np.linspace(-20, 22, 400_001) * 1.0
    mixed = sum(c * normal(x, sign * s, sigma) for s, c in zip(norms, chances, strict=True))
    p, q = (mixed, normal(x, 0, sigma)) if sign > 0 else (normal(x, 0, sigma), mixed)
    masses = pair.masses(x)
    for eps in (-0.3, 0.0, 0.05, 1.0):
        assert np.maximum(masses.p - math.exp(eps) * masses.q, 0).sum() == pytest.approx(
            integrated(p, q, eps, x), abs=1e-7
        )
    losses = pair.loss(x[::5000])
    back = pair.output(losses)
    assert np.all((np.abs(back - x[::5000]) < 1e-9) | (np.abs(losses - pair.loss(back)) < 1e-12))


def test_a_mixture_of_two_norms_equals_poisson_sampling():
    two = MixtureGaussianEvent(2.0, (0.0, 1.0), (0.9, 0.1))
    for delta in (1e-3, 1e-6, 1e-30):
        one = epsilon_of((Charge(PoissonGaussianEvent(0.1, 2.0), 100),), delta)
        assert epsilon_of((Charge(two, 100),), delta) == pytest.approx(one, rel=1e-5)


@pytest.mark.parametrize("unit", [1e-200, 1e-3, 1.0, 1e12])
def test_epsilon_depends_only_on_the_ratio_of_noise_to_norms(unit):
    one = MixtureGaussianEvent(1.0, (0.0, 0.5, 1.0), (0.9, 0.05, 0.05))
    scaled = MixtureGaussianEvent(unit, (0.0, 0.5 * unit, unit), (0.9, 0.05, 0.05))
    assert epsilon_of((Charge(scaled, 7),), 1e-6) == pytest.approx(epsilon_of((Charge(one, 7),), 1e-6), rel=1e-9)


def test_extreme_norms_have_an_epsilon():
    tiny = MixtureGaussianEvent(1.0, (1e-300, 1.0), (0.5, 0.5))
    assert epsilon_of((Charge(tiny),), 1e-5) == pytest.approx(
        epsilon_of((Charge(PoissonGaussianEvent(0.5, 1.0)),), 1e-5), rel=1e-6
    )
    assert epsilon_of((Charge(MixtureGaussianEvent(1.0, (0.0, 1e300), (0.5, 0.5))),), 1e-5) == math.inf
    assert epsilon_of((Charge(MixtureGaussianEvent(1.0, (0.0, 0.0), (0.5, 0.5))),), 1e-5) == 0


@pytest.mark.parametrize("shape", [0.0, 0.5, 1.0, 3.0])
@pytest.mark.parametrize("mean", [1.5, 10.0, 1000.0])
@pytest.mark.hazard("A10")
def test_the_cost_of_tuning_matches_dp_accounting(mean, shape):
    event = RepeatAndSelectEvent(SELECTED.base, mean, shape)
    accountant = dp_accounting.rdp.RdpAccountant(orders=ORDERS)
    accountant.compose(to_dp_accounting(event))
    assert epsilon_of((Charge(event),), 1e-6, "rdp") == pytest.approx(accountant.get_epsilon(1e-6), rel=1e-6)


@pytest.mark.hazard("A10")
def test_tuning_costs_more_than_a_run_and_little_for_many_runs():
    one = tuple(Charge(event, count) for event, count in SELECTED.base)
    costs = [
        epsilon_of((Charge(RepeatAndSelectEvent(SELECTED.base, mean, math.inf)),), 1e-6, "rdp")
        for mean in (2.0, 10.0, 100.0)
    ]
    assert epsilon_of(one, 1e-6, "rdp") < costs[0] < costs[1] < costs[2] < 100 / 2 * costs[0]
    single_run = RepeatAndSelectEvent(SELECTED.base, 1.0, 1.0)  # always one run
    assert epsilon_of((Charge(single_run),), 1e-6, "rdp") == epsilon_of(one, 1e-6, "rdp")


@pytest.mark.slow
@pytest.mark.parametrize("event", [TRUNCATED, MIXTURE], ids=["truncated", "mixture"])
def test_epsilon_of_mixed_events_is_invariant_to_order_and_splits(event):
    other, relation = Charge(PoissonGaussianEvent(0.02, 1.5), 30), RELATION[event]
    whole = epsilon_of((Charge(event, 20), other), 1e-5, relation=relation)
    split = (Charge(event, 7), other, Charge(event, 13))
    assert epsilon_of(split, 1e-5, relation=relation) == whole
    assert whole > epsilon_of((Charge(event, 20),), 1e-5, relation=relation)
    assert delta_of(split, whole, relation=relation) == pytest.approx(1e-5, rel=1e-2)
    assert mu_gdp(split, relation=relation) > 0


@pytest.mark.parametrize(
    ("event", "relation"),
    [
        (TRUNCATED, Relation.ADD_OR_REMOVE_ONE),
        (TRUNCATED, Relation.REPLACE_ONE),
        (FIXED, Relation.ADD_OR_REMOVE_ONE),
        (MIXTURE, Relation.REPLACE_ONE),
    ],
)
def test_relations_without_a_bound_are_rejected(event, relation):
    for question in (epsilon_of, delta_of, bounds_of):
        with pytest.raises(AccountingRefusedError, match="There is no bound for"):
            question((Charge(event, 3),), 0.01, relation=relation)


@pytest.mark.parametrize("accountant", [name for name in ACCOUNTANTS if not name.startswith("dp_accounting")])
def test_accountants_without_a_bound_reject(accountant):
    for event, relation in RELATION.items():
        if accountant != "pld":
            with pytest.raises(AccountingRefusedError):
                epsilon_of((Charge(event, 3), Charge(GaussianEvent(5.0))), 1e-5, accountant, relation)
    if accountant != "rdp":
        for question in (epsilon_of, delta_of):
            with pytest.raises(AccountingRefusedError):
                question((Charge(SELECTED), Charge(GaussianEvent(5.0))), 0.1, accountant)


@pytest.mark.parametrize("shape", [0.0, 1.0, 5.0, math.inf])
@pytest.mark.parametrize("mean", [1.0, 1.001, 2.0, 50.0])
def test_tuning_never_lowers_the_earlier_epsilon(mean, shape):
    spent = Charge(GaussianEvent(0.3))
    selected = Charge(RepeatAndSelectEvent(((GaussianEvent(1e4), 1),), mean, shape), 15)
    assert epsilon_of((spent, selected), 1e-5, "rdp") >= epsilon_of((spent,), 1e-5, "rdp")


@pytest.mark.parametrize("event", [*RELATION, SELECTED, RepeatAndSelectEvent(SELECTED.base, 3.0, math.inf)])
def test_events_are_kept_in_ledgers(event):
    assert event_from_state(json.loads(json.dumps(event_to_state(event), allow_nan=False))) == event
    ledger, again = Ledger(), Ledger()
    ledger.charge(event, count=3)
    again.load_state_dict(json.loads(json.dumps(ledger.state_dict())))
    assert again.history == ledger.history


@pytest.mark.parametrize(
    "make",
    [
        lambda: TruncatedGaussianEvent(0, 0.1, 5, 1.0),
        lambda: TruncatedGaussianEvent(10, 0.0, 5, 1.0),
        lambda: TruncatedGaussianEvent(10, 0.1, -1, 1.0),
        lambda: FixedSizeGaussianEvent(10, 11, 1.0),
        lambda: FixedSizeGaussianEvent(10, 0, 1.0),
        lambda: MixtureGaussianEvent(1.0, (0.0, 1.0), (0.5, 0.6)),
        lambda: MixtureGaussianEvent(1.0, (0.0, -1.0), (0.5, 0.5)),
        lambda: MixtureGaussianEvent(1.0, (), ()),
        lambda: RepeatAndSelectEvent((), 10.0),
        lambda: RepeatAndSelectEvent(SELECTED.base, 0.5),
        lambda: RepeatAndSelectEvent(SELECTED.base, 0.5, math.inf),  # the bound for Poisson would fall below 0
        lambda: RepeatAndSelectEvent(SELECTED.base, math.inf),
        lambda: RepeatAndSelectEvent(SELECTED.base, 3.0, -1.0),
        lambda: RepeatAndSelectEvent(((SELECTED, 1),), 3.0),
    ],
)
def test_bad_events_are_rejected(make):
    with pytest.raises(InvalidBudgetError):
        make()


def test_events_without_noise_have_infinite_epsilon():
    for event in (TruncatedGaussianEvent(10, 0.1, 5, 0.0), FixedSizeGaussianEvent(10, 5, 0.0)):
        assert epsilon_of((Charge(event),), 1e-5, relation=Relation.ZERO_OUT) == math.inf
    bare = RepeatAndSelectEvent(((GaussianEvent(0.0), 1),), 5.0)
    assert epsilon_of((Charge(bare),), 1e-5, "rdp") == math.inf
