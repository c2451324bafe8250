"""``GradSampleModule`` and related wrappers: per-sample gradients, and gradients that a loop writes."""

import copy
import io
import pickle

import pytest
import torch
from opacus_runs import (
    WRAPPERS,
    assert_clipped_step,
    assert_same,
    batch,
    by_hand,
    flat,
    gradients,
    loss,
    model,
    private,
    step,
    train,
    truth,
)
from reference import per_sample_gradients, stacked
from torch import nn

from dpengine.compat.opacus.grad_sample import (
    GradSampleHooks,
    GradSampleModule,
    GradSampleModuleFastGradientClipping,
    GradSampleModuleNoOp,
)
from dpengine.errors import BatchMismatchError, BatchStateError

WITH_GRAD_SAMPLE = {mode: wrapper for mode, wrapper in WRAPPERS.items() if mode != "ghost"}
ALL_WRAPPERS = [*WRAPPERS.values(), GradSampleModuleNoOp]
each_wrapper = pytest.mark.parametrize("wrap", WITH_GRAD_SAMPLE.values(), ids=WITH_GRAD_SAMPLE)


def sample_gradients(module, inputs, targets):
    return stacked(per_sample_gradients(module, lambda out, y: (out - y).square().sum(), (inputs,), targets))


def grad_samples(wrapped):
    return {name: p.grad_sample.double() for name, p in wrapped._module.named_parameters()}


@each_wrapper
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_grad_sample_is_the_gradient_of_each_samples_loss(wrap, reduction):
    wrapped = wrap(model(), loss_reduction=reduction)
    assert all(p.grad_sample is None for p in wrapped.parameters())
    per_row = (wrapped(batch()[0]) - batch()[1]).square().sum(dim=1)
    getattr(per_row, reduction)().backward()
    assert_same(grad_samples(wrapped), sample_gradients(wrapped._module, *batch()))


@each_wrapper
def test_several_passes_are_a_list_until_they_are_cleared(wrap):
    wrapped = wrap(model())
    loss(wrapped, *batch()).backward()
    loss(wrapped, *batch(2, start=4)).backward()
    expected = [sample_gradients(wrapped._module, *batch()), sample_gradients(wrapped._module, *batch(2, start=4))]
    for number, truths in enumerate(expected):
        assert_same({n: p.grad_sample[number].double() for n, p in wrapped._module.named_parameters()}, truths)
    wrapped.zero_grad()
    assert all(p.grad_sample is None for p in wrapped.parameters())


@each_wrapper
def test_axis_0_is_the_sample_for_either_batch_first(wrap):
    wrapped = wrap(nn.Linear(3, 2), batch_first=False)
    inputs = torch.randn(5, 4, 3)  # 5 tokens of 4 samples
    wrapped(inputs).square().sum(dim=(0, 2)).mean().backward()
    truths = stacked(
        per_sample_gradients(
            wrapped._module, lambda out, _: out.square().sum(), (inputs.transpose(0, 1),), torch.zeros(4)
        )
    )
    assert_same(grad_samples(wrapped), truths)


@pytest.mark.one_in(2, "write", "through", others="slow")
@pytest.mark.parametrize(
    "write",
    [
        lambda p: setattr(p, "grad_sample", p.grad_sample * 0.01),
        lambda p: p.grad_sample.mul_(0.01),
        lambda p: setattr(p, "grad_sample", [p.grad_sample * 0.01]),
        lambda p: p.grad_sample.data.mul_(0.01),
    ],
    ids=["replaced", "in-place", "listed", "data"],
)
@pytest.mark.parametrize("through", ["make_private", "by hand"])
def test_gradients_written_to_grad_sample_are_clipped(write, through):
    parts = private(max_grad_norm=0.1)
    wrapped, optimizer = by_hand(max_grad_norm=0.1)
    inputs, targets = batch()
    if through == "make_private":
        wrapped, optimizer = parts.model, parts.optimizer
        inputs, targets = next(iter(parts.loader))
    samples = sample_gradients(wrapped._module, inputs, targets)
    norms = torch.cat([g.flatten(1) for g in samples.values()], dim=1).norm(dim=1) * 0.01
    expected = {n: 0.01 * torch.einsum("b...,b->...", g, (0.1 / norms).clamp(max=1)) for n, g in samples.items()}
    loss(wrapped, inputs, targets).backward()
    for parameter in wrapped.parameters():
        write(parameter)
    optimizer.step()
    assert_same(gradients(wrapped._module, 4), expected)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (lambda grad_sample: torch.randn(4, 3, 3), ValueError, r"0\.weight"),
        (lambda grad_sample: grad_sample[:2], BatchMismatchError, "saw 4 samples"),
    ],
    ids=["another shape", "fewer samples"],
)
def test_a_grad_sample_that_does_not_fit_is_rejected(change, error, message):
    wrapped, optimizer = by_hand()
    loss(wrapped, *batch()).backward()
    weight = wrapped._module[0].weight
    weight.grad_sample = change(weight.grad_sample)
    with pytest.raises(error, match=message):
        optimizer.step()


def test_a_gradient_that_was_kept_never_becomes_that_of_a_later_pass():
    wrapped = GradSampleModule(model())
    loss(wrapped, *batch()).backward()
    kept = wrapped._module[0].weight.grad_sample
    wrapped.zero_grad()
    loss(wrapped, *batch(4, start=4)).backward()
    with pytest.raises(RuntimeError, match="without being materialized"):
        _ = kept + 0


@pytest.mark.parametrize("wrap", ALL_WRAPPERS)
def test_the_wrapper_forwards_attributes_and_methods_of_the_module(wrap):
    class Named(nn.Sequential):
        config = ("width", 4)

        def generate(self):
            return "text"

    plain = Named(nn.Linear(3, 4), nn.Sequential(nn.Linear(4, 2)))
    wrapped = wrap(plain)
    assert wrapped.config is Named.config
    assert wrapped.generate() == "text"
    assert getattr(wrapped, "1.0") is plain[1][0]
    with pytest.raises(AttributeError, match="nothing_such"):
        _ = wrapped.nothing_such
    assert "Linear" in repr(wrapped)
    assert list(wrapped.parameters()) == list(plain.parameters())


@pytest.mark.parametrize("wrap", ALL_WRAPPERS)
def test_to_standard_module_removes_all_traces_of_the_wrapper(wrap):
    plain = model()
    wrapped = wrap(plain)
    if wrap is not GradSampleModuleNoOp:
        loss(wrapped, *batch()).backward()
    assert wrapped.to_standard_module() is plain
    assert not any(hasattr(p, name) for p in plain.parameters() for name in ("grad_sample", "summed_grad"))
    plain.zero_grad()
    loss(plain, *batch()).backward()
    assert all(p.grad.any() for p in plain.parameters())
    wrap(plain)  # can be wrapped again


COPIES = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda one: pickle.loads(pickle.dumps(one)),
    "torch.save": lambda one: torch.load(io.BytesIO(_saved(one)), weights_only=False),
}


def _saved(one):
    file = io.BytesIO()
    torch.save(one, file)
    return file.getvalue()


@pytest.mark.one_in(6, "moment", "make_copy", "wrap", others="slow")
@pytest.mark.one_in(3, "moment", "make_copy", "wrap")
@pytest.mark.parametrize("moment", ["new", "after backward"])
@pytest.mark.parametrize("make_copy", COPIES.values(), ids=COPIES)
@pytest.mark.parametrize("wrap", WRAPPERS.values())
def test_copies_of_a_wrapper_have_their_own_hooks(wrap, make_copy, moment):
    wrapped = wrap(model(), batch_first=True, loss_reduction="sum")
    wrapped.forbid_grad_accumulation()
    if moment == "after backward":
        loss(wrapped, *batch()).backward()
    other = make_copy(wrapped)
    assert type(other) is type(wrapped)
    assert (other.loss_reduction, other.grad_accumulation_allowed) == ("sum", False)
    other.zero_grad()
    made, optimizer = by_hand(other, wrapper=lambda m: m, loss_reduction="sum")
    expected = truth(other._module, *batch())
    (loss(made, *batch()) * 4).backward()
    optimizer.step()
    assert_same(gradients(other._module), expected)


@pytest.mark.parametrize("wrap", [GradSampleModule, GradSampleModuleFastGradientClipping, GradSampleHooks])
def test_hooks_are_disabled_enabled_removed_and_added(wrap):
    plain = model()
    wrapped = wrap(plain)
    run = plain if wrap is GradSampleHooks else wrapped

    def records():
        plain.zero_grad()
        wrapped.set_grad_sample_to_none()
        loss(run, *batch()).backward()
        recorded = all(p.grad is None or not p.grad.any() for p in plain.parameters())
        assert recorded or all(p.grad.any() for p in plain.parameters())
        return recorded

    assert wrapped.hooks_enabled
    assert records()
    wrapped.disable_hooks()
    assert not wrapped.hooks_enabled
    assert not records()
    wrapped.enable_hooks()
    assert records()
    with pytest.raises(ValueError, match="attached already"):
        wrapped.add_hooks()
    wrapped.remove_hooks()
    wrapped.remove_hooks()
    assert not wrapped.hooks_enabled
    assert not records()
    wrapped.add_hooks(loss_reduction="sum", batch_first=True, force_functorch=False)
    assert wrapped.loss_reduction == "sum"
    assert records()


@pytest.mark.parametrize("mode", ["hooks", "ghost"])
def test_reattached_hooks_work_with_the_same_private_optimizer(mode):
    parts = private(grad_sample_mode=mode)
    train(parts)
    parts.model.remove_hooks()
    parts.model.add_hooks()
    assert_clipped_step(parts.model, parts.optimizer, *next(iter(parts.loader)))
    assert [steps for *_, steps in parts.engine.accountant.history] == [4]


def test_reattaching_hooks_within_a_batch_discards_its_sums():
    wrapped, optimizer = by_hand()
    optimizer.signal_skip_step()
    step(wrapped, optimizer, *batch())
    optimizer.zero_grad()
    wrapped.remove_hooks()
    wrapped.add_hooks()
    assert_clipped_step(wrapped, optimizer, *batch(start=4))


@pytest.mark.parametrize(
    ("method", "message"), [("remove_hooks", "has no gradients"), ("disable_hooks", "hooks are off")]
)
def test_without_hooks_a_private_step_is_rejected(method, message):
    parts = private(noise_multiplier=1.0)
    before = parts.model._module[0].weight.clone()
    getattr(parts.model, method)()
    with pytest.raises(BatchStateError, match=message):
        train(parts)
    assert torch.equal(parts.model._module[0].weight, before)


@each_wrapper
def test_only_train_mode_with_gradients_is_recorded(wrap):
    wrapped = wrap(model())
    with torch.no_grad():
        wrapped(batch()[0])
    wrapped.eval()
    assert not wrapped._module.training
    seen = batch()[0].requires_grad_()
    torch.autograd.grad(wrapped(seen).sum(), seen)
    assert all(p.grad_sample is None for p in wrapped.parameters())
    wrapped.train()
    loss(wrapped, *batch()).backward()
    assert all(p.grad_sample is not None for p in wrapped.parameters())
    wrapped.del_grad_sample()
    assert not any(hasattr(p, "grad_sample") for p in wrapped.parameters())


def test_trainable_layers_with_buffers_are_rejected_if_strict():
    class Scaled(nn.Linear):
        def __init__(self):
            super().__init__(3, 2)
            self.register_buffer("scale", torch.ones(1))

    for make in (GradSampleModule, GradSampleHooks):
        with pytest.raises(NotImplementedError):
            make(Scaled())
        assert len(make.validate(Scaled())) == 1
    wrapped = GradSampleModule(Scaled(), strict=False)
    loss(wrapped, *batch()).backward()
    assert_same(grad_samples(wrapped), sample_gradients(wrapped._module, *batch()))


def test_norms_and_factors_of_ghost_wrappers_are_per_sample():
    wrapped = GradSampleModuleFastGradientClipping(model(), max_grad_norm=0.5)
    with pytest.raises(AttributeError, match="No norms yet"):
        wrapped.get_norm_sample()
    loss(wrapped, *batch()).backward()
    norms = torch.cat([g.flatten(1) for g in sample_gradients(wrapped._module, *batch()).values()], dim=1).norm(dim=1)
    torch.testing.assert_close(wrapped.get_norm_sample().double(), norms, rtol=1e-5, atol=0)
    torch.testing.assert_close(wrapped.get_clipping_coef().double(), (0.5 / norms).clamp(max=1), rtol=1e-5, atol=0)
    assert wrapped.trainable_parameters == list(wrapped._module.parameters())
    assert all(getattr(p, "grad_sample", None) is None for p in wrapped.parameters())


def test_frozen_parameters_have_no_grad_sample():
    plain = model()
    plain[0].requires_grad_(False)
    wrapped = GradSampleModule(plain)
    loss(wrapped, *batch()).backward()
    assert plain[0].weight.grad_sample is None
    assert plain[2].weight.grad_sample.shape == (4, 2, 4)


def optimizer_over(module):
    return by_hand(module, wrapper=lambda module: module)[1]


def write(module, inputs, targets, names=None):
    rows = stacked(per_sample_gradients(module, lambda out, y: (out - y).square().sum(), (inputs,), targets))
    for name, parameter in module.named_parameters():
        if names is None or name in names:
            parameter.grad_sample = rows[name].float()


def test_written_gradients_are_clipped_and_summed_from_the_first_step_on():
    module = model()
    optimizer = optimizer_over(module)
    for _ in range(3):
        expected = truth(module, *batch())
        optimizer.zero_grad()
        write(module, *batch())
        optimizer.step()
        assert_same(gradients(module, 4), expected)


def test_a_raw_gradient_next_to_written_ones_reaches_no_weight():
    module = model()
    expected = truth(module, *batch())
    optimizer = optimizer_over(module)
    loss(module, *batch()).backward()
    write(module, *batch())
    with pytest.warns(match="DPE015"):
        optimizer.step()
    assert_same(gradients(module, 4), expected)


@pytest.mark.parametrize("names", [(), ("0.weight", "0.bias")], ids=["none", "some"])
def test_a_parameter_without_a_written_gradient_is_rejected_and_no_weight_changes(names):
    module = model()
    optimizer, before = optimizer_over(module), flat(model().state_dict())
    loss(module, *batch()).backward()  # a raw gradient, which must stay out of the weights
    write(module, *batch(), names)
    with pytest.raises(ValueError, match="Parameter"):
        optimizer.step()
    assert torch.equal(flat(module.state_dict()), before)
