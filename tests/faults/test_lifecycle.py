"""One private step: order of calls, charges, parameters and hooks."""

import copy
import logging

import inside
import pytest
import torch
import torch.nn.functional as F
from faults.neighbours import CLASSES, FEATURES, MODES, assert_right, mlp, tensors
from loops import expected_gradients, first_batch, gradients_of, make_loop, state_of
from loops import mlp as loop_mlp
from torch import nn
from torch.optim import lr_scheduler

from dpengine.errors import (
    BatchStateError,
    MissingGradientError,
    PrivacyError,
    PrivacyWarning,
)

pytestmark = pytest.mark.filterwarnings("ignore:.*DPE012")
every_mode = pytest.mark.parametrize("mode", MODES)


def ledger_of(loop):
    return [(charge.kind, charge.count) for charge in loop.engine.ledger.history]


def assert_same(found, expected, tolerance=1e-5):
    scale = max(float(value.norm()) for value in expected.values())
    for name, value in expected.items():
        assert float((found[name].double() - value.double()).norm()) <= tolerance * scale, name


@pytest.mark.parametrize(
    ("prepare", "message"),
    [
        (lambda loop: None, "loader returned no batch"),
        (lambda loop: first_batch(loop.loader), "no backward pass ran"),
        (lambda loop: loop.model.eval() and loop.backward(*first_batch(loop.loader)), "eval mode"),
    ],
    ids=["no-batch", "no-backward", "eval-mode"],
)
@pytest.mark.hazard("L2")
def test_a_step_without_clipped_gradients_raises_and_names_the_cause(prepare, message):
    loop = make_loop(noise_multiplier=1.0)
    before = state_of(loop.model)
    prepare(loop)
    with pytest.raises(BatchStateError, match=rf"DPE022.*{message}"):
        loop.optimizer.step()
    assert all(torch.equal(before[name], value) for name, value in state_of(loop.model).items())


@pytest.mark.one_in(2, "mode", others="slow")
@every_mode
@pytest.mark.hazard("L3")
def test_eval_mode_between_forward_and_backward_changes_nothing(mode):
    def step(model, optimizer, inputs, targets):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(inputs), targets)
        model.eval()
        loss.backward()
        optimizer.step()
        assert not model.training

    assert_right(nn.Sequential(mlp(), nn.Dropout(0.0)), tensors(), step, plain=mlp(), mode=mode)


# An interrupted logical batch is discarded and charged


def stop_iterating(loop, chunks):
    return iter(loop.loader)


def fail_in_forward(loop, chunks):
    inputs, _ = next(chunks)
    with pytest.raises(RuntimeError):
        loop.model(inputs[:, :2])
    return chunks


def fail_in_backward(loop, chunks):
    inputs, targets = next(chunks)
    output = loop.model(inputs)
    output.register_hook(lambda grad: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        F.cross_entropy(output, targets).backward()
    return chunks


def out_of_memory(loop, chunks):
    batch = next(chunks)
    error = torch.OutOfMemoryError("CUDA out of memory.")
    with inside.failing_sums(loop.engine, error), pytest.raises(torch.OutOfMemoryError):
        loop.backward(*batch)
    return chunks


@pytest.mark.parametrize("end", [stop_iterating, fail_in_forward, fail_in_backward, out_of_memory])
@every_mode
@pytest.mark.hazard("L4")
def test_an_interrupted_batch_is_charged_and_does_not_affect_the_next(mode, end):
    loop = make_loop(accumulation_steps=3, batch_size=12, grad_sample_mode=mode)
    chunks = iter(loop.loader)
    loop.backward(*next(chunks))
    assert not inside.state(loop.engine).clean
    chunks = end(loop, chunks)
    while inside.state(loop.engine).stage != "idle":  # the rest of the discarded batch, then a complete one
        loop.optimizer.zero_grad()
        expected = []
        for position in range(3):
            batch = next(chunks)
            step = inside.state(loop.engine).step
            expected.append((step, batch))
            try:
                loop.backward(*batch)
                loop.optimizer.step()
            except BatchStateError:
                expected.clear()
                break
            if position == 2:
                assert len({step for step, _ in expected}) == 1
        if len(expected) == 3 and not loop.optimizer.step_was_skipped:
            break
    assert ledger_of(loop) == [("void", 1), ("release", 1)]
    truth = expected_gradients(loop_mlp(), [batch for _, batch in expected], divisor=12)
    assert_same(gradients_of(loop.model), truth)


# Parameters that are added, frozen, unfrozen or replaced


@pytest.mark.hazard("L9")
def test_a_parameter_unfrozen_between_steps_gets_noise():
    model = loop_mlp()
    model[0].requires_grad_(False)
    loop = make_loop(model, make_optimizer=lambda _: torch.optim.SGD(model.parameters(), lr=1.0), noise_multiplier=50.0)
    batches = iter(loop.loader)
    loop.step(*next(batches))
    assert model[0].weight.grad is None
    model.requires_grad_(True)
    loop.step(*next(batches))
    for parameter in model.parameters():
        assert 0.3 < float(parameter.grad.std()) * 6 / 50 < 3


@pytest.mark.one_in(4, "when", "what", "mode", others="slow")
@pytest.mark.one_in(2, "when", "what", "mode")
@pytest.mark.parametrize("when", ["before backward", "before step"])
@pytest.mark.parametrize("what", ["swap", "freeze", "unfreeze", "add"])
@every_mode
@pytest.mark.hazard("L9")
def test_a_parameter_that_changes_within_a_step_raises(mode, what, when):
    model = loop_mlp()
    model[0].weight.requires_grad_(what != "unfreeze")
    loop = make_loop(
        model, make_optimizer=lambda _: torch.optim.SGD(model.parameters(), lr=1.0), grad_sample_mode=mode,
        noise_multiplier=1.0,
    )  # fmt: skip
    before = state_of(model)
    loss = F.cross_entropy(model(first_batch_inputs(loop)), loop.targets)
    change = {
        "swap": lambda: setattr(model[0], "weight", nn.Parameter(torch.zeros(5, FEATURES))),
        "freeze": lambda: model[0].weight.requires_grad_(False),
        "unfreeze": lambda: model[0].weight.requires_grad_(True),
        "add": lambda: model.add_module("3", nn.Linear(CLASSES, CLASSES)),
    }[what]
    with pytest.raises(PrivacyError, match=r"DPE0(01|02|16)"):
        if when == "before backward":
            change()
            loss.backward()
        else:
            loss.backward()
            change()
        loop.optimizer.step()
    loop.engine.detach(model)
    assert ledger_of(loop) == [("void", 1)]
    for name in ("0.bias", "2.weight", "2.bias"):
        assert torch.equal(model.get_parameter(name), before[name])


def first_batch_inputs(loop):
    inputs, loop.targets = first_batch(loop.loader)
    return inputs


@pytest.mark.hazard("L11")
def test_a_schedule_that_depends_on_the_loss_warns():
    model = loop_mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    scheduler = lr_scheduler.ReduceLROnPlateau(optimizer)
    with pytest.warns(PrivacyWarning, match="ReduceLROnPlateau"):
        make_loop(model, make_optimizer=lambda _: optimizer, noise_multiplier=1.0, lr_scheduler=scheduler)


@pytest.mark.parametrize(
    "kind",
    [
        lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9, weight_decay=0.1, nesterov=True),
        lambda parameters: torch.optim.AdamW(parameters, lr=0.1, weight_decay=0.1),
    ],
    ids=["sgd", "adamw"],
)
@pytest.mark.hazard("L12")
def test_momentum_and_decay_depend_on_released_gradients_only(kind):
    loop = make_loop(make_optimizer=kind, noise_multiplier=1.0)
    replay = copy.deepcopy(loop.model)
    optimizer = kind(replay.parameters())
    average = torch.optim.swa_utils.AveragedModel(loop.model)
    replayed = torch.optim.swa_utils.AveragedModel(replay)
    for batch in loop.loader:
        loop.step(*batch)
        for one, other in zip(loop.model.parameters(), replay.parameters(), strict=True):
            other.grad = one.grad.clone()
        optimizer.step()
        average.update_parameters(loop.model)
        replayed.update_parameters(replay)
    assert_same(state_of(replay), state_of(loop.model), 1e-6)
    assert_same(dict(replayed.named_parameters()), dict(average.named_parameters()), 1e-6)


@pytest.mark.hazard("L13")
def test_nothing_that_depends_on_samples_is_logged_or_printed(caplog, capsys):
    caplog.set_level(logging.DEBUG)
    loop = make_loop(noise_multiplier=1.0)
    sizes = []
    for inputs, targets in loop.loader:
        sizes.append(len(targets))
        loop.step(inputs, targets)
    shown = caplog.text + "".join(capsys.readouterr())
    assert shown == ""
    assert not any("nonprivate" in name for name in loop.engine.metrics())
    assert all(name.startswith(("privacy/", "nonprivate/")) for name in loop.engine.metrics(nonprivate=True))
    public = f"{loop.optimizer!r} {loop.engine.describe()} {inside.public_text(loop.engine)}"
    assert "rows" not in public
    assert f"{inside.state(loop.engine).largest_norm}" not in public and sizes


# Removed hooks


@pytest.mark.parametrize("how", ["removed", "replaced"])
@pytest.mark.parametrize("mode", ["auto", "hooks", "ghost"])
@pytest.mark.hazard("L14")
def test_a_layer_that_runs_another_forward_is_rejected(mode, how):
    loop = make_loop(noise_multiplier=1.0, grad_sample_mode=mode)
    layer = loop.model[0]
    if how == "removed":
        del layer.forward
    else:
        layer.forward = lambda inputs: F.linear(inputs, layer.weight, layer.bias)
    with pytest.raises(MissingGradientError, match=r"DPE002.*'0\."):
        loop.step(*first_batch(loop.loader))
    loop.engine.detach(loop.model)
    assert ("forward" in vars(layer)) == (how == "replaced")
    assert ledger_of(loop) == [("void", 1)]


@pytest.mark.hazard("L14")
def test_hooks_that_are_removed_from_the_model_do_not_change_the_gradients():
    loop = make_loop()
    loop.model._forward_pre_hooks.clear()
    loop.model._forward_hooks.clear()
    inputs, targets = first_batch(loop.loader)
    expected = expected_gradients(loop.model, [(inputs, targets)])
    loop.step(inputs, targets)
    assert_same(gradients_of(loop.model), expected)


@pytest.mark.parametrize("transform", ["vmap", "grad"])
@pytest.mark.hazard("L14")
def test_functional_transforms_of_a_private_model_work_and_leave_no_trace(transform):
    loop = make_loop()
    inputs, targets = first_batch(loop.loader)
    parameters = {name: p.detach() for name, p in loop.model.named_parameters()}

    def loss_of(parameters):
        return F.cross_entropy(torch.func.functional_call(loop.model, parameters, (inputs,)), targets)

    if transform == "grad":
        found = torch.func.grad(loss_of)(parameters)
        assert all(value.isfinite().all() for value in found.values())
    else:
        torch.func.vmap(loop.model)(inputs)
    expected = expected_gradients(loop.model, [(inputs, targets)])
    loop.step(inputs, targets)
    assert_same(gradients_of(loop.model), expected)


@pytest.mark.parametrize("leaf", [True, False])
@pytest.mark.hazard("L14")
def test_tensors_in_place_of_parameters_are_rejected_by_name(leaf):
    loop = make_loop()
    inputs, targets = first_batch(loop.loader)
    given = {
        name: p.detach().clone().requires_grad_() if leaf else p * 1.0 for name, p in loop.model.named_parameters()
    }
    with pytest.raises(PrivacyError, match=r"DPE0.*'0\.weight'|DPE0.*'2\.weight'"):
        F.cross_entropy(torch.func.functional_call(loop.model, given, (inputs,)), targets).backward()
