"""Schedulers change one privacy parameter of an optimizer per epoch, and reject values out of range."""

import json
import math
from types import SimpleNamespace

import inside
import pytest
from loops import make_loop

from dpengine.engine.schedulers import Schedule, by_factor, exponential, in_steps
from dpengine.errors import InvalidBudgetError
from dpengine.noise import BandMF

BOTH = pytest.mark.parametrize("attribute", ["noise_multiplier", "max_grad_norm"])


def optimizer(value=2.0):
    return SimpleNamespace(noise_multiplier=value, max_grad_norm=value)


def values(attribute, rule, epochs):
    """Returns the value of each epoch."""
    one = optimizer()
    schedule, found = Schedule(one, attribute, rule), []
    for _ in range(epochs):
        found.append(getattr(one, attribute))
        schedule.step()
    return found


@BOTH
def test_exponential_leaves_the_first_epoch_and_multiplies_each_later_one(attribute):
    assert values(attribute, exponential(0.5), 4) == [2.0, 1.0, 0.5, 0.25]


@BOTH
def test_steps_change_the_value_only_in_epochs_that_the_step_size_divides(attribute):
    assert values(attribute, in_steps(3, 0.5), 8) == [2.0, 2.0, 2.0, 1.0, 1.0, 1.0, 0.5, 0.5]


@BOTH
def test_a_function_multiplies_the_value_at_the_start(attribute):
    assert values(attribute, by_factor(lambda epoch: 1 / (1 + epoch)), 4) == [2.0, 1.0, 2 / 3, 0.5]


def test_only_the_attribute_that_is_scheduled_changes():
    one = optimizer()
    Schedule(one, "max_grad_norm", exponential(0.5)).step()
    assert (one.noise_multiplier, one.max_grad_norm) == (2.0, 1.0)


def test_loaded_scheduler_state_continues_with_the_stored_value():
    first, second = optimizer(), optimizer()
    old = Schedule(first, "noise_multiplier", in_steps(2, 0.5))
    for _ in range(3):
        old.step()
    new = Schedule(second, "noise_multiplier", in_steps(2, 0.5))
    new.load_state_dict(json.loads(json.dumps(old.state_dict())))
    assert second.noise_multiplier == first.noise_multiplier == 1.0
    for _ in range(3):
        old.step(), new.step()
    assert second.noise_multiplier == first.noise_multiplier == 0.25
    assert new.state_dict() == old.state_dict()


def test_a_function_keeps_its_start_over_a_stored_state():
    first, second = optimizer(2.0), optimizer(5.0)
    old = Schedule(first, "max_grad_norm", by_factor(lambda epoch: 1 + epoch))
    new = Schedule(second, "max_grad_norm", by_factor(lambda epoch: 1 + epoch))
    new.load_state_dict(old.state_dict())
    new.step()
    assert second.max_grad_norm == 4.0


OUT_OF_RANGE = [
    *(("noise_multiplier", factor, "finite and not negative") for factor in (-1.0, math.nan, math.inf)),
    *(("max_grad_norm", factor, "positive") for factor in (-1.0, 0.0, math.nan)),
]


@pytest.mark.parametrize(("attribute", "factor", "message"), OUT_OF_RANGE)
def test_a_value_out_of_range_is_rejected_and_nothing_changes(attribute, factor, message):
    one = optimizer()
    schedule = Schedule(one, attribute, by_factor(lambda epoch: factor if epoch else 1.0))
    with pytest.raises(ValueError, match=f"{attribute}=.* {message}"):
        schedule.step()
    assert (getattr(one, attribute), schedule.epoch) == (2.0, 0)


@pytest.mark.parametrize("gamma", [-0.5, math.nan, math.inf], ids=str)
def test_a_factor_out_of_range_is_rejected(gamma):
    with pytest.raises(ValueError, match="gamma"):
        exponential(gamma)


@pytest.mark.parametrize("size, error", [(0, ValueError), (-2, ValueError), (1.5, TypeError), (True, TypeError)])
def test_a_step_size_that_is_no_positive_whole_number_is_rejected(size, error):
    with pytest.raises(error, match="step_size"):
        in_steps(size, 0.5)


def test_arguments_of_another_type_are_rejected():
    with pytest.raises(TypeError, match="gamma must be a number"):
        exponential("0.5")
    with pytest.raises(TypeError, match="function of the epoch"):
        by_factor(0.5)
    with pytest.raises(TypeError, match="noise_multiplier must be a number"):
        Schedule(optimizer(), "noise_multiplier", lambda value, start, epoch: "2")


def test_an_optimizer_without_the_attribute_is_rejected_by_its_class():
    with pytest.raises(ValueError, match=r"\(SimpleNamespace\) has no noise_multiplier"):
        Schedule(SimpleNamespace(), "noise_multiplier", exponential(1.0))


def test_an_unknown_attribute_and_the_state_of_another_schedule_are_rejected():
    with pytest.raises(ValueError, match="'noise_multiplier', 'max_grad_norm', got 'lr'"):
        Schedule(optimizer(), "lr", exponential(1.0))
    noise = Schedule(optimizer(), "noise_multiplier", exponential(1.0))
    clip = Schedule(optimizer(), "max_grad_norm", exponential(1.0))
    with pytest.raises(ValueError, match="schedule for noise_multiplier"):
        clip.load_state_dict(noise.state_dict())
    with pytest.raises(ValueError, match="expected"):
        clip.load_state_dict({"epoch": 3})


def test_a_schedule_over_the_engine_moves_clip_noise_and_ledger_together():
    run = make_loop(noise_multiplier=2.0, max_grad_norm=0.5)
    schedules = [Schedule(run.optimizer, "noise_multiplier", exponential(0.5))]
    schedules += [Schedule(run.optimizer, "max_grad_norm", exponential(0.1))]
    batches, stds, largest = iter(run.loader), [], []
    for _ in range(3):
        run.step(*next(batches))
        stds.append(inside.state(run.engine).noise_std)
        largest.append(inside.state(run.engine).clipping_norm_in_force)
        for schedule in schedules:
            schedule.step()
    assert stds == pytest.approx([1.0, 0.05, 0.0025])
    assert largest == pytest.approx([0.5, 0.05, 0.005])
    assert [charge.event.noise_multiplier for charge in run.engine.ledger.history] == [2.0, 1.0, 0.5]
    assert run.optimizer.noise_multiplier == 0.25


def test_a_change_between_two_chunks_of_a_batch_waits_for_the_next_batch():
    run = make_loop(noise_multiplier=2.0, max_grad_norm=0.5, accumulation_steps=2)
    batches = iter(run.loader)
    run.backward(*next(batches))
    run.optimizer.step()
    run.optimizer.max_grad_norm = 0.05
    assert (run.optimizer.max_grad_norm, inside.state(run.engine).clipping_norm) == (0.05, 0.5)
    run.backward(*next(batches))
    run.optimizer.step()
    assert run.engine.ledger.steps == 1
    state = inside.state(run.engine)
    assert state.clipping_norm == state.clipping_norm_in_force == 0.05


def test_correlated_noise_cannot_be_scheduled():
    run = make_loop(noise_multiplier=1.0, noise=BandMF(num_bands=2), steps=8)
    with pytest.raises(InvalidBudgetError, match="noise_multiplier and max_grad_norm cannot change"):
        run.optimizer.noise_multiplier = 0.5
    assert run.optimizer.noise_multiplier == 1.0
