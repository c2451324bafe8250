"""Privacy events: their numbers, cycles of banded noise, and the event of each participation and noise correlation."""

import ast
import json
import math
from dataclasses import replace
from pathlib import Path

import dp_accounting
import pytest
from dp_accounting.pld import PLDAccountant

import dpengine.accounting as accounting
from dpengine.accounting import (
    Charge,
    CyclicGaussianEvent,
    EpochParticipation,
    FixedSizeGaussianEvent,
    FixedSizeParticipation,
    GaussianEvent,
    Ledger,
    MatrixGaussianEvent,
    NonPrivateEvent,
    PoissonGaussianEvent,
    PoissonParticipation,
    Relation,
    SeparatedParticipation,
    TruncatedGaussianEvent,
    TruncatedParticipation,
    UnclaimedEvent,
    UnknownParticipation,
    epsilon_of,
    release_event,
    to_dp_accounting,
)
from dpengine.accounting.events import event_from_state, event_to_state
from dpengine.accounting.run_events import (
    INDEPENDENT,
    Correlation,
    StepParameters,
    accounted_sample_rate,
    event_of_step,
    relation_of,
)
from dpengine.errors import AccountingRefusedError, InvalidBudgetError, LedgerError

EVENTS = [GaussianEvent(1.1), PoissonGaussianEvent(0.1, 0.7), NonPrivateEvent(), UnclaimedEvent("shuffled")]


@pytest.mark.parametrize("event", EVENTS, ids=lambda event: type(event).__name__)
def test_events_survive_json(event):
    assert event_from_state(json.loads(json.dumps(event_to_state(event)))) == event


@pytest.mark.parametrize("sigma", [-1.0, math.nan, math.inf, "1", True, None])
def test_noise_multiplier_must_be_finite_and_not_negative(sigma):
    with pytest.raises(InvalidBudgetError, match="noise_multiplier="):
        GaussianEvent(sigma)
    with pytest.raises(InvalidBudgetError, match="noise_multiplier="):
        PoissonGaussianEvent(0.5, sigma)


@pytest.mark.parametrize("rate", [0.0, -0.1, 1.0000001, math.nan, math.inf, "0.1", True])
def test_sample_rate_must_lie_in_zero_one(rate):
    with pytest.raises(InvalidBudgetError, match="sample_rate="):
        PoissonGaussianEvent(rate, 1.0)
    with pytest.raises(InvalidBudgetError, match="sample_rate="):
        release_event(noise_multiplier=1.0, sample_rate=rate)


def test_an_event_is_reduced_to_its_simplest_form():
    assert release_event(noise_multiplier=0, sample_rate=0.5) == NonPrivateEvent()
    assert release_event(noise_multiplier=2, sample_rate=1) == GaussianEvent(2.0)
    assert release_event(noise_multiplier=2, sample_rate=0.5) == PoissonGaussianEvent(0.5, 2.0)


@pytest.mark.parametrize(
    "state",
    [{"type": "laplace"}, {}, {"type": "gaussian", "sigma": 1.0}, {"type": "gaussian"}, None, [], {"type": []}, 3],
)
def test_a_damaged_event_is_rejected(state):
    with pytest.raises(LedgerError):
        event_from_state(state)


def test_dp_accounting_reads_our_events():
    accountant = PLDAccountant()
    accountant.compose(to_dp_accounting(PoissonGaussianEvent(0.05, 2.0), 100))
    accountant.compose(to_dp_accounting(GaussianEvent(20.0), 5))
    history = (accounting.Charge(PoissonGaussianEvent(0.05, 2.0), 100), accounting.Charge(GaussianEvent(20.0), 5))
    assert accounting.epsilon_of(history, 1e-5) == pytest.approx(accountant.get_epsilon(1e-5), rel=1e-4)
    assert to_dp_accounting(GaussianEvent(0.0)) == dp_accounting.NonPrivateDpEvent()
    with pytest.raises(AccountingRefusedError, match="shuffled"):
        to_dp_accounting(UnclaimedEvent("shuffled"))


def test_accounting_never_imports_torch():
    for file in Path(accounting.__file__).parent.glob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            names = (
                [a.name for a in node.names] if isinstance(node, ast.Import) else [getattr(node, "module", "") or ""]
            )
            assert not any(name.split(".")[0] == "torch" for name in names), file


DELTA = 1e-5
EVENT = CyclicGaussianEvent(0.2, 1.3, 4, "a")


def cycles(count, rate=0.2, sigma=1.3):
    return epsilon_of((Charge(PoissonGaussianEvent(rate, sigma), count),), DELTA)


@pytest.mark.parametrize(("steps", "count"), [(1, 1), (3, 1), (4, 1), (5, 2), (8, 2), (9, 3)])
def test_a_partial_cycle_counts_as_a_full_cycle(steps, count):
    assert epsilon_of((Charge(EVENT, steps),), DELTA) == cycles(count)


def test_steps_of_one_run_share_cycles_across_other_charges():
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


def test_cycles_with_full_participation_are_gaussian_events():
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
def test_numbers_out_of_range_are_rejected(bad):
    with pytest.raises(ValueError):
        CyclicGaussianEvent(*bad, "a")


BANDS = Correlation(4)
WHOLE_RUN = Correlation(None, lambda cycle: (1.0, 1.5, 2.25))
UNKNOWN = Correlation(None)
Q = accounted_sample_rate(0.25)


def event(participation, correlation=INDEPENDENT, *, sigma=2.0, relation=Relation.ZERO_OUT, batches=1):
    return event_of_step(participation, correlation, StepParameters(sigma, 1000, relation, "run", batches))


@pytest.mark.parametrize(
    ("participation", "correlation", "expected"),
    [
        (PoissonParticipation(0.25), INDEPENDENT, PoissonGaussianEvent(Q, 2.0)),
        (PoissonParticipation(1.0), INDEPENDENT, GaussianEvent(2.0)),
        (PoissonParticipation(0.25, 8), INDEPENDENT, CyclicGaussianEvent(Q, 2.0, 8, "run")),
        (PoissonParticipation(0.25, 4), BANDS, CyclicGaussianEvent(Q, 2.0, 4, "run")),
        (PoissonParticipation(1.0, 3), WHOLE_RUN, MatrixGaussianEvent(2.0, 3, (1.0, 1.5, 2.25), "run")),
        (PoissonParticipation(0.25, 3), BANDS, None),
        (PoissonParticipation(0.25), WHOLE_RUN, None),
        (PoissonParticipation(1.0, 3), UNKNOWN, None),
        (
            TruncatedParticipation(PoissonParticipation(0.25), 300),
            INDEPENDENT,
            TruncatedGaussianEvent(1000, Q, 300, 2.0),
        ),
        (
            TruncatedParticipation(PoissonParticipation(0.25, 4, equal_groups=True), 90),
            BANDS,
            TruncatedGaussianEvent(250, Q, 90, 2.0, 4, "run"),
        ),
        (TruncatedParticipation(PoissonParticipation(1.0, 4), 250), INDEPENDENT, None),  # a group may have 300
        (TruncatedParticipation(PoissonParticipation(0.25, 3), 90), BANDS, None),
        (FixedSizeParticipation(50), INDEPENDENT, FixedSizeGaussianEvent(1000, 50, 2.0)),
        (FixedSizeParticipation(50), BANDS, None),
        (SeparatedParticipation(5), INDEPENDENT, CyclicGaussianEvent(1.0, 2.0, 5, "run")),
        (SeparatedParticipation(4), BANDS, CyclicGaussianEvent(1.0, 2.0, 4, "run")),
        (SeparatedParticipation(3), BANDS, None),
        (SeparatedParticipation(5), WHOLE_RUN, None),
        (EpochParticipation(10, claimed=True), INDEPENDENT, CyclicGaussianEvent(1.0, 2.0, 10, "run")),
        (EpochParticipation(10, claimed=True), BANDS, None),
        (UnknownParticipation("because"), INDEPENDENT, None),
        (UnknownParticipation("because"), WHOLE_RUN, None),
    ],
)
def test_a_combination_has_the_event_of_its_row(participation, correlation, expected):
    found = event(participation, correlation)
    assert isinstance(found, UnclaimedEvent) if expected is None else found == expected
    assert event(participation, correlation, sigma=0.0) == NonPrivateEvent()


def test_mechanisms_without_an_analysis_claim_no_epsilon():
    assert event(UnknownParticipation("because")).reason == "because"
    for participation in (SeparatedParticipation(5), EpochParticipation(10, claimed=True)):
        assert isinstance(event(participation, relation=Relation.ADD_OR_REMOVE_ONE), UnclaimedEvent)
    assert "noise of 4 bands" in event(PoissonParticipation(0.25, 3), BANDS).reason


def test_shuffled_batches_have_an_event_without_amplification():
    whole = CyclicGaussianEvent(1.0, 2.0, 10, "run")
    assert event(EpochParticipation(10)).unamplified == whole
    assert event(EpochParticipation(10), batches=2).unamplified is None
    assert event(EpochParticipation(10), relation=Relation.ADD_OR_REMOVE_ONE).unamplified is None
    assert event(EpochParticipation(0)).unamplified is None


def test_merged_poisson_batches_have_less_noise_each():
    assert event(PoissonParticipation(0.25), batches=4) == PoissonGaussianEvent(Q, 1.0)


def test_the_accounted_rate_is_above_that_of_the_draw():
    for rate in (0.0, 1e-30, 1e-3, 0.25, 1 - 1e-12):
        assert accounted_sample_rate(rate) >= rate + 2.0**-60 or accounted_sample_rate(rate) == math.nextafter(rate, 1)
    assert accounted_sample_rate(1.0) == 1.0


def test_the_relation_follows_from_the_sampling_and_the_public_constants():
    assert relation_of(PoissonParticipation(0.25), public_size=True) is Relation.ZERO_OUT
    assert relation_of(PoissonParticipation(0.25), public_size=False) is Relation.ADD_OR_REMOVE_ONE
    assert relation_of(FixedSizeParticipation(50), public_size=True) is Relation.REPLACE_ONE


@pytest.mark.parametrize("wrong", [{"sample_rate": 1.5}, {"sample_rate": -0.1}, {"cycle_length": 0}])
def test_participation_out_of_range_is_rejected(wrong):
    with pytest.raises(Exception, match=next(iter(wrong))):
        PoissonParticipation(**{"sample_rate": 0.5} | wrong)
