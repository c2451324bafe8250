"""Accountants of the dp-accounting library, and the cases in which their results are rejected."""

import math
import sys

import pytest

from dpengine.accounting import (
    Charge,
    GaussianEvent,
    PoissonGaussianEvent,
    Relation,
    bounds_of,
    delta_of,
    epsilon_of,
    library,
    to_dp_accounting,
)
from dpengine.accounting.accountant import discretization_of
from dpengine.errors import AccountingRefusedError, MissingDependencyError

from .truth import gaussian

ADD_REMOVE, REPLACE = Relation.ADD_OR_REMOVE_ONE, Relation.REPLACE_ONE
SAMPLED = (Charge(PoissonGaussianEvent(0.02, 1.5), 200),)
MIXED = (*SAMPLED, Charge(GaussianEvent(40.0), 9), Charge(PoissonGaussianEvent(0.1, 4.0), 50, "void"))
UNSAMPLED = (Charge(GaussianEvent(10.0), 60), Charge(GaussianEvent(20.0), 160))


@pytest.mark.slow
@pytest.mark.one_in(3, "history", "relation", "delta")
@pytest.mark.parametrize("history", [SAMPLED, MIXED], ids=["sampled", "mixed"])
@pytest.mark.parametrize("relation", Relation)
@pytest.mark.parametrize("delta", [1e-3, 1e-9])
def test_pld_of_dp_accounting_agrees_with_ours(history, relation, delta):
    spent = epsilon_of(history, delta, "dp_accounting", relation)
    assert spent == pytest.approx(epsilon_of(history, delta, relation=relation), rel=2e-4)
    assert delta_of(history, spent, "dp_accounting", relation) == pytest.approx(delta, rel=1e-6)


@pytest.mark.parametrize("relation", [ADD_REMOVE, Relation.ZERO_OUT])
def test_dp_accounting_rdp_returns_the_result_of_the_library(relation):
    from dp_accounting.rdp import RdpAccountant

    theirs = RdpAccountant(neighboring_relation=library.library_relation(relation))
    for charge in MIXED:
        theirs.compose(to_dp_accounting(charge.event, charge.count))
    assert epsilon_of(MIXED, 1e-5, "dp_accounting_rdp", relation) == pytest.approx(theirs.get_epsilon(1e-5), rel=1e-12)
    assert delta_of(MIXED, 1.0, "dp_accounting_rdp", relation) == pytest.approx(theirs.get_delta(1.0), rel=1e-12)
    assert epsilon_of(MIXED, 1e-5, relation=relation) < theirs.get_epsilon(1e-5)


@pytest.mark.one_in(3, "relation", others="slow")
@pytest.mark.parametrize("relation", Relation)
def test_without_sampling_replace_one_is_at_distance_two_for_both(relation):
    mu = math.sqrt(0.6 + 0.4) * (2 if relation is REPLACE else 1)
    exact = gaussian(mu, 1e-6)
    assert epsilon_of(UNSAMPLED, 1e-6, "dp_accounting", relation) == pytest.approx(exact, rel=1e-4)
    assert exact < epsilon_of(UNSAMPLED, 1e-6, "dp_accounting_rdp", relation) < 1.15 * exact


def test_sampling_under_replace_one_is_rejected_by_renyi():
    for question in (
        lambda: epsilon_of(MIXED, 1e-5, "dp_accounting_rdp", REPLACE),
        lambda: delta_of(MIXED, 1.0, "dp_accounting_rdp", REPLACE),
    ):
        with pytest.raises(AccountingRefusedError, match=r"dp-accounting library.*replace-one"):
            question()


@pytest.mark.parametrize(("steps", "delta"), [(100_000, 1e-10), (200, 1e-15), (1, 1e-13), (200, 1e-200)])
def test_a_delta_below_the_rounding_of_the_library_is_rejected(steps, delta):
    history = (Charge(PoissonGaussianEvent(0.01, 6.0), steps),)
    with pytest.raises(AccountingRefusedError, match=r"dp-accounting library.*rounding"):
        epsilon_of(history, delta, "dp_accounting")


def test_an_epsilon_below_the_rounding_of_the_library_is_rejected():
    with pytest.raises(AccountingRefusedError, match="may dominate delta"):
        delta_of(SAMPLED, 30.0, "dp_accounting")


def test_dp_accounting_has_no_lower_bounds():
    for accountant in ("dp_accounting", "dp_accounting_rdp"):
        with pytest.raises(AccountingRefusedError, match="'pld', 'gdp', 'prv'"):
            bounds_of(SAMPLED, 1e-5, accountant)


@pytest.mark.parametrize("accountant", ["dp_accounting", "dp_accounting_rdp"])
def test_failures_and_infinite_answers_are_rejected(accountant, monkeypatch):
    class Failing:
        def get_epsilon(self, delta):
            return math.inf

        def get_delta(self, epsilon):
            raise OverflowError("too large")

    monkeypatch.setattr(library, "_accountant", lambda *_: Failing())
    with pytest.raises(AccountingRefusedError, match=r"dp-accounting library.*its result is inf"):
        epsilon_of(SAMPLED, 1e-5, accountant)
    with pytest.raises(AccountingRefusedError, match=r"dp-accounting library.*OverflowError: too large"):
        delta_of(SAMPLED, 1.0, accountant)


@pytest.mark.parametrize("accountant", ["dp_accounting", "dp_accounting_rdp"])
def test_without_the_library_the_error_says_what_to_install(accountant, monkeypatch):
    library._accountant.cache_clear()
    monkeypatch.setitem(sys.modules, "dp_accounting", None)
    with pytest.raises(MissingDependencyError, match="pip install dp-accounting"):
        epsilon_of(SAMPLED, 1e-5, accountant)


@pytest.mark.slow
def test_dp_accounting_uses_its_default_grid_except_for_large_losses():
    assert discretization_of(SAMPLED, 1e-5, "dp_accounting") == 1e-4
    assert discretization_of(SAMPLED, 1e-5, "dp_accounting_rdp") is None
    assert discretization_of((), 1e-5, "dp_accounting") is None
    large = (Charge(PoissonGaussianEvent(0.5, 0.1), 3),)
    assert discretization_of(large, 1e-5, "dp_accounting") > 1.5e-4
    assert epsilon_of(large, 1e-5, "dp_accounting") == pytest.approx(epsilon_of(large, 1e-5), rel=2e-3)
