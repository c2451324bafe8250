"""One clipping norm bounds the sum, scales the noise, is charged and is shown, at each step."""

import math

import inside
import pytest
import torch
from opacus_defects.apis import (
    COMPAT_APIS,
    DEFAULT_APIS,
    GHOST_APIS,
    Private,
    assert_equal,
    fixed_loader,
    opacus,
    through,
    true_sum,
    true_sum_by_group,
)
from opacus_defects.small import FEATURES, classes, mlp, rows
from torch import nn

from dpengine.clipping import Adaptive, PerLayer

pytestmark = pytest.mark.filterwarnings("ignore::dpengine.PrivacyWarning")

COUNT = 24  # adaptive clipping wants a few rows
SIGMA, NOISES = 2.0, 50 * 61  # the deviation of so many draws is known to 1.3 % (one sigma); six are allowed
WITHIN = 0.08


def batch():
    return rows(FEATURES, count=COUNT), classes(COUNT)


def one_step(private: Private, batch):
    next(iter(private.loader))
    private.step(*batch)
    return private.sum()


def silent():
    """A model of which a step leaves noise alone: its inputs are zeros, and its loss is nothing."""
    return nn.Linear(60, 50), (torch.zeros(COUNT, 60), torch.zeros(COUNT, dtype=torch.long))


def nothing(outputs, targets):
    return 0 * outputs.sum(dim=1).mean()


def std_of(total):
    return float(torch.cat([t.flatten() for t in total.values()]).std())


# Adaptive ghost: the default loss is reduced


@through(DEFAULT_APIS)
@pytest.mark.hazard("O4")
def test_adaptive_clipping_obeys_the_threshold_of_the_same_step(api):
    model, policy = mlp(), Adaptive(0.5, count_noise_multiplier=1.0)
    private = api.open(model, fixed_loader(COUNT), max_grad_norm=None, clipping=policy)
    seen = set()
    for _ in range(2):
        threshold = inside.state(private.engine).clipping_norm
        seen.add(threshold)
        truth = true_sum(model, private.criterion, batch(), threshold)
        assert_equal(one_step(private, batch()), truth)
    assert len(seen) == 2


ADAPTIVE = {
    "target_unclipped_quantile": 0.5,
    "clipbound_learning_rate": 0.2,
    "max_clipbound": 1e8,
    "min_clipbound": 1e-3,
}


def open_adaptive(api, model, **options):
    if api.mode == "ghost":
        engine = opacus("utils.adaptive_clipping").PrivacyEngineAdaptiveClipping
        return api.open(model, fixed_loader(COUNT), make_engine=engine, **ADAPTIVE, **options)
    return api.open(model, fixed_loader(COUNT), clipping="adaptive", unclipped_num_std=2.0, **ADAPTIVE, **options)


@through(COMPAT_APIS)
@pytest.mark.hazard("O4")
def test_adaptive_clipping_of_every_compat_mode_too(api):
    model = mlp()
    private = open_adaptive(api, model, max_grad_norm=0.5)
    seen = []
    for _ in range(2):
        before = float(private.optimizer.max_grad_norm)
        plain = mlp()
        plain.load_state_dict(model.state_dict())
        assert_equal(one_step(private, batch()), true_sum(plain, nn.CrossEntropyLoss(), batch(), before))
        seen.append(before)
    assert len(set(seen)) == 2


# Ghost: the noise follows a schedule of the clipping norm, and the clipping does not


@through(COMPAT_APIS)
@pytest.mark.hazard("O5")
def test_a_grad_clip_scheduler_moves_the_clip(api):
    private = api.open(mlp(), fixed_loader(COUNT), max_grad_norm=1.0)
    scheduler = opacus("schedulers").ExponentialGradClip(private.optimizer, gamma=0.1)
    for threshold in (1.0, 0.1):
        assert private.optimizer.max_grad_norm == pytest.approx(threshold)
        if api.mode == "ghost":
            assert private.module.max_grad_norm == pytest.approx(threshold)
        plain = mlp()
        plain.load_state_dict(private.bare.state_dict())
        assert_equal(one_step(private, batch()), true_sum(plain, nn.CrossEntropyLoss(), batch(), threshold))
        scheduler.step()


@through(GHOST_APIS)
@pytest.mark.hazard("O5")
def test_a_threshold_written_on_the_module_is_said_to_change_nothing(api):
    private = api.open(mlp(), fixed_loader(COUNT), max_grad_norm=1.5)
    with pytest.warns(UserWarning, match=r"Set optimizer\.max_grad_norm"):
        private.module.max_grad_norm = 0.1
    assert private.module.max_grad_norm == private.optimizer.max_grad_norm == 1.5
    assert_equal(one_step(private, batch()), true_sum(mlp(), nn.CrossEntropyLoss(), batch(), 1.5))


@through(COMPAT_APIS)
@pytest.mark.hazard("O5")
def test_a_schedule_of_the_clipping_norm_scales_the_noise_and_not_the_charge(api):
    model, nothings = silent()
    options = {"criterion": nothing, "max_grad_norm": 1.0, "noise_multiplier": SIGMA, "poisson": True}
    private = api.open(model, fixed_loader(COUNT), **options)
    clips = opacus("schedulers").ExponentialGradClip(private.optimizer, gamma=0.1)
    for threshold in (1.0, 0.1):
        assert std_of(one_step(private, nothings)) == pytest.approx(SIGMA * threshold, rel=WITHIN)
        clips.step()
    assert [(sigma, steps) for sigma, _, steps in private.engine.accountant.history] == [(SIGMA, 2)]


@through(COMPAT_APIS)
@pytest.mark.hazard("O5")
def test_a_noise_scheduler_changes_the_noise_and_the_charge(api):
    model, nothings = silent()
    options = {"criterion": nothing, "max_grad_norm": 1.0, "noise_multiplier": SIGMA, "poisson": True}
    private = api.open(model, fixed_loader(COUNT), **options)
    noises = opacus("schedulers").ExponentialNoise(private.optimizer, gamma=2.0)
    one_step(private, nothings)
    noises.step()
    assert private.optimizer.noise_multiplier == 2 * SIGMA
    assert std_of(one_step(private, nothings)) == pytest.approx(2 * SIGMA, rel=WITHIN)
    assert [(sigma, steps) for sigma, _, steps in private.engine.accountant.history] == [(SIGMA, 1), (2 * SIGMA, 1)]


@through(DEFAULT_APIS)
@pytest.mark.hazard("O5")
def test_noise_and_ledger_follow_a_threshold_that_moves(api):
    model, nothings = silent()
    policy = Adaptive(0.5, count_noise_multiplier=1.5, learning_rate=2.0)
    options = {"criterion": nothing, "max_grad_norm": None, "clipping": policy, "noise_multiplier": SIGMA}
    private = api.open(model, fixed_loader(COUNT), **options)
    for threshold in (0.5, None):
        threshold = threshold or inside.state(private.engine).clipping_norm
        said = private.engine.describe()
        std = threshold * (SIGMA**-2 - 3.0**-2) ** -0.5
        assert (said["clipping"]["norm"], said["sensitivity"]) == (threshold, threshold)
        assert said["noise_std_of_sum"] == pytest.approx(std)
        assert std_of(one_step(private, nothings)) == pytest.approx(std, rel=WITHIN)
    assert inside.state(private.engine).clipping_norm != 0.5
    ((event, count),) = [(charge.event, charge.count) for charge in private.engine.ledger.history]
    assert (event.noise_multiplier, count) == (SIGMA, 2)


# Per layer: the noise follows a schedule of the clipping norm, and the bounds do not


def layer_of(name):
    return name.rpartition(".")[0]


@through(DEFAULT_APIS)
@pytest.mark.hazard("O6")
def test_each_layer_is_clipped_to_its_own_threshold_and_noise_has_the_norm_of_all(api):
    options = {"max_grad_norm": [0.3, 0.05], "clipping": "per_layer"}
    found = api.clipped_sum(mlp(), nn.CrossEntropyLoss(), batch(), **options)
    bounds = {"0": 0.3, "2": 0.05}
    assert_equal(found, true_sum_by_group(mlp(), nn.CrossEntropyLoss(), batch(), bounds, layer_of))
    private = api.open(mlp(), fixed_loader(COUNT), noise_multiplier=SIGMA, **options)
    assert private.engine.describe()["noise_std_of_sum"] == pytest.approx(SIGMA * math.hypot(0.3, 0.05))
    assert inside.policy(private.engine) == PerLayer([0.3, 0.05])


PER_LAYER_APIS = [api for api in COMPAT_APIS if api.mode != "ghost"]
BOUNDS = [0.3, 0.2, 0.05, 0.4]


@through(PER_LAYER_APIS)
@pytest.mark.hazard("O6")
def test_a_grad_clip_scheduler_moves_the_threshold_of_every_parameter(api):
    private = api.open(mlp(), fixed_loader(COUNT), max_grad_norm=BOUNDS, clipping="per_layer")
    scheduler = opacus("schedulers").ExponentialGradClip(private.optimizer, gamma=0.1)
    for factor in (1.0, 0.1):
        assert private.optimizer.max_grad_norm == pytest.approx(factor * math.hypot(*BOUNDS))
        plain = mlp()
        plain.load_state_dict(private.bare.state_dict())
        names = [name for name, _ in plain.named_parameters()]
        bounds = {name: factor * bound for name, bound in zip(names, BOUNDS, strict=True)}
        truth = true_sum_by_group(plain, nn.CrossEntropyLoss(), batch(), bounds)
        assert_equal(one_step(private, batch()), truth)
        scheduler.step()


@through(PER_LAYER_APIS)
@pytest.mark.hazard("O6")
def test_the_noise_follows_the_norm_of_the_thresholds_in_force(api):
    model, nothings = silent()
    options = {"criterion": nothing, "max_grad_norm": [0.6, 0.8], "clipping": "per_layer", "noise_multiplier": SIGMA}
    private = api.open(model, fixed_loader(COUNT), **options)
    scheduler = opacus("schedulers").ExponentialGradClip(private.optimizer, gamma=0.1)
    scheduler.step()
    assert math.hypot(*private.optimizer.max_grad_norms) == pytest.approx(0.1)
    assert std_of(one_step(private, nothings)) == pytest.approx(0.1 * SIGMA, rel=WITHIN)
