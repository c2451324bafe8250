"""Defects of Opacus: each step clips, scales its noise and is accounted with the same clipping norm."""

import math

import inside
import pytest
import torch
from opacus_defects.apis import (
    COMPAT_APIS,
    DEFAULT_APIS,
    GHOST_APIS,
    assert_equal,
    assert_run_is_right,
    fixed_loader,
    opacus,
    true_sum_by_group,
    with_apis,
)
from opacus_defects.small import FEATURES, classes, mlp, rows
from torch import nn

from dpengine.clipping import Adaptive, PerLayer

pytestmark = pytest.mark.filterwarnings("ignore::dpengine.PrivacyWarning")

COUNT = 24  # enough samples for adaptive clipping
SIGMA, NOISES = 2.0, 50 * 61  # the standard deviation of the estimate is 1.3 %, and six of them are allowed
TOLERANCE = 0.08


def batch():
    return rows(FEATURES, count=COUNT), classes(COUNT)


def open_with_zero_loss(api, **options):
    """Returns a run with zero loss, whose ``p.grad`` is only noise, and its batch."""
    zero_loss = lambda outputs, targets: 0 * outputs.sum(dim=1).mean()  # noqa: E731
    options |= {"criterion": zero_loss, "noise_multiplier": SIGMA}
    private = api.open(nn.Linear(60, 50), fixed_loader(COUNT), **options)
    return private, (torch.zeros(COUNT, 60), torch.zeros(COUNT, dtype=torch.long))


def std_of(total):
    return float(torch.cat([t.flatten() for t in total.values()]).std())


# Adaptive ghost: the default loss is reduced


@with_apis(DEFAULT_APIS)
@pytest.mark.hazard("O4")
def test_adaptive_clipping_uses_the_clipping_norm_of_the_same_step(api):
    policy = Adaptive(0.5, count_noise_multiplier=1.0)
    private = api.open(mlp(), fixed_loader(COUNT), max_grad_norm=None, clipping=policy)
    seen = set()
    for _ in range(2):
        threshold = inside.state(private.engine).clipping_norm
        seen.add(threshold)
        assert_run_is_right(private, batch(), threshold)
    assert len(seen) == 2


ADAPTIVE = {"target_unclipped_quantile": 0.5, "clipbound_learning_rate": 0.2}
LIMITS = {"max_clipbound": 1e8, "min_clipbound": 1e-3}


def open_adaptive(api, model, **options):
    kind = {"clipping": "adaptive", "unclipped_num_std": 2.0}
    if api.mode == "ghost":
        kind = {"make_engine": opacus("utils.adaptive_clipping").PrivacyEngineAdaptiveClipping}
    return api.open(model, fixed_loader(COUNT), **kind, **ADAPTIVE, **LIMITS, **options)


@with_apis(COMPAT_APIS)
@pytest.mark.hazard("O4")
def test_adaptive_clipping_of_compat_uses_the_clipping_norm_of_the_same_step(api):
    private = open_adaptive(api, mlp(), max_grad_norm=0.5)
    seen = []
    for _ in range(2):
        seen.append(float(private.optimizer.max_grad_norm))
        assert_run_is_right(private, batch(), seen[-1])
    assert len(set(seen)) == 2


# Ghost: the noise follows a schedule of the clipping norm, and the clipping does not


@with_apis(COMPAT_APIS)
@pytest.mark.hazard("O5")
def test_a_grad_clip_scheduler_changes_the_clipping_norm(api):
    private = api.open(mlp(), fixed_loader(COUNT), max_grad_norm=1.0)
    scheduler = opacus("schedulers").ExponentialGradClip(private.optimizer, gamma=0.1)
    for threshold in (1.0, 0.1):
        assert private.optimizer.max_grad_norm == pytest.approx(threshold)
        if api.mode == "ghost":
            assert private.module.max_grad_norm == pytest.approx(threshold)
        assert_run_is_right(private, batch(), threshold)
        scheduler.step()


@with_apis(GHOST_APIS)
@pytest.mark.hazard("O5")
def test_a_clipping_norm_set_on_the_module_warns_that_it_has_no_effect(api):
    private = api.open(mlp(), fixed_loader(COUNT), max_grad_norm=1.5)
    with pytest.warns(UserWarning, match=r"Set optimizer\.max_grad_norm"):
        private.module.max_grad_norm = 0.1
    assert private.module.max_grad_norm == private.optimizer.max_grad_norm == 1.5
    assert_run_is_right(private, batch(), 1.5)


@with_apis(COMPAT_APIS)
@pytest.mark.hazard("O5")
def test_a_schedule_of_the_clipping_norm_scales_the_noise_and_not_the_charge(api):
    private, zero_batch = open_with_zero_loss(api, max_grad_norm=1.0, poisson=True)
    clip_scheduler = opacus("schedulers").ExponentialGradClip(private.optimizer, gamma=0.1)
    for threshold in (1.0, 0.1):
        assert std_of(private.run(*zero_batch)) == pytest.approx(SIGMA * threshold, rel=TOLERANCE)
        clip_scheduler.step()
    assert [(sigma, steps) for sigma, _, steps in private.engine.accountant.history] == [(SIGMA, 2)]


@with_apis(COMPAT_APIS)
@pytest.mark.hazard("O5")
def test_a_noise_scheduler_changes_the_noise_and_the_charge(api):
    private, zero_batch = open_with_zero_loss(api, max_grad_norm=1.0, poisson=True)
    noise_scheduler = opacus("schedulers").ExponentialNoise(private.optimizer, gamma=2.0)
    private.run(*zero_batch)
    noise_scheduler.step()
    assert private.optimizer.noise_multiplier == 2 * SIGMA
    assert std_of(private.run(*zero_batch)) == pytest.approx(2 * SIGMA, rel=TOLERANCE)
    assert [(sigma, steps) for sigma, _, steps in private.engine.accountant.history] == [(SIGMA, 1), (2 * SIGMA, 1)]


@with_apis(DEFAULT_APIS)
@pytest.mark.hazard("O5", "C8")
def test_noise_and_charge_follow_a_moving_clipping_norm(api):
    policy = Adaptive(0.5, count_noise_multiplier=1.5, learning_rate=2.0)
    private, zero_batch = open_with_zero_loss(api, max_grad_norm=None, clipping=policy)
    for threshold in (0.5, None):
        threshold = threshold or inside.state(private.engine).clipping_norm
        description = private.engine.describe()
        std = threshold * (SIGMA**-2 - 3.0**-2) ** -0.5
        assert (description["clipping"]["norm"], description["sensitivity"]) == (threshold, threshold)
        assert description["noise_std_of_sum"] == pytest.approx(std)
        assert std_of(private.run(*zero_batch)) == pytest.approx(std, rel=TOLERANCE)
    assert inside.state(private.engine).clipping_norm != 0.5
    ((event, count),) = [(charge.event, charge.count) for charge in private.engine.ledger.history]
    assert (event.noise_multiplier, count) == (SIGMA, 2)


# Per layer: the noise follows a schedule of the clipping norm, and the bounds do not


def layer_of(name):
    return name.rpartition(".")[0]


@with_apis(DEFAULT_APIS)
@pytest.mark.hazard("O6")
def test_each_layer_has_its_clipping_norm_and_noise_follows_their_norm(api):
    options = {"max_grad_norm": [0.3, 0.05], "clipping": "per_layer"}
    found = api.clipped_sum(mlp(), nn.CrossEntropyLoss(), batch(), **options)
    bounds = {"0": 0.3, "2": 0.05}
    assert_equal(found, true_sum_by_group(mlp(), nn.CrossEntropyLoss(), batch(), bounds, layer_of))
    private = api.open(mlp(), fixed_loader(COUNT), noise_multiplier=SIGMA, **options)
    assert private.engine.describe()["noise_std_of_sum"] == pytest.approx(SIGMA * math.hypot(0.3, 0.05))
    assert inside.policy(private.engine) == PerLayer([0.3, 0.05])


PER_LAYER_APIS = [api for api in COMPAT_APIS if api.mode != "ghost"]
BOUNDS = [0.3, 0.2, 0.05, 0.4]


@with_apis(PER_LAYER_APIS)
@pytest.mark.hazard("O6")
def test_a_grad_clip_scheduler_changes_the_clipping_norm_of_each_parameter(api):
    private = api.open(mlp(), fixed_loader(COUNT), max_grad_norm=BOUNDS, clipping="per_layer")
    scheduler = opacus("schedulers").ExponentialGradClip(private.optimizer, gamma=0.1)
    for factor in (1.0, 0.1):
        assert private.optimizer.max_grad_norm == pytest.approx(factor * math.hypot(*BOUNDS))
        bounds = {name: factor * bound for name, bound in zip(private.bare.state_dict(), BOUNDS, strict=True)}
        truth = true_sum_by_group(private.bare, nn.CrossEntropyLoss(), batch(), bounds)
        assert_equal(private.run(*batch()), truth)
        scheduler.step()


@with_apis(PER_LAYER_APIS)
@pytest.mark.hazard("O6")
def test_the_noise_follows_the_norm_of_the_current_clipping_norms(api):
    private, zero_batch = open_with_zero_loss(api, max_grad_norm=[0.6, 0.8], clipping="per_layer")
    scheduler = opacus("schedulers").ExponentialGradClip(private.optimizer, gamma=0.1)
    scheduler.step()
    assert math.hypot(*private.optimizer.max_grad_norms) == pytest.approx(0.1)
    assert std_of(private.run(*zero_batch)) == pytest.approx(0.1 * SIGMA, rel=TOLERANCE)
