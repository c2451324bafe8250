"""Sensitivity, tested directly: adding or removing one sample moves the sum by at most the policy's sensitivity."""

import copy

import pytest
import torch
from clipping.architectures import ROWS, plans
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from inside_parts import ClippedPasses
from oracle import clip_by_loop, relative_error

from dpengine.clipping import AbstractClip, Adaptive, Automatic, Flat, Groups, PerLayer
from dpengine.clipping.custom_policy import CustomPolicy
from dpengine.grad_modes.modes import MODES


def groups_of(names):
    """Returns one group per child of the model, with different thresholds."""
    children = dict.fromkeys(name.partition(".")[0] for name in names)
    return Groups({child: 0.2 + 0.1 * place for place, child in enumerate(children)})


POLICIES = {  # for the names of a model's trainable parameters
    "flat": lambda names: Flat(0.5),
    "per-layer": lambda names: PerLayer(0.7),
    "automatic": lambda names: Automatic(0.4),
    "adaptive": lambda names: Adaptive(0.3),
    "groups": groups_of,
}


def clipped(model, plan, inputs, policy, mode):
    model = copy.deepcopy(model)
    passes = ClippedPasses(model, policy, mode=mode, loss_reduction=plan.reduction)
    plan.loss_of(model(inputs)).backward()
    passes.clip(rows=len(inputs))
    return passes.totals()


def check_one(plan, policy_name, mode, left_out):
    model, inputs = plan.build()
    policy = POLICIES[policy_name]([name for name, p in model.named_parameters() if p.requires_grad])
    together = clipped(model, plan, inputs, policy, mode)
    rest = [i for i in range(ROWS) if i != left_out]
    without = clipped(model, plan, inputs[rest], policy, mode)
    moved = torch.cat([(together[name] - without[name]).flatten() for name in together]).norm()
    # Sums are float64: the rounding error is far below the slack of the policies.
    assert float(moved) <= policy.sensitivity()
    if policy_name == "flat":
        loss_of_row = lambda output, i: plan.loss_of(output)  # noqa: E731
        truth, _ = clip_by_loop(model, (inputs,), loss_of_row, ROWS, max_norm=0.5)
        assert relative_error(together, truth) < 1e-8


def test_policies_lists_every_built_in_policy():
    drawn = {type(make(["a.weight", "b.weight"])) for make in POLICIES.values()}
    known = {policy for policy in AbstractClip.__subclasses__() if policy.__module__.startswith("dpengine.")}
    assert drawn == known - {CustomPolicy}  # which forwards to a user's policy


CHOICES = {
    "plan": plans(),
    "policy_name": st.sampled_from(sorted(POLICIES)),
    "mode": st.sampled_from(sorted(MODES)),
    "left_out": st.integers(0, ROWS - 1),
}
QUIET = {"deadline": None, "suppress_health_check": list(HealthCheck), "derandomize": True, "database": None}


@settings(max_examples=15, **QUIET)
@given(**CHOICES)
def test_one_sample_moves_the_sum_of_any_model_by_at_most_the_sensitivity(plan, policy_name, mode, left_out):
    check_one(plan, policy_name, mode, left_out)


@pytest.mark.slow
@settings(max_examples=200, **QUIET)
@given(**CHOICES)
def test_one_sample_moves_the_sum_by_at_most_the_sensitivity_for_more_models(plan, policy_name, mode, left_out):
    check_one(plan, policy_name, mode, left_out)


@pytest.mark.nightly
@settings(max_examples=1000, **QUIET)
@given(**CHOICES)
def test_one_sample_moves_the_sum_by_at_most_the_sensitivity_for_many_more_models(plan, policy_name, mode, left_out):
    check_one(plan, policy_name, mode, left_out)
