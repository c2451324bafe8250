"""Copies of engines and optimizers: refused where steps would be counted in one and made in the other."""

import copy
import pickle

import pytest
import torch
from opacus_runs import batch, by_hand, loss, model, private, rows, train
from torch.utils.data import DataLoader

import dpengine
from dpengine.compat.opacus import PrivacyEngine

WAYS = {"copy": copy.copy, "deepcopy": copy.deepcopy, "pickle": lambda one: pickle.loads(pickle.dumps(one))}
ways = pytest.mark.parametrize("way", WAYS)


def engine_itself():
    engine, module = dpengine.PrivacyEngine(), model()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    engine.make_private(module, optimizer, DataLoader(rows(), 4), noise_multiplier=1.0)
    return engine


def engine_of_compat():
    return private(noise_multiplier=1.0).engine


@ways
@pytest.mark.parametrize("made", [engine_itself, engine_of_compat])
def test_an_engine_with_private_models_is_not_copied(way, made):
    engine = made()
    with pytest.raises(TypeError, match=r"PrivacyEngine cannot be copied.*account of private models.*checkpoint"):
        WAYS[way](engine)


@ways
@pytest.mark.parametrize("kind", [dpengine.PrivacyEngine, PrivacyEngine])
def test_an_engine_without_is_and_counts_by_itself(way, kind):
    engine, module = kind(), model()
    other = WAYS[way](engine)
    made = other.make_private(
        module=module,
        optimizer=torch.optim.SGD(module.parameters(), lr=0.1),
        data_loader=DataLoader(rows(), 4),
        noise_multiplier=1.0,
        max_grad_norm=1.0,
    )
    for inputs, targets in made[2]:
        made[1].zero_grad()
        loss(made[0], inputs, targets).backward()
        made[1].step()
    assert other.get_epsilon(1e-3) > 0
    assert engine.get_epsilon(1e-3) == 0 or way == "copy"


def test_a_copied_accountant_keeps_what_was_spent_until_then():
    parts = private(noise_multiplier=1.0, poisson_sampling=True)
    train(parts)
    kept, before = copy.deepcopy(parts.engine.accountant), parts.engine.get_epsilon(1e-3)
    train(parts)
    assert kept.get_epsilon(1e-3) == before < parts.engine.get_epsilon(1e-3)


@ways
def test_a_private_optimizer_is_not_copied_and_goes_on(way):
    wrapped, optimizer = by_hand()
    with pytest.raises(TypeError, match=r"DPOptimizer cannot be copied.*state_dict\(\).*make_private"):
        WAYS[way](optimizer)
    loss(wrapped, *batch()).backward()
    optimizer.step()
