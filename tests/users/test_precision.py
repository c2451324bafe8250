"""Mixed precision, loss scalers and compiled models."""

import copy
import math
import pickle

import inside
import pytest
import torch
import torch.nn.functional as F
from case_models import model_of
from loops import (
    CLASSES,
    FEATURES,
    assert_same_gradients,
    every_mode,
    examples,
    expected_gradients,
    first_batch,
    gradients_of,
    make_loop,
    mlp,
    state_of,
)
from torch import nn
from torch.utils.data import TensorDataset

from dpengine.errors import ScaledGradientError

pytestmark = pytest.mark.filterwarnings("ignore:.*DPE012", "ignore:.*lr_scheduler.step")


@model_of(
    lambda: {"conv": nn.Conv1d(1, 4, 2), "norm": nn.GroupNorm(2, 4), "head": nn.Linear(4 * (FEATURES - 1), CLASSES)}
)
def small_model(m, inputs):
    """A convolution, a norm and a dense layer."""
    return m.head(m.norm(m.conv(inputs.unsqueeze(1))).tanh().flatten(1))


# Half precision and autocast


@pytest.mark.one_in(6, "mode", "max_norm", "how", others="slow")
@pytest.mark.one_in(3, "mode", "max_norm", "how")
@every_mode
@pytest.mark.parametrize("max_norm", [0.1, 100.0], ids=["clipping", "not clipping"])
@pytest.mark.parametrize("how", ["autocast", "parameters"])
def test_bfloat16_works_in_every_mode(how, max_norm, mode):
    model = small_model()
    dataset = examples()
    if how == "parameters":
        model.bfloat16()
        dataset = TensorDataset(dataset.tensors[0].bfloat16(), dataset.tensors[1])
    loop = make_loop(model, dataset=dataset, grad_sample_mode=mode, max_grad_norm=max_norm)
    inputs, targets = first_batch(loop.loader, least=4)
    expected = expected_gradients(model, [(inputs.float(), targets)], max_norm=max_norm)
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=how == "autocast"):
        loss = F.cross_entropy(model(inputs), targets)
    loss.backward()
    assert inside.sum_dtypes(loop.engine) == {torch.float32}
    sums = torch.cat([total.flatten() for total in inside.clipped_sums(loop.engine).values()])
    assert sums.norm() <= len(targets) * max_norm
    loop.optimizer.step()
    found = gradients_of(model)
    assert {gradient.dtype for gradient in found.values()} == {next(model.parameters()).dtype}
    # bfloat16 has 8 significant bits, and the pass rounds about ten times
    assert_same_gradients(found, expected, rtol=0.03)


@pytest.mark.one_in(6, "mode", others="slow")
@pytest.mark.one_in(2, "mode")
@every_mode
def test_sums_of_bfloat16_gradients_do_not_stagnate(mode):
    rows, max_norm = 400, 2.0**-10
    model = nn.Linear(1, 1, bias=False).bfloat16()
    dataset = TensorDataset(torch.ones(rows, 1, dtype=torch.bfloat16), torch.zeros(rows))
    loop = make_loop(
        model, dataset=dataset, batch_size=rows, physical_batch_size=5, grad_sample_mode=mode, max_grad_norm=max_norm
    )
    for inputs, _ in loop.loader:
        model(inputs).mean().backward()
    total = float(inside.clipped_sums(loop.engine)["weight"])
    assert total == pytest.approx(rows * max_norm, rel=1e-5)  # in bfloat16 it would stop at 256 * max_norm


@pytest.mark.hazard("N12")
def test_noise_is_drawn_in_float32_and_cast_after_the_division():
    model = nn.Linear(FEATURES, CLASSES).bfloat16()
    dataset = TensorDataset(examples().tensors[0].bfloat16(), examples().tensors[1])
    loop = make_loop(model, dataset=dataset, noise_multiplier=1.0)
    seen = []
    inside.record_noise(loop.engine, lambda flat, step, start: seen.append(flat.dtype))
    loop.step(*first_batch(loop.loader))
    assert seen == [torch.float32]
    assert model.weight.grad.dtype is torch.bfloat16


# Gradient scalers


@pytest.mark.one_in(4, "mode", "max_norm", others="slow")
@pytest.mark.one_in(2, "mode", "max_norm")
@every_mode
@pytest.mark.parametrize("max_norm", [0.05, 100.0], ids=["clipping", "not clipping"])
@pytest.mark.hazard("L6", "O45")
def test_a_scaler_changes_nothing(max_norm, mode):
    scaler = torch.amp.GradScaler("cpu", init_scale=65536.0)
    on = make_loop(grad_scaler=scaler, max_grad_norm=max_norm, grad_sample_mode=mode)
    off = make_loop(max_grad_norm=max_norm, grad_sample_mode=mode)
    for (inputs, targets), same in zip(on.loader, off.loader, strict=True):
        assert torch.equal(inputs, same[0])
        off.step(*same)
        on.optimizer.zero_grad()
        scaler.scale(F.cross_entropy(on.model(inputs), targets)).backward()
        scaler.unscale_(on.optimizer)
        scaler.step(on.optimizer)
        scaler.update()
        truth = {name: gradient.double() for name, gradient in gradients_of(off.model).items()}
        assert_same_gradients(gradients_of(on.model), truth)
    assert on.charges == off.charges == [("release", len(on.loader))]
    assert scaler.get_scale() == 65536.0
    assert isinstance(scaler, torch.amp.GradScaler)
    assert scaler.state_dict()["scale"] == 65536.0
    assert type(copy.deepcopy(scaler)) is type(pickle.loads(pickle.dumps(scaler))) is torch.amp.GradScaler
    on.engine.detach(on.model)
    assert type(scaler) is torch.amp.GradScaler


@pytest.mark.parametrize("unscale", [False, True])
def test_a_scaler_that_was_not_passed_is_rejected(unscale):
    scaler = torch.amp.GradScaler("cpu", init_scale=65536.0)
    loop = make_loop(noise_multiplier=1.0)
    inputs, targets = first_batch(loop.loader)
    before = state_of(loop.model)
    scaler.scale(F.cross_entropy(loop.model(inputs), targets)).backward()
    if unscale:
        scaler.unscale_(loop.optimizer)
    with pytest.raises(ScaledGradientError, match=r"DPE009.*torch\.bfloat16.*grad_scaler=scaler"):
        scaler.step(loop.optimizer)
    assert all(torch.equal(before[name], value) for name, value in state_of(loop.model).items())
    loop.optimizer.zero_grad()
    loop.step(*first_batch(loop.loader))  # attributes that the scaler set on the optimizer are removed


@pytest.mark.parametrize("given", [True, False])
def test_a_disabled_scaler_is_accepted(given):
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    loop = make_loop(grad_scaler=scaler if given else None)
    inputs, targets = first_batch(loop.loader)
    expected = expected_gradients(loop.model, [(inputs, targets)])
    scaler.scale(F.cross_entropy(loop.model(inputs), targets)).backward()
    scaler.step(loop.optimizer)
    scaler.update()
    assert_same_gradients(gradients_of(loop.model), expected)


# Overflow


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_no_sample_makes_the_scaler_skip_a_step(bad):
    dataset = examples()
    dataset.tensors[0][::2] = bad
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**16, growth_interval=1)
    loop = make_loop(dataset=dataset, grad_scaler=scaler, noise_multiplier=1.0)
    for inputs, targets in loop.loader:
        before = state_of(loop.model)
        loop.optimizer.zero_grad()
        scaler.scale(F.cross_entropy(loop.model(inputs), targets)).backward()
        scaler.step(loop.optimizer)
        scaler.update()
        after = state_of(loop.model)
        assert not any(torch.equal(before[name], after[name]) for name in after)
        assert all(value.isfinite().all() for value in after.values())
    assert scaler.get_scale() == 2.0**16
    assert loop.engine.ledger.steps == len(loop.loader)


def test_a_step_whose_loss_overflows_applies_noise_only():
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**127)
    loop = make_loop(grad_scaler=scaler)
    inputs, targets = first_batch(loop.loader, least=3)
    scaler.scale(100 * F.cross_entropy(loop.model(inputs), targets)).backward()
    scaler.step(loop.optimizer)
    assert inside.state(loop.engine).dropped == len(targets)
    assert all(not p.grad.any() for p in loop.model.parameters())


# torch.compile


def compiled(model):
    return torch.compile(model, backend="aot_eager")


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::UserWarning")  # raised by torch while it compiles
@pytest.mark.parametrize(
    "when",
    [
        "in place, and used",
        *(pytest.param(when, marks=pytest.mark.slow) for when in ("before", "before, and used", "after", "in place")),
    ],
)
def test_a_compiled_model_trains_as_it_does_eager(when):
    model, batches = mlp(), []
    outer = compiled(model) if when.startswith("before") else model
    if when.startswith("in place"):
        model.compile(backend="aot_eager")
    if when.endswith("used"):
        F.cross_entropy(outer(examples().tensors[0]), examples().tensors[1]).backward()
        model.zero_grad()
    loop = make_loop(outer, max_grad_norm=0.3)
    called = compiled(model) if when == "after" else outer
    for position, (inputs, targets) in enumerate(loop.loader):
        batches.append((inputs, targets))
        plain = mlp()
        plain.load_state_dict(state_of(model))
        expected = expected_gradients(plain, [(inputs, targets)], max_norm=0.3)
        loop.optimizer.zero_grad()
        F.cross_entropy(called(inputs), targets).backward()
        loop.optimizer.step()
        assert_same_gradients(gradients_of(model), expected)
        if position == 2:
            break
    loop.engine.detach(outer)
    plain.load_state_dict(start := state_of(model))
    for one in (called, plain):
        one.zero_grad()
        F.cross_entropy(one(batches[0][0]), batches[0][1]).backward()
    assert_same_gradients(gradients_of(model), {name: p.grad.double() for name, p in plain.named_parameters()})
    assert list(start) == list(mlp().state_dict())
