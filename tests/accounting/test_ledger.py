import copy
import json
import pickle

import pytest

from dpengine.accounting import (
    Charge,
    GaussianEvent,
    Ledger,
    NonPrivateEvent,
    PoissonGaussianEvent,
    UnclaimedEvent,
    advantage_of,
    bounds_of,
    calibration,
    delta_of,
    epsilon_of,
    mu_gdp,
    privacy_profile,
    privacy_spent,
    trade_off,
)
from dpengine.accounting.arguments import MAX_COUNT
from dpengine.accounting.ledger import steps_of
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


def test_equal_consecutive_charges_merge_and_others_do_not():
    ledger = Ledger()
    for event in (STEP, STEP, OTHER, OTHER, STEP):
        ledger.charge(event)
    ledger.charge(STEP, kind="void")
    assert ledger.history == (Charge(STEP, 2), Charge(OTHER, 2), Charge(STEP, 1), Charge(STEP, 1, "void"))


def test_steps_count_released_and_discarded_batches():
    assert Ledger().steps == 0
    assert mixed_ledger().steps == 3 + 1 + 2 + 1 + 1


def test_discarded_batches_and_clip_noise_count_for_epsilon():
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


@pytest.mark.hazard("P1")
def test_loading_into_a_charged_ledger_raises_unless_merged():
    ledger = Ledger()
    ledger.charge(STEP)
    with pytest.raises(LedgerError, match="would discard"):
        ledger.load_state_dict(mixed_ledger().state_dict())
    assert ledger.history == (Charge(STEP, 1),)
    ledger.load_state_dict(mixed_ledger().state_dict(), merge=True)
    assert ledger.steps == 1 + mixed_ledger().steps
    assert ledger.history[0] == Charge(STEP, 4)


@pytest.mark.parametrize(
    ("damage", "named"),
    [
        (lambda state: state.update(schema=99), ""),
        (lambda state: state["charges"][2].update(count=0), ""),
        (lambda state: state["charges"][2].update(count=1.5), ""),
        (lambda state: state["charges"][2].update(kind="gift"), ""),
        (lambda state: state["charges"][2]["event"].update(type="laplace"), ""),
        (lambda state: state["charges"][2]["event"].update(noise_multiplier=-1.0), ""),
        (lambda state: state["charges"][2].update(count=10**400), ""),
        (lambda state: state["charges"][2]["event"].update(noise_multiplier=10**400), ""),
        (lambda state: state["charges"][2]["event"].update(type=["gaussian"]), ""),
        (lambda state: state["charges"][2].update(event=None), ""),
        (lambda state: state["charges"].append("gaussian"), ""),
        (lambda state: state.update(charges=3), ""),
        (lambda state: state.update(charges={"event": 1}), ""),
        (lambda state: state["charges"][2].update(weight=0.5), r"charges\[2\] has 'weight'"),
        (lambda state: state["charges"][2].update({1: 2}), r"charges\[2\] has 1"),
        (lambda state: state.update(epsilon=0.1), "state has 'epsilon'"),
        (lambda state: state["charges"][2].pop("count"), r"charges\[2\] lacks 'count'"),
        (lambda state: state.pop("charges"), "state lacks 'charges'"),
        (lambda state: state["charges"][2]["event"].update(sigma=2.0), "sigma"),
    ],
)
@pytest.mark.hazard("P1", "P5", "P7")
def test_a_damaged_state_is_rejected_and_changes_nothing(damage, named):
    state = mixed_ledger().state_dict()
    damage(state)
    ledger = Ledger()
    with pytest.raises(LedgerError, match=named):
        ledger.load_state_dict(state)
    assert ledger.history == ()


@pytest.mark.parametrize("count", [0, -1, 1.0, True, "3", 2**63])
@pytest.mark.hazard("O22")
def test_a_count_must_be_a_positive_integer(count):
    ledger = mixed_ledger()
    before = ledger.history
    with pytest.raises(InvalidBudgetError, match="count="):
        ledger.charge(STEP, count=count)
    assert ledger.history == before


def test_unknown_kinds_and_events_are_rejected():
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


def test_totals_list_each_event_once_and_have_the_same_epsilon():
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


@pytest.mark.parametrize("state", [None, [], "ledger", 3])
def test_an_invalid_state_is_rejected(state):
    with pytest.raises(LedgerError, match=f"a {type(state).__name__}"):
        Ledger().load_state_dict(state)


@pytest.mark.slow
def test_charges_whose_total_count_overflows_are_rejected_and_leave_the_ledger_unchanged():
    ledger = Ledger()
    ledger.charge(STEP, count=MAX_COUNT - 1)
    ledger.charge(OTHER)
    before, state = ledger.history, ledger.state_dict()
    for event in (STEP, OTHER, GaussianEvent(3.0)):
        with pytest.raises(InvalidBudgetError, match=r"2\*\*62"):
            ledger.charge(event)
    with pytest.raises(LedgerError, match=r"2\*\*62"):
        ledger.load_state_dict(state, merge=True)
    assert ledger.history == before and ledger.state_dict() == state
    assert (
        epsilon_of(ledger.history, 1e-5) == epsilon_of(ledger.totals, 1e-5) > epsilon_of(before[:1], 1e-5) * 0.99 > 1e15
    )


def test_a_history_whose_total_count_overflows_is_rejected():
    history = [Charge(PoissonGaussianEvent(0.1 + i / 1e4, 1.0), 2**61) for i in range(200)]
    with pytest.raises(InvalidBudgetError, match=r"2\*\*62"):
        epsilon_of(history, 1e-5)
    few = [
        Charge(PoissonGaussianEvent(0.1 + i / 1e4, 1.0), 2**54) for i in range(200)
    ]  # more distinct events than are kept separate
    assert 2**54 < epsilon_of(few, 1e-5, "rdp") < 1e22


QUESTIONS = {
    "epsilon_of": lambda history: epsilon_of(history, 1e-5),
    "delta_of": lambda history: delta_of(history, 1.0),
    "bounds_of": lambda history: bounds_of(history, 1e-5),
    "advantage_of": advantage_of,
    "mu_gdp": mu_gdp,
    "privacy_profile": lambda history: privacy_profile(history, [1e-5]),
    "privacy_spent": lambda history: privacy_spent(history, 1e-5),
    "steps_of": steps_of,
    "trade_off": lambda history: trade_off(history, [0.1]),
    "calibration": lambda history: calibration(
        target_epsilon=1.0, target_delta=1e-5, sample_rate=0.1, steps=10, spent=history
    ),
}


@pytest.mark.parametrize("ask", QUESTIONS.values(), ids=QUESTIONS)
def test_an_event_instead_of_a_charge_raises_with_the_conversion(ask):
    with pytest.raises(TypeError, match=r"PoissonGaussianEvent.*Charge\(event, count\)"):
        ask([STEP])
    with pytest.raises(TypeError, match=r"a tuple.*Charge\(event, count\)"):
        ask([(STEP, 3)])
    with pytest.raises(TypeError, match=r"a Ledger.*ledger\.history"):
        ask(Ledger())
    with pytest.raises(TypeError, match=r"a Charge.*\[charge\]"):
        ask(Charge(STEP))


# Observers


def test_an_observer_receives_each_charge_unmerged_after_it_is_in_the_ledger():
    seen, given = [], []
    ledger = Ledger([given.append])
    stop = ledger.observe(lambda charge: seen.append((charge, ledger.steps)))
    for count, kind in ((2, "release"), (1, "release"), (3, "void")):
        ledger.charge(STEP, count=count, kind=kind)
    stop()
    ledger.charge(OTHER)
    assert seen == [(Charge(STEP, 2), 2), (Charge(STEP), 3), (Charge(STEP, 3, "void"), 6)]
    assert given == [charge for charge, _ in seen] + [Charge(OTHER)]


def test_an_observer_is_called_once_however_often_it_was_added_and_not_after_it_was_removed():
    seen = []
    ledger = Ledger()
    first, second = ledger.observe(seen.append), ledger.observe(seen.append)
    ledger.charge(STEP)
    assert len(seen) == 1
    first()
    second()
    ledger.charge(STEP)
    assert len(seen) == 1


def test_an_observer_that_raises_does_not_undo_the_charge_or_skip_other_observers():
    seen = []
    ledger = Ledger([seen.append])
    ledger.observe(lambda charge: 1 / 0)
    ledger.observe(seen.append)
    ledger.observe(lambda charge: seen.append(charge))
    with pytest.raises(ZeroDivisionError):
        ledger.charge(STEP)
    assert ledger.history == (Charge(STEP),)
    assert seen == [Charge(STEP)] * 2


def test_a_charge_that_raises_and_a_loaded_one_are_not_observed():
    seen = []
    ledger = Ledger([seen.append])
    ledger.load_state_dict(mixed_ledger().state_dict())
    with pytest.raises(InvalidBudgetError):
        ledger.charge(STEP, count=0)
    assert seen == []


@pytest.mark.parametrize("again", [copy.copy, copy.deepcopy, lambda ledger: pickle.loads(pickle.dumps(ledger))])
def test_a_copy_of_a_ledger_has_the_charges_and_no_observer(again):
    seen = []
    ledger = Ledger([seen.append])
    ledger.observe(lambda charge: seen.append(charge))  # which cannot be pickled
    ledger.charge(STEP)
    other = again(ledger)
    assert other.history == ledger.history
    other.charge(STEP, count=4)
    assert len(seen) == 2
    assert (ledger.steps, other.steps) == (1, 5)
    assert [ledger.history, other.history] == [(Charge(STEP),), (Charge(STEP, 5),)]


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda ledger: pickle.loads(pickle.dumps(ledger))])
def test_steps_are_those_of_the_history_after_loads_and_copies(copied):
    ledger = mixed_ledger()
    ledger.load_state_dict(mixed_ledger().state_dict(), merge=True)
    other = copied(ledger)
    other.charge(STEP, count=5)
    assert other.steps == steps_of(other.history) == ledger.steps + 5
    assert ledger.steps == steps_of(ledger.history) == 2 * mixed_ledger().steps


def test_a_charge_that_merges_leaves_an_earlier_history_as_it_was():
    ledger = Ledger()
    ledger.charge(STEP, count=2)
    before = ledger.history
    ledger.charge(STEP, count=3)
    assert [charge.count for charge in before] == [2]
    assert [charge.count for charge in ledger.history] == [5]
