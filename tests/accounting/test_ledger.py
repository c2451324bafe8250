import json

import pytest

from dpengine.accounting import (
    Charge,
    GaussianEvent,
    Ledger,
    NonPrivateEvent,
    PoissonGaussianEvent,
    UnclaimedEvent,
    epsilon_of,
)
from dpengine.errors import InvalidBudgetError, LedgerError

STEP = PoissonGaussianEvent(0.1, 1.0)
OTHER = PoissonGaussianEvent(0.1, 2.0)


def mixed_ledger():
    ledger = Ledger()
    for event, count, kind in [
        (STEP, 3, "release"),
        (STEP, 1, "void"),
        (GaussianEvent(9.0), 4, "clip"),
        (OTHER, 2, "release"),
        (NonPrivateEvent(), 1, "release"),
        (UnclaimedEvent("shuffled"), 1, "release"),
    ]:
        ledger.charge(event, count=count, kind=kind)
    return ledger


def test_equal_neighbours_merge_and_others_do_not():
    ledger = Ledger()
    for event in (STEP, STEP, OTHER, OTHER, STEP):
        ledger.charge(event)
    ledger.charge(STEP, kind="void")
    assert ledger.history == (Charge(STEP, 2), Charge(OTHER, 2), Charge(STEP, 1), Charge(STEP, 1, "void"))


def test_steps_are_releases_and_voids():
    assert Ledger().steps == 0
    assert mixed_ledger().steps == 3 + 1 + 2 + 1 + 1


def test_voids_and_clip_noise_count_for_epsilon():
    release, void, clip = Ledger(), Ledger(), Ledger()
    release.charge(STEP, count=10)
    for ledger, kind in ((void, "void"), (clip, "clip")):
        ledger.charge(STEP, count=5)
        ledger.charge(STEP, count=5, kind=kind)
    assert epsilon_of(release.history, 1e-5) == epsilon_of(void.history, 1e-5) == epsilon_of(clip.history, 1e-5) > 0


def test_a_ledger_survives_json():
    ledger, copy = mixed_ledger(), Ledger()
    copy.load_state_dict(json.loads(json.dumps(ledger.state_dict())))
    assert copy.history == ledger.history
    assert copy.state_dict() == ledger.state_dict()


def test_loading_never_forgets():
    ledger = Ledger()
    ledger.charge(STEP)
    with pytest.raises(LedgerError, match="forget"):
        ledger.load_state_dict(mixed_ledger().state_dict())
    assert ledger.history == (Charge(STEP, 1),)
    ledger.load_state_dict(mixed_ledger().state_dict(), merge=True)
    assert ledger.steps == 1 + mixed_ledger().steps
    assert ledger.history[0] == Charge(STEP, 4)


@pytest.mark.parametrize(
    "damage",
    [
        lambda state: state.update(schema=99),
        lambda state: state.pop("charges"),
        lambda state: state["charges"][2].pop("count"),
        lambda state: state["charges"][2].update(count=0),
        lambda state: state["charges"][2].update(count=1.5),
        lambda state: state["charges"][2].update(kind="gift"),
        lambda state: state["charges"][2]["event"].update(type="laplace"),
        lambda state: state["charges"][2]["event"].update(noise_multiplier=-1.0),
    ],
)
def test_a_damaged_state_is_refused_and_changes_nothing(damage):
    state = mixed_ledger().state_dict()
    damage(state)
    ledger = Ledger()
    with pytest.raises(LedgerError):
        ledger.load_state_dict(state)
    assert ledger.history == ()


@pytest.mark.parametrize("count", [0, -1, 1.0, True, "3"])
def test_a_count_must_be_a_positive_integer(count):
    ledger = Ledger()
    with pytest.raises(InvalidBudgetError, match="count="):
        ledger.charge(STEP, count=count)
    assert ledger.history == ()


def test_unknown_kinds_and_events_are_refused():
    ledger = Ledger()
    with pytest.raises(InvalidBudgetError, match="release, void, clip"):
        ledger.charge(STEP, kind="gift")
    with pytest.raises(TypeError, match="PoissonGaussianEvent"):
        ledger.charge("gaussian")
    assert ledger.history == ()


def test_the_history_cannot_be_edited_from_outside():
    ledger = mixed_ledger()
    before = ledger.history
    state = ledger.state_dict()
    state["charges"].clear()
    with pytest.raises(AttributeError):
        before[0].count = 0
    assert ledger.history == before


def test_totals_have_each_event_once_and_cost_the_same():
    ledger = Ledger()
    for step in range(40):
        ledger.charge(PoissonGaussianEvent(0.1, 1.5), kind="void" if step == 3 else "release")
        ledger.charge(PoissonGaussianEvent(0.1, 20.0), kind="clip")
    assert len(ledger.history) == 80
    assert [charge.count for charge in ledger.totals] == [40, 40]
    assert epsilon_of(ledger.totals, 1e-5) == epsilon_of(ledger.history, 1e-5)
    restored = Ledger()
    restored.load_state_dict(ledger.state_dict())
    assert restored.totals == ledger.totals
