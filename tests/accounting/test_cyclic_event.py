"""Steps of a run with banded noise cost as many sampled Gaussians as there are cycles."""

from dataclasses import replace

import pytest

from dpengine.accounting import (
    Charge,
    CyclicGaussianEvent,
    GaussianEvent,
    Ledger,
    MatrixGaussianEvent,
    PoissonGaussianEvent,
    Relation,
    TruncatedGaussianEvent,
    epsilon_of,
    to_dp_accounting,
)
from dpengine.accounting.events import event_from_state, event_to_state
from dpengine.errors import LedgerError

DELTA = 1e-5
EVENT = CyclicGaussianEvent(0.2, 1.3, 4, "a")


def cycles(count, rate=0.2, sigma=1.3):
    return epsilon_of((Charge(PoissonGaussianEvent(rate, sigma), count),), DELTA)


@pytest.mark.parametrize(("steps", "count"), [(1, 1), (3, 1), (4, 1), (5, 2), (8, 2), (9, 3)])
def test_a_cycle_that_was_begun_counts_whole(steps, count):
    assert epsilon_of((Charge(EVENT, steps),), DELTA) == cycles(count)


def test_steps_of_one_run_count_together_whatever_lies_between():
    other = Charge(GaussianEvent(50.0))
    history = (Charge(EVENT, 3), other, Charge(EVENT, 2, "void"), Charge(EVENT, 3))
    assert epsilon_of(history, DELTA) == epsilon_of((Charge(PoissonGaussianEvent(0.2, 1.3), 2), other), DELTA)


def test_runs_do_not_share_cycles():
    second = CyclicGaussianEvent(0.2, 1.3, 4, "b")
    assert epsilon_of((Charge(EVENT, 1), Charge(second, 1)), DELTA) == cycles(2)
    ledger = Ledger()
    ledger.charge(EVENT)
    ledger.charge(second)
    assert len(ledger.history) == 2


CUT = TruncatedGaussianEvent(1000, 0.1, 200, 1.0, cycle_length=10, run="a")
MATRIX = MatrixGaussianEvent(2.0, 10, (1.0, 2.5), "a")


@pytest.mark.parametrize("event", [EVENT, CUT, MATRIX], ids=["cyclic", "truncated", "matrix"])
def test_runs_without_a_name_are_never_merged(event):
    unnamed = replace(event, run="")
    rel = 1e-11  # sketches of one kind and of three choose tilts that differ in the sixth digit
    runs = [(Charge(replace(event, run=name)),) for name in ("a", "b", "c")]
    for charges in ((Charge(unnamed),) * 3, (Charge(unnamed, 3),), (Charge(unnamed, 2), Charge(unnamed, 1, "void"))):
        found = epsilon_of(charges, DELTA, relation=Relation.ZERO_OUT)
        assert found == pytest.approx(epsilon_of(sum(runs, ()), DELTA, relation=Relation.ZERO_OUT), rel=rel)
    assert found > 1.2 * epsilon_of((Charge(event, 3),), DELTA, relation=Relation.ZERO_OUT)
    ledger = Ledger()
    for _ in range(2):
        ledger.charge(unnamed)
    twice = epsilon_of((*runs[0], *runs[1]), DELTA, relation=Relation.ZERO_OUT)
    assert epsilon_of(ledger.history, DELTA, relation=Relation.ZERO_OUT) == pytest.approx(twice, rel=rel)
    assert to_dp_accounting(unnamed, 3) == to_dp_accounting(replace(event, cycle_length=1, run=""), 3)


def test_where_all_of_a_group_participate_cycles_are_plain_gaussians():
    event = CyclicGaussianEvent(1.0, 3.0, 5, "a")
    assert epsilon_of((Charge(event, 11),), DELTA) == epsilon_of((Charge(GaussianEvent(3.0), 3),), DELTA)


@pytest.mark.slow
@pytest.mark.parametrize("accountant", ["pld", "rdp"])
def test_dp_accounting_agrees(accountant):
    import dp_accounting
    from dp_accounting import pld, rdp

    event = to_dp_accounting(EVENT, 11)
    assert event == dp_accounting.SelfComposedDpEvent(to_dp_accounting(PoissonGaussianEvent(0.2, 1.3)).event, 3)
    theirs = {"pld": pld.PLDAccountant, "rdp": rdp.RdpAccountant}[accountant]().compose(event).get_epsilon(DELTA)
    assert epsilon_of((Charge(EVENT, 11),), DELTA, accountant) == pytest.approx(theirs, rel=2e-3)


def test_an_event_survives_a_round_trip():
    assert event_from_state(event_to_state(EVENT)) == EVENT
    with pytest.raises(LedgerError):
        event_from_state({**event_to_state(EVENT), "run": 3})


@pytest.mark.parametrize("bad", [(1.5, 1.0, 2), (0.5, -1.0, 2), (0.5, 1.0, 0)])
def test_numbers_out_of_range_are_refused(bad):
    with pytest.raises(ValueError):
        CyclicGaussianEvent(*bad, "a")
