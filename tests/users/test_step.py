"""Gradients that a step applies, and the moment at which it is charged."""

import inside
import pytest
import torch
from loops import (
    assert_same_gradients,
    every_mode,
    expected_gradients,
    first_batch,
    gradients_of,
    make_loop,
    mlp,
    state_of,
)
from torch import nn

from dpengine.errors import LedgerError, PrivacyWarning, StaleGradientError

pytestmark = pytest.mark.filterwarnings("ignore:.*DPE012")


def assign_gradients(model):
    for p in model.parameters():
        p.grad = torch.full_like(p, 7.0)


def clip_gradients(model):
    nn.utils.clip_grad_norm_(model.parameters(), 1e-3)


@pytest.mark.one_in(2, "mode", others="slow")
@every_mode
@pytest.mark.parametrize(
    ("edit", "set_to_none"), [(assign_gradients, True), (assign_gradients, False), (clip_gradients, False)]
)
@pytest.mark.hazard("L8")
def test_gradients_that_were_changed_before_the_step_are_ignored_with_a_warning(edit, set_to_none, mode):
    loop = make_loop(grad_sample_mode=mode)
    batches = iter(loop.loader)
    loop.step(*next(batches))
    loop.optimizer.zero_grad(set_to_none)
    inputs, targets = next(batches)
    expected = expected_gradients(loop.model, [(inputs, targets)])
    loop.backward(inputs, targets)
    edit(loop.model)
    with pytest.warns(PrivacyWarning, match="DPE015.*max_grad_norm"):
        loop.optimizer.step()
    assert_same_gradients(gradients_of(loop.model), expected)


def test_p_grad_is_none_before_the_step():
    loop = make_loop()
    loop.backward(*first_batch(loop.loader))
    assert all(p.grad is None for p in loop.model.parameters())


def test_a_raw_gradient_of_a_frozen_parameter_is_never_applied():
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    nn.functional.cross_entropy(model(torch.randn(4, 4)), torch.tensor([0, 1, 2, 0])).backward()
    model[0].requires_grad_(False)
    loop = make_loop(model, make_optimizer=lambda parameters: optimizer)
    frozen = state_of(model[0])
    inputs, targets = first_batch(loop.loader)
    loop.backward(inputs, targets)
    with pytest.warns(PrivacyWarning, match="DPE015"):
        loop.optimizer.step()
    assert all(torch.equal(frozen[name], value) for name, value in state_of(model[0]).items())


def test_a_second_step_of_one_batch_is_rejected_before_its_noise_is_drawn():
    loop = make_loop(noise_multiplier=1.0)
    loop.step(*first_batch(loop.loader))
    weights = state_of(loop.model)
    with inside.drawn_noise(loop.engine) as draws, pytest.raises(StaleGradientError, match="twice for one batch"):
        loop.optimizer.step()
    assert not draws and loop.engine.ledger.steps == 1
    assert all(torch.equal(weights[name], value) for name, value in state_of(loop.model).items())


class UpdateError(RuntimeError):
    pass


class FailingSGD(torch.optim.SGD):
    """Fails in the update of the weights."""

    def step(self, closure=None):
        raise UpdateError


@pytest.mark.hazard("L5")
def test_the_ledger_is_written_before_the_weights_change():
    loop = make_loop(make_optimizer=lambda parameters: FailingSGD(parameters, lr=0.5), noise_multiplier=1.0)
    loop.backward(*first_batch(loop.loader))
    before = state_of(loop.model)
    with pytest.raises(UpdateError):
        loop.optimizer.step()
    assert [(charge.kind, charge.count) for charge in loop.engine.ledger.history] == [("release", 1)]
    assert all(torch.equal(before[name], value) for name, value in state_of(loop.model).items())


@pytest.mark.parametrize("error", [LedgerError("The disk is full."), OSError(28, "No space left"), KeyboardInterrupt()])
@pytest.mark.hazard("L5")
def test_a_step_that_cannot_be_charged_changes_nothing(error, monkeypatch):
    loop = make_loop(noise_multiplier=1.0)
    batches = iter(loop.loader)
    loop.backward(*next(batches))
    before = state_of(loop.model)

    def fail(*args, **kwargs):
        raise error

    monkeypatch.setattr(loop.engine.ledger, "charge", fail)
    with pytest.raises(type(error)):
        loop.optimizer.step()
    assert all(torch.equal(before[name], value) for name, value in state_of(loop.model).items())
    assert all(p.grad is None for p in loop.model.parameters())
    state = inside.state(loop.engine)
    assert state.clean and state.zero
    monkeypatch.undo()
    loop.step(*next(batches))
    assert loop.engine.ledger.steps == 1
