"""Parameters added later, shared or replaced accountants, and jumps across passes: every step is counted."""

import contextlib

import pytest
import torch
from opacus_runs import arguments, loss, rows, step
from torch import nn
from torch.utils.data import DataLoader

from dpengine.compat.opacus import PrivacyEngine
from dpengine.compat.opacus.accountants import RDPAccountant, create_accountant
from dpengine.compat.opacus.utils.batch_memory_manager import BatchMemoryManager
from dpengine.errors import ParameterMismatchError


def private(engine, **options):
    return engine.make_private(**arguments(data_loader=DataLoader(rows(20), 4), max_grad_norm=1e-3, **options))


def train(model, optimizer, loader):
    for batch in loader:
        step(model, optimizer, *batch)


def add_a_group(optimizer, parameter):
    optimizer.add_param_group({"params": [parameter]})


def add_inside(optimizer, parameter):
    optimizer.original_optimizer.add_param_group({"params": [parameter]})


def append(optimizer, parameter):
    optimizer.param_groups[0]["params"].append(parameter)


@pytest.mark.parametrize("add", [add_a_group, add_inside, append])
def test_a_parameter_that_is_added_later_never_moves_by_its_raw_gradient(add):
    model, optimizer, loader = private(PrivacyEngine())
    scale = nn.Parameter(torch.ones(()))
    with pytest.raises((ParameterMismatchError, AttributeError)):
        add(optimizer, scale)
        for inputs, targets in loader:
            (loss(model, inputs, targets) * scale).backward()
            optimizer.step()
    assert scale.item() == 1.0


def test_an_accountant_that_three_engines_share_counts_the_steps_of_all():
    first, *others = [PrivacyEngine() for _ in range(3)]
    for engine in others:
        engine.accountant = first.accountant
    for engine in (first, *others):
        train(*private(engine))
    for _ in range(2):  # reading changes nothing
        assert sum(steps for _, _, steps in first.accountant.history) == 15


def test_an_accountant_that_is_set_later_counts_from_then_on():
    engine = PrivacyEngine()
    parts = private(engine)
    engine.accountant = create_accountant("rdp")
    train(*parts)
    assert sum(steps for _, _, steps in engine.accountant.history) == 5
    assert engine.get_epsilon(1e-5) > 0


def test_an_overridden_step_of_an_accountant_is_called_for_each_step():
    class HalvedNoise(RDPAccountant):
        def step(self, *, noise_multiplier, sample_rate):
            super().step(noise_multiplier=noise_multiplier / 2, sample_rate=sample_rate)

    engine = PrivacyEngine()
    engine.accountant = HalvedNoise()
    parts = private(engine)
    parts[1].step_hook = None  # which removes only the hooks that scripts attached
    train(*parts)
    assert [(sigma, steps) for sigma, _, steps in engine.accountant.history] == [(0.5, 5)]


def test_a_custom_accountant_counts_a_step_that_fails_after_its_charge():
    class Subclassed(RDPAccountant):
        def step(self, *, noise_multiplier, sample_rate):
            super().step(noise_multiplier=noise_multiplier, sample_rate=sample_rate)

    engine = PrivacyEngine()
    engine.accountant = Subclassed()
    model, optimizer, loader = private(engine)
    scale_grad = optimizer.scale_grad
    for number, (inputs, targets) in enumerate(loader):
        optimizer.scale_grad = scale_grad if number != 2 else _fail
        with contextlib.nullcontext() if number != 2 else pytest.raises(RuntimeError):
            step(model, optimizer, inputs, targets)
    assert sum(steps for _, _, steps in engine.accountant.history) == engine.engine.ledger.steps == 5


def _fail():
    raise RuntimeError("no scale")


def test_a_jump_into_another_epoch_is_charged_as_a_separate_epoch():
    engine = PrivacyEngine()
    model, optimizer, loader = private(engine, poisson_sampling=False)
    train(model, optimizer, loader)
    batches = iter(loader)
    for _ in range(4):
        step(model, optimizer, *next(batches))
    optimizer.noise_multiplier = 0.9
    step(model, optimizer, *next(batches))
    loader.load_state_dict({"position": 13})
    step(model, optimizer, *next(iter(loader)))
    passes = sum(c.event.cycles(c.count) for c in engine.engine.ledger.totals if c.event.noise_multiplier == 0.9)
    assert passes == 2


def test_the_length_of_a_loader_in_chunks_is_about_the_number_of_chunks():
    _, optimizer, loader = private(PrivacyEngine())
    with BatchMemoryManager(data_loader=loader, max_physical_batch_size=2, optimizer=optimizer) as chunks:
        assert (len(loader), len(chunks)) == (5, 10)
    assert len(loader) == 5


def test_a_backward_pass_that_trains_a_generator_after_the_step_costs_nothing():
    engine = PrivacyEngine()
    model, optimizer, loader = private(engine)
    made = nn.Linear(2, 3)
    for inputs, targets in loader:
        step(model, optimizer, inputs, targets)
        optimizer.zero_grad()
        model(made(torch.randn(6, 2))).sum().backward()
        assert made.weight.grad is not None
    assert sum(steps for _, _, steps in engine.accountant.history) == 5
