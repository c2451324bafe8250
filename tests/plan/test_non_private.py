"""The config without privacy, and the notice of a cut that costs much."""

import dataclasses
import math

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from dpengine import PrivacyEngine, PrivacyWarning
from dpengine.errors import InvalidBudgetError, forget_notices
from dpengine.plan import DPSGDConfig, NonPrivateConfig

CONFIG = NonPrivateConfig(iterations=6, batch_size=5, normalize_by=5.0)


def test_it_runs_as_any_plan_and_protects_nothing():
    plan = CONFIG.make()
    data = torch.randn(20, 3)
    gradient = plan.clipped_grad(lambda w, row: ((row * w).sum() - 3) ** 2)
    state = plan.noise_addition_transform.init(torch.zeros(3))
    for indices in plan.batch_selection_strategy.batch_iterator(20, np.random.default_rng(0)):
        assert len(indices) == 5
        weights = torch.randn(3, requires_grad=True)
        noisy, state = plan.noise_addition_transform.update(gradient(weights, data[indices]), state)
        ((data[indices] @ weights - 3) ** 2).mean().backward()
        torch.testing.assert_close(noisy, weights.grad)
    assert plan.stddev == 0 and plan.epsilon(1e-5) == math.inf and plan.epsilon(1e-5, 0) == 0
    assert "NonPrivate" in type(plan.dp_event).__name__


def test_it_comes_back_from_json_and_says_what_it_is():
    assert NonPrivateConfig.from_json(CONFIG.to_json()) == CONFIG
    assert CONFIG.describe()["sensitivity"] == math.inf


def test_there_is_nothing_to_calibrate():
    with pytest.raises(InvalidBudgetError, match=r"cannot meet epsilon=1.*Use DPSGDConfig"):
        CONFIG.calibrate(epsilon=1.0, delta=1e-5)
    assert CONFIG.calibrate(epsilon=math.inf, delta=1e-5) == CONFIG
    with pytest.raises(ValueError, match="noise_multiplier"):
        dataclasses.replace(CONFIG, noise_multiplier=1.0)


@pytest.mark.parametrize("fields", [{"batch_size": 0}, {"iterations": 0}, {"normalize_by": 0.0}])
def test_bad_fields_are_refused(fields):
    with pytest.raises(ValueError, match=next(iter(fields))):
        dataclasses.replace(CONFIG, **fields)


def test_the_engine_has_no_run_for_it():
    model = nn.Linear(3, 1)
    with pytest.raises(InvalidBudgetError):
        PrivacyEngine().make_private(
            model,
            torch.optim.SGD(model.parameters(), lr=0.1),
            DataLoader(TensorDataset(torch.randn(20, 3)), batch_size=5),
            plan=CONFIG,
            target_delta=1e-3,
        )


@pytest.mark.slow
@pytest.mark.parametrize("ask", [lambda c: c.epsilon(1e-5), lambda c: c.calibrate(epsilon=5.0, delta=1e-5, tol=0.1)])
def test_a_steep_cut_is_noticed_with_one_that_is_not(ask):
    settings = {"iterations": 20, "sampling_prob": 0.1, "num_examples": 1000, "noise_multiplier": 1.0}
    forget_notices()
    with pytest.warns(PrivacyWarning, match=r"truncated_batch_size=120 truncates.*From (\d+) on") as seen:
        ask(DPSGDConfig(truncated_batch_size=120, **settings))
    enough = int(str(seen[0].message).split("From ")[1].split()[0])
    forget_notices()
    ask(DPSGDConfig(truncated_batch_size=enough, **settings))  # a warning would be an error
    with pytest.warns(PrivacyWarning):
        ask(DPSGDConfig(truncated_batch_size=enough - 1, **settings))
