"""Detach removes all hooks and attributes, and the user's objects keep working."""

import warnings

import pytest
import torch
from case_models import model_of
from loops import every_mode, first_batch, make_loop, mlp, state_of
from torch import nn
from torch.optim import lr_scheduler

pytestmark = pytest.mark.filterwarnings("ignore:.*DPE012")


@model_of(
    lambda: {
        "rnn": nn.LSTM(4, 4, batch_first=True),
        "mix": nn.MultiheadAttention(4, 2, batch_first=True),
        "head": nn.Linear(4, 3),
    }
)
def recurrent(m, inputs):
    """Model with layers that batch-first layers replace while it is private."""
    hidden = m.rnn(inputs.unsqueeze(1))[0]
    return m.head(m.mix(hidden, hidden, hidden)[0][:, 0])


def hooks_of(model):
    names = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    found = [hook for module in model.modules() for name in names for hook in getattr(module, name).values()]
    return found + [hook for p in model.parameters() for hook in (p._post_accumulate_grad_hooks or {}).values()]


def plain_training(model, optimizer, batches):
    for inputs, targets in batches:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(inputs), targets).backward()
        optimizer.step()
    return state_of(model)


@pytest.mark.one_in(4, "make_model", "mode", others="slow")
@pytest.mark.one_in(2, "make_model", "mode")
@pytest.mark.parametrize("make_model", [mlp, recurrent])
@every_mode
def test_detach_leaves_no_hooks_or_attributes(make_model, mode):
    model, never_private = make_model(), make_model()
    model.load_state_dict(start := state_of(never_private))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    scheduler = lr_scheduler.StepLR(optimizer, 1)
    own_step, attributes = optimizer.__dict__["step"], set(optimizer.__dict__)
    modules = [(module, type(module), set(module.__dict__)) for module in model.modules()]
    parameters = [(p, set(p.__dict__)) for p in model.parameters()]

    loop = make_loop(
        model, make_optimizer=lambda _: optimizer, noise_multiplier=1.0, grad_sample_mode=mode, lr_scheduler=scheduler
    )
    batches = list(loop.loader)
    for batch in loop.loader:
        loop.step(*batch)
    loop.engine.detach(model)

    assert type(optimizer) is torch.optim.SGD
    assert type(scheduler) is lr_scheduler.StepLR
    assert optimizer.__dict__["step"] is own_step
    assert set(optimizer.__dict__) - {"_opt_called"} == attributes - {"_opt_called"}
    assert [(m, type(m), set(m.__dict__)) for m, _, _ in modules] == modules
    assert [(p, set(p.__dict__)) for p, _ in parameters] == parameters
    assert not hooks_of(model)
    model.load_state_dict(start)
    optimizer.state.clear()
    found = plain_training(model, optimizer, batches)
    truth = plain_training(never_private, torch.optim.SGD(never_private.parameters(), lr=0.1, momentum=0.9), batches)
    assert all(torch.equal(found[name], truth[name]) for name in truth)


def test_a_scheduler_of_the_private_optimizer_continues_after_detach():
    loop = make_loop()
    scheduler = lr_scheduler.StepLR(loop.optimizer, 1, gamma=0.5)
    loop.step(*first_batch(loop.loader))
    loop.engine.detach(loop.model)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        loop.step(*first_batch(loop.loader))
        scheduler.step()
    assert loop.optimizer.param_groups[0]["lr"] == pytest.approx(0.5 * 0.5)
    assert loop.engine.ledger.steps == 1  # the charge stays, and steps after detach add none
