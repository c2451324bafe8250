"""The event of a step: one row for each combination of participation and noise correlation."""

import math

import pytest

from dpengine.accounting import (
    CyclicGaussianEvent,
    EpochParticipation,
    FixedSizeGaussianEvent,
    FixedSizeParticipation,
    GaussianEvent,
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
)
from dpengine.accounting.run_events import (
    INDEPENDENT,
    Correlation,
    StepParameters,
    accounted_sample_rate,
    event_of_step,
    relation_of,
)

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


def test_what_has_no_analysis_has_no_claim():
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


def test_the_relation_follows_from_the_batches_and_what_is_public():
    assert relation_of(PoissonParticipation(0.25), public_size=True) is Relation.ZERO_OUT
    assert relation_of(PoissonParticipation(0.25), public_size=False) is Relation.ADD_OR_REMOVE_ONE
    assert relation_of(FixedSizeParticipation(50), public_size=True) is Relation.REPLACE_ONE


@pytest.mark.parametrize("wrong", [{"sample_rate": 1.5}, {"sample_rate": -0.1}, {"cycle_length": 0}])
def test_participation_out_of_range_is_refused(wrong):
    with pytest.raises(Exception, match=next(iter(wrong))):
        PoissonParticipation(**{"sample_rate": 0.5} | wrong)
