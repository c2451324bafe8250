"""Schedulers under Opacus's names: equal values in equal epochs, and states that load in both directions."""

import importlib.util
import io
import json
import math
from types import SimpleNamespace

import pytest
import torch

from dpengine.compat.opacus.schedulers import (
    ExponentialGradClip,
    ExponentialNoise,
    LambdaGradClip,
    LambdaNoise,
    StepGradClip,
    StepNoise,
    _GradClipScheduler,
    _NoiseScheduler,
)


def decreasing(epoch):
    return 1 - epoch / 10


def optimizer(value=2.0):
    return SimpleNamespace(noise_multiplier=value, max_grad_norm=value)


NOISE, CLIP = "noise_multiplier", "max_grad_norm"
CASES = {
    "exponential-noise": (ExponentialNoise, {"gamma": 0.5}, NOISE, [2.0, 1.0, 0.5, 0.25, 0.125]),
    "exponential-clip": (ExponentialGradClip, {"gamma": 0.5}, CLIP, [2.0, 1.0, 0.5, 0.25, 0.125]),
    "step-noise": (StepNoise, {"step_size": 2, "gamma": 0.5}, NOISE, [2.0, 2.0, 1.0, 1.0, 0.5]),
    "step-clip": (StepGradClip, {"step_size": 2, "gamma": 0.5}, CLIP, [2.0, 2.0, 1.0, 1.0, 0.5]),
    "lambda-noise": (LambdaNoise, {"noise_lambda": decreasing}, NOISE, [2.0, 1.8, 1.6, 1.4, 1.2]),
    "lambda-clip": (LambdaGradClip, {"scheduler_function": decreasing}, CLIP, [2.0, 1.8, 1.6, 1.4, 1.2]),
}
each_case = pytest.mark.parametrize("make, options, attribute, expected", CASES.values(), ids=CASES)


@each_case
def test_construction_sets_epoch_0_and_each_step_advances_it(make, options, attribute, expected):
    one = optimizer()
    scheduler, found = make(one, **options), []
    for epoch in range(len(expected)):
        assert scheduler.last_epoch == epoch
        found.append(getattr(one, attribute))
        scheduler.step()
    assert found == pytest.approx(expected, rel=1e-15)
    other = {NOISE: CLIP, CLIP: NOISE}[attribute]
    assert getattr(one, other) == 2.0


@each_case
def test_construction_continues_from_a_given_last_epoch(make, options, attribute, expected):
    theirs = importlib.import_module("opacus.schedulers") if importlib.util.find_spec("opacus") else None
    one = optimizer()
    assert make(one, **options, last_epoch=3).last_epoch == 4
    # From epoch 3 to 4: a multiplication for the exponential and, as 2 divides 4, for the step.
    assert getattr(one, attribute) == pytest.approx(1.2 if "ambda" in make.__name__ else 1.0, rel=1e-15)
    if theirs is not None:
        two = optimizer()
        getattr(theirs, make.__name__)(two, **options, last_epoch=3)
        assert getattr(two, attribute) == getattr(one, attribute)


@each_case
def test_the_state_is_every_attribute_but_the_optimizer(make, options, attribute, expected):
    scheduler = make(optimizer(), **options)
    scheduler.note = "mine"
    state = scheduler.state_dict()
    assert state == {name: value for name, value in vars(scheduler).items() if name != "optimizer"}
    assert {*options, "last_epoch", "note"} <= set(state)


@each_case
def test_a_loaded_state_continues_from_its_epoch(make, options, attribute, expected):
    first, second = optimizer(), optimizer()
    old = make(first, **options)
    for _ in range(3):
        old.step()
    new = make(second, **options)
    setattr(second, attribute, getattr(first, attribute))  # as with Opacus, the script restores the value
    new.load_state_dict(old.state_dict())
    assert new.optimizer is second
    new.step()
    assert getattr(second, attribute) == pytest.approx(expected[4], rel=1e-15)


# What Opacus 1.6.0 writes: vars(scheduler) without the optimizer.
OPACUS_STATES = {
    "exponential": (ExponentialNoise, {"gamma": 1.0}, {"gamma": 0.5, "last_epoch": 4}, 1.0),
    "step": (StepGradClip, {"step_size": 9, "gamma": 1.0}, {"step_size": 5, "gamma": 0.5, "last_epoch": 4}, 1.0),
    "lambda": (
        LambdaNoise,
        {"noise_lambda": abs},
        {"noise_lambda": decreasing, "base_noise_multiplier": 10.0, "last_epoch": 4},
        5.0,
    ),
}


@pytest.mark.parametrize("make, options, state, expected", OPACUS_STATES.values(), ids=OPACUS_STATES)
def test_a_state_that_opacus_wrote_loads(make, options, state, expected):
    one = optimizer()
    scheduler = make(one, **options)
    one.noise_multiplier = one.max_grad_norm = 2.0
    scheduler.load_state_dict(state)
    scheduler.step()
    assert scheduler.last_epoch == 5
    assert getattr(one, NOISE if isinstance(scheduler, _NoiseScheduler) else CLIP) == expected


@pytest.mark.parametrize("make, name", [(LambdaNoise, "noise_lambda"), (LambdaGradClip, "scheduler_function")])
def test_a_lambda_can_be_saved_and_stays_with_the_script(make, name):
    first, second = optimizer(), optimizer()
    old = make(first, **{name: lambda epoch: 1 / (1 + epoch)})
    old.step()
    buffer = io.BytesIO()
    torch.save(old.state_dict(), buffer)
    buffer.seek(0)
    new = make(second, **{name: lambda epoch: 1 / (1 + epoch)})
    new.load_state_dict(torch.load(buffer, weights_only=False))
    new.step(), old.step()
    assert vars(first) == vars(second)
    assert json.dumps(sorted(old.state_dict())) == json.dumps(sorted({"last_epoch", *_base(make)}))


def _base(make):
    return {"base_noise_multiplier"} if make is LambdaNoise else {"base_max_grad_norm"}


@pytest.mark.parametrize(
    "base, method, attribute",
    [(_NoiseScheduler, "get_noise_multiplier", NOISE), (_GradClipScheduler, "get_max_grad_norm", CLIP)],
)
def test_a_subclass_defines_the_value(base, method, attribute):
    def value(self):
        return 3.0 + self.last_epoch

    one = optimizer()
    scheduler = type("Mine", (base,), {method: value})(one)
    assert getattr(one, attribute) == 3.0
    scheduler.step()
    assert getattr(one, attribute) == 4.0


@pytest.mark.parametrize("base", [_NoiseScheduler, _GradClipScheduler])
def test_a_subclass_that_defines_no_value_raises_an_error_that_names_the_method(base):
    with pytest.raises(NotImplementedError, match=r"Mine must define get_\w+\(\)"):
        type("Mine", (base,), {})(optimizer())


@pytest.mark.parametrize("factor", [-1.0, math.nan], ids=str)
@pytest.mark.parametrize(
    "make, name, attribute", [(LambdaNoise, "noise_lambda", NOISE), (LambdaGradClip, "scheduler_function", CLIP)]
)
def test_a_value_out_of_range_is_rejected_and_the_epoch_stays(make, name, attribute, factor):
    one = optimizer()
    scheduler = make(one, **{name: lambda epoch: factor if epoch else 1.0})
    with pytest.raises(ValueError, match=attribute):
        scheduler.step()
    assert (getattr(one, attribute), scheduler.last_epoch) == (2.0, 0)


@pytest.mark.parametrize("make", [ExponentialNoise, ExponentialGradClip])
@pytest.mark.parametrize("gamma", [-1.0, math.nan], ids=str)
def test_a_bad_gamma_is_rejected_at_construction(make, gamma):
    with pytest.raises(ValueError, match="gamma"):
        make(optimizer(), gamma=gamma)


@each_case
def test_an_optimizer_without_the_attribute_is_rejected(make, options, attribute, expected):
    with pytest.raises(ValueError, match=f"has no {attribute}"):
        make(torch.optim.SGD([torch.zeros(1)], lr=0.1), **options)


def test_a_state_without_an_epoch_is_rejected():
    with pytest.raises(ValueError, match="last_epoch"):
        ExponentialNoise(optimizer(), gamma=0.5).load_state_dict({"gamma": 0.1})


def test_each_of_several_bounds_follows_the_threshold():
    class PerLayer:
        """Optimizer with one bound for each parameter: the clipping norm is their L2 norm."""

        noise_multiplier = 1.0

        def __init__(self):
            self.max_grad_norms = [3.0, 4.0]

        @property
        def max_grad_norm(self):
            return math.hypot(*self.max_grad_norms)

        @max_grad_norm.setter
        def max_grad_norm(self, value):
            scale = value / self.max_grad_norm
            self.max_grad_norms = [bound * scale for bound in self.max_grad_norms]

    one = PerLayer()
    ExponentialGradClip(one, gamma=0.5).step()
    assert one.max_grad_norms == pytest.approx([1.5, 2.0])
