"""PrivacyEngine: privacy cost of a run, and end of a run at its budget."""

import json
import math
import random

import inside
import pytest
from inside_parts import record_calibrations
from loops import BATCH, ROWS, make_loop, train, unchanged

from dpengine import PrivacyEngine
from dpengine.accounting import Charge, Ledger, Relation, epsilon_of, release_event
from dpengine.errors import (
    AccountingRefusedError,
    BatchStateError,
    BudgetExceeded,
    CalibrationError,
    LedgerError,
    PrivacyWarning,
)

pytestmark = pytest.mark.filterwarnings("ignore:.*DPE012", "ignore:.*DPE006")


# The budget


@pytest.mark.parametrize("accountant", ["pld", "rdp"])
def test_on_budget_stop_ends_the_loader_before_the_target_is_exceeded(accountant):
    loop = make_loop(engine=PrivacyEngine(accountant, seed=0), target_epsilon=2.0, epochs=2, target_delta=1e-3)
    steps = train(loop, epochs=4)
    assert steps >= 2 * len(loop.loader)
    assert 1.9 < loop.engine.epsilon <= 2.0
    one_more = [*loop.engine.ledger.history, Charge(inside.event(loop.engine), 1)]
    assert epsilon_of(one_more, 1e-3, accountant=accountant) > 2.0
    assert list(loop.loader) == []
    with unchanged(loop.model):
        for _ in range(2):
            with pytest.raises(BudgetExceeded, match=rf"DPE011.*Step {steps + 1} would reach epsilon 2\.\d+"):
                loop.optimizer.step()
            loop.optimizer.zero_grad()


def test_on_budget_raise_rejects_the_step_over_budget_and_charges_nothing():
    loop = make_loop(target_epsilon=2.0, steps=3, target_delta=1e-3, on_budget="raise")
    with pytest.raises(BudgetExceeded, match="DPE011"):
        train(loop, epochs=2)
    assert loop.engine.ledger.steps == 3
    assert loop.engine.epsilon <= 2.0
    assert inside.state(loop.engine).zero


def test_a_changed_plan_stops_before_the_target_is_exceeded():
    loop = make_loop(target_epsilon=2.0, steps=8, target_delta=1e-3)
    loop.optimizer.noise_multiplier /= 1.5
    assert 0 < train(loop, epochs=3) < 8
    assert loop.engine.epsilon <= 2.0


def test_on_budget_warn_continues_and_warns_once():
    loop = make_loop(target_epsilon=2.0, steps=3, target_delta=1e-3, on_budget="warn")
    with pytest.warns(PrivacyWarning, match="DPE011") as seen:
        assert train(loop, epochs=2) == 8
    assert len(seen) == 1
    assert loop.engine.epsilon > 2.0


def test_discarded_batches_count_towards_the_budget():
    loop = make_loop(target_epsilon=2.0, steps=4, target_delta=1e-3)
    handed_out = sum(
        1 for _ in range(9) for _ in zip(range(1), loop.loader, strict=False)
    )  # draws a batch and leaves the loop
    assert handed_out == 4
    assert loop.charges == [("void", 3)]
    loop.engine.detach(loop.model)
    assert loop.engine.ledger.steps == 4
    assert loop.engine.epsilon <= 2.0


@pytest.mark.parametrize("on_budget", ["stop", "raise"])
def test_undeclared_accumulation_never_passes_the_target(on_budget):
    loop = make_loop(target_epsilon=2.0, steps=8, target_delta=1e-3, on_budget=on_budget)
    try:
        for _ in range(4):
            loop.optimizer.zero_grad()
            for position, batch in enumerate(loop.loader):
                loop.backward(*batch)
                if position % 2:
                    loop.optimizer.step()
                    loop.optimizer.zero_grad()
                    assert loop.engine.epsilon <= 2.0
    except BudgetExceeded:
        assert on_budget == "raise"
    assert 2 <= loop.engine.ledger.steps < 8  # each costs more than the noise was calibrated for


def test_earlier_charges_count_towards_the_target():
    first = make_loop(target_epsilon=2.0, steps=4, target_delta=1e-3)
    train(first)
    state = json.loads(json.dumps(first.engine.state_dict()))
    engine = PrivacyEngine(seed=1)
    engine.load_state_dict(state)
    resumed = make_loop(engine=engine, target_epsilon=2.0, steps=8, target_delta=1e-3)
    assert engine.epsilon == first.engine.epsilon
    train(resumed, epochs=3)
    assert engine.epsilon <= 2.0
    straight = make_loop(target_epsilon=2.0, steps=8, target_delta=1e-3)
    train(straight, epochs=3)
    assert engine.ledger.steps < 4 + straight.engine.ledger.steps


@pytest.mark.slow
def test_a_second_run_shares_the_target_with_the_first():
    engine = PrivacyEngine(seed=1)
    first = make_loop(engine=engine, target_epsilon=1.0, steps=4, target_delta=1e-3)
    train(first)
    engine.detach(first.model)
    second = make_loop(engine=engine, target_epsilon=2.0, steps=4, target_delta=1e-3)
    train(second)
    assert engine.ledger.steps == 8
    assert 1.99 < engine.epsilon <= 2.0
    with pytest.raises(CalibrationError, match=r"DPE008.*with the earlier charges"):
        make_loop(engine=engine, target_epsilon=0.99 * engine.epsilon, steps=4, target_delta=1e-3)


def test_a_resumed_run_gets_the_steps_that_are_left():
    straight = make_loop(target_epsilon=2.0, steps=8, target_delta=1e-3)
    train(straight)
    state = straight.engine.state_dict()  # halfway
    train(straight)
    engine = PrivacyEngine(seed=1)
    engine.load_state_dict(state)
    resumed = make_loop(engine=engine, target_epsilon=2.0, steps=8, target_delta=1e-3)
    train(resumed, epochs=3)
    assert engine.ledger.history == straight.engine.ledger.history or engine.ledger.steps == 8
    assert engine.epsilon <= 2.0


def test_the_budget_agrees_with_the_accountant_on_any_history():
    loop = make_loop(noise_multiplier=1.5)
    choose = random.Random(0)
    for _ in range(40):
        target = choose.choice([0.5, 1.0, 2.0, 4.0])
        ledger, overspend = inside.budget(loop.engine, target, 1e-3, None, "raise", "rdp")
        for _ in range(choose.randrange(12)):
            count = choose.choice([1, 1, 1, 2, 3])
            event = inside.event(loop.engine, count)
            after = Ledger()
            after.load_state_dict(ledger.state_dict())
            after.charge(event, count=count)
            spent = epsilon_of(after.history, 1e-3, accountant="rdp", relation=Relation.ZERO_OUT)
            reached = overspend(count)
            assert (reached is None) == (spent <= target)
            assert reached is None or reached == spent
            if reached is None:
                ledger.charge(event, count=count, kind=choose.choice(["release", "void"]))


def test_without_a_target_the_loader_does_not_stop():
    loop = make_loop(noise_multiplier=0.3)
    assert train(loop, epochs=3) == 12
    loop.optimizer.zero_grad()
    with pytest.raises(BatchStateError):
        loop.optimizer.step()


# Privacy cost


def test_epsilon_is_zero_before_the_first_step_and_grows_with_each():
    loop = make_loop(noise_multiplier=1.0)
    assert loop.engine.get_epsilon(1e-5) == loop.engine.epsilon == 0.0
    seen = [0.0]
    for batch in loop.loader:
        loop.step(*batch)
        seen.append(loop.engine.epsilon)
    assert seen == sorted(set(seen))
    direct = (Charge(release_event(noise_multiplier=1.0, sample_rate=BATCH / ROWS), 4),)
    assert seen[-1] == pytest.approx(epsilon_of(direct, ROWS**-1.1))
    assert loop.engine.spent.steps == 4
    assert loop.engine.metrics()["privacy/epsilon"] == seen[-1]
    assert "nonprivate" not in str(loop.engine.metrics())


def test_the_charged_rate_is_not_below_the_drawn_one():
    loop = make_loop(noise_multiplier=1.0, sample_rate=2.0**-40)
    assert inside.event(loop.engine).sample_rate == 2.0**-40 + 2.0**-60


def test_noise_is_calibrated_to_the_charged_rate(monkeypatch):
    asked = record_calibrations(monkeypatch)
    loop = make_loop(target_epsilon=3.0, steps=4, sample_rate=0.1)
    assert asked == [inside.event(loop.engine).sample_rate]
    assert asked[0] > 0.1


def test_zero_noise_gives_infinite_epsilon_and_warns():
    with pytest.warns(PrivacyWarning, match=r"DPE012.*NOT PRIVATE"):
        loop = make_loop(noise_multiplier=0)
    train(loop)
    assert loop.engine.epsilon == math.inf


def test_shuffled_batches_have_no_epsilon():
    with pytest.warns(PrivacyWarning, match=r"DPE012.*epsilon not claimed"):
        loop = make_loop(sampling="shuffle", noise_multiplier=1.0)
    assert sorted(len(targets) for _, targets in loop.loader) == [6, 6, 6, 6]
    train(loop)
    with pytest.raises(AccountingRefusedError, match="shuffle"):
        loop.engine.get_epsilon(1e-3)
    assert "privacy/epsilon" not in loop.engine.metrics()


def test_metrics_omit_an_undefined_epsilon_despite_a_target():
    unclaimed = make_loop(sampling="shuffle", noise_multiplier=1.0)
    train(unclaimed)
    loop = make_loop(target_epsilon=3.0, steps=4)
    assert loop.engine.metrics()["privacy/budget_used"] == 0
    loop.engine.load_state_dict(unclaimed.engine.state_dict())
    found = loop.engine.metrics()
    assert found["privacy/step"] == 4
    assert not {"privacy/epsilon", "privacy/budget_used"} & set(found)


def test_the_relation_is_add_or_remove_only_where_all_constants_are_given():
    constants = {"sample_rate": 0.25, "expected_batch_size": 6.0, "target_delta": 1e-3}
    for left_out in (None, *constants):
        options = {name: value for name, value in constants.items() if name != left_out}
        relation = inside.state(make_loop(noise_multiplier=1.0, **options).engine).relation
        assert relation is (Relation.ZERO_OUT if left_out else Relation.ADD_OR_REMOVE_ONE)


def test_the_state_is_plain_json_and_loads_on_top():
    one, two = make_loop(noise_multiplier=1.0), make_loop(noise_multiplier=2.0)
    train(one)
    train(two)
    two.engine.load_state_dict(json.loads(json.dumps(one.engine.state_dict())))
    assert two.engine.ledger.steps == 8
    both = [*one.engine.ledger.history, Charge(release_event(noise_multiplier=2.0, sample_rate=0.25), 4)]
    assert two.engine.get_epsilon(1e-3) == pytest.approx(epsilon_of(both, 1e-3))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda state: None, "NoneType"),
        (lambda state: {}, "no 'ledger'"),
        (lambda state: {"ledger": state["ledger"]}, "no 'delta'"),
        (lambda state: state | {"ledger": None}, "'ledger' in the engine's state is a NoneType"),
        (lambda state: state | {"ledger": {}}, "schema None"),
        *[(lambda state, delta=delta: state | {"delta": delta}, "delta=") for delta in (7.0, 0.0, "1e-5", math.nan)],
    ],
)
def test_a_state_that_is_damaged_is_rejected_and_changes_nothing(change, message):
    stored = make_loop(noise_multiplier=1.0)
    train(stored)
    engine = PrivacyEngine()
    with pytest.raises(LedgerError, match=f"DPE021.*{message}"):
        engine.load_state_dict(change(stored.engine.state_dict()))
    assert engine.ledger.history == ()
    engine.load_state_dict(stored.engine.state_dict())
    assert engine.epsilon == stored.engine.epsilon
