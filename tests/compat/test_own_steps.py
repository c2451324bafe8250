"""Optimizers with a custom step, called as a whole or in parts, and optimizers over parts of a model."""

import warnings

import pytest
import torch
from opacus_runs import (
    assert_clipped_step,
    assert_same,
    backward,
    batch,
    by_hand,
    flat,
    gradients,
    loss,
    model,
    private,
    step,
    steps_in_history,
    train,
    truth,
)

from dpengine.compat.opacus import GradSampleModule
from dpengine.compat.opacus.grad_sample import GradSampleModuleNoOp
from dpengine.compat.opacus.optimizers import DPOptimizer
from dpengine.compat.opacus.optimizers.optimizer import _check_processed_flag, _generate_noise, _mark_as_processed
from dpengine.compat.opacus.utils.batch_memory_manager import BatchMemoryManager
from dpengine.errors import (
    BatchStateError,
    ParameterMismatchError,
    PrivacyError,
    PrivacyWarning,
    ScaledGradientError,
    UnknownParameterError,
    forget_notices,
)


class OwnNoise(DPOptimizer):
    """Custom ``add_noise`` as in research code."""

    drawn = 0

    def add_noise(self):
        for p in self.params:
            _check_processed_flag(p.summed_grad)
            std = self.noise_multiplier * self.max_grad_norm
            noise = _generate_noise(std, p.summed_grad, generator=self.generator, secure_mode=self.secure_mode)
            p.grad = (p.summed_grad + noise).view_as(p)
            _mark_as_processed(p.summed_grad)
            OwnNoise.drawn += 1


@pytest.mark.parametrize("sigma", [0.0, 1e-9])
def test_a_subclass_with_its_own_noise_steps(sigma):
    wrapped, optimizer = by_hand(kind=OwnNoise, noise_multiplier=sigma)
    OwnNoise.drawn = 0
    for _ in range(2):
        assert_clipped_step(wrapped, optimizer, *batch())
    assert OwnNoise.drawn == 8


def test_noise_has_the_given_standard_deviation_and_shape():
    reference = torch.empty(400, 500, dtype=torch.float64)
    noise = _generate_noise(3.0, reference)
    assert (noise.shape, noise.dtype) == (reference.shape, reference.dtype)
    assert float(noise.std()) == pytest.approx(3.0, abs=0.03)  # 6 deviations
    assert float(noise.mean()) == pytest.approx(0.0, abs=0.05)
    assert not torch.equal(noise, _generate_noise(3.0, reference))
    assert not _generate_noise(0.0, reference).any()
    assert _generate_noise(1.0, torch.empty(3, dtype=torch.bfloat16)).dtype is torch.bfloat16
    assert _generate_noise(1.0, torch.empty(0, 2)).shape == (0, 2)


@pytest.mark.parametrize("secure", [False, True])
def test_a_generator_makes_the_noise_repeatable(secure):
    def drawn():
        generator = torch.Generator().manual_seed(4)
        return [_generate_noise(1.0, torch.empty(5), generator, secure) for _ in range(2)]

    one, other = drawn(), drawn()
    assert all(map(torch.equal, one, other))
    assert not torch.equal(*one)


def test_a_gradient_that_a_step_already_used_is_rejected():
    fresh, used = torch.zeros(2), torch.zeros(2)
    _mark_as_processed([used])
    _check_processed_flag([fresh])
    _check_processed_flag(fresh)
    for obj in (used, [fresh, used]):
        with pytest.raises(ValueError, match="zero_grad"):
            _check_processed_flag(obj)


class OwnStep(DPOptimizer):
    """Custom step composed of Opacus's methods."""

    def pre_step(self, closure=None):
        self.clip_and_accumulate()
        if self._check_skip_next_step():
            self._is_last_step_skipped = True
            return False
        self.add_noise()
        self.scale_grad()
        self._is_last_step_skipped = False
        return True


def chunked(parts):
    with BatchMemoryManager(data_loader=parts.loader, max_physical_batch_size=3, optimizer=parts.optimizer) as chunks:
        train(parts._replace(loader=chunks))


def test_a_custom_step_waits_for_all_chunks_of_a_batch():
    parts, own = (private(count=16, batch_size=8, noise_multiplier=0.0) for _ in range(2))
    own.optimizer.__class__ = OwnStep
    for each in (parts, own):
        chunked(each)
    assert own.engine.accountant.history == parts.engine.accountant.history
    found, expected = (flat(dict(each.model.named_parameters())) for each in (own, parts))
    torch.testing.assert_close(found, expected)


def test_add_noise_on_part_of_a_batch_raises_and_changes_no_weight():
    parts = private(count=16, batch_size=8, noise_multiplier=1.0)
    before = flat(dict(parts.model.named_parameters())).clone()
    chunks = BatchMemoryManager(data_loader=parts.loader, max_physical_batch_size=3, optimizer=parts.optimizer)
    with pytest.raises(BatchStateError, match="part of a logical batch"), chunks as some:
        inputs, targets = next(iter(some))
        loss(parts.model, inputs, targets).backward()
        parts.optimizer.clip_and_accumulate()
        parts.optimizer.add_noise()
    assert all(p.grad is None or not p.grad.any() for p in parts.model.parameters())
    assert torch.equal(flat(dict(parts.model.named_parameters())), before)


def test_an_overridden_add_noise_is_used_and_charged():
    class NoiselessOptimizer(DPOptimizer):
        def add_noise(self):
            for parameter in self.params:
                parameter.grad = parameter.summed_grad.clone()

    wrapped, optimizer = by_hand(kind=NoiselessOptimizer, noise_multiplier=5.0)
    for _ in range(2):
        assert_clipped_step(wrapped, optimizer, *batch())


def test_the_gradient_of_an_overridden_add_noise_is_divided_by_the_batch_size():
    class ShiftingOptimizer(DPOptimizer):
        def add_noise(self):
            super().add_noise()
            for parameter in self.params:
                parameter.grad = parameter.grad + 1.0

    wrapped, optimizer = by_hand(kind=ShiftingOptimizer)
    expected = {name: total + 1 for name, total in truth(wrapped._module, *batch()).items()}
    backward(wrapped)
    optimizer.step()
    assert_same(gradients(wrapped._module, 4), expected)


@pytest.mark.parametrize("calls_super", [False, True])
@pytest.mark.parametrize("through", ["make_private", "by hand"])
def test_sums_of_an_overridden_clip_and_accumulate_get_noise(calls_super, through):
    class SignOptimizer(DPOptimizer):
        def clip_and_accumulate(self):
            seen = {p: sum(p.grad_sample).sign() for p in self.params}
            if calls_super:
                super().clip_and_accumulate()
            for parameter, total in seen.items():
                parameter.summed_grad = total

    wrapped, optimizer = by_hand(kind=SignOptimizer)
    parts = private(noise_multiplier=1.0)
    if through == "make_private":
        parts.optimizer.__class__ = SignOptimizer
        parts.optimizer.noise_multiplier = 0.0
        wrapped, optimizer = parts.model, parts.optimizer
        inputs, targets = next(iter(parts.loader))
    else:
        inputs, targets = batch()
    loss(wrapped, inputs, targets).backward()
    expected = {name: p.grad_sample.sum(dim=0).sign().double() for name, p in wrapped.named_parameters()}
    optimizer.step()
    assert_same(gradients(wrapped, 4), expected)
    if through == "make_private":
        assert steps_in_history(parts) == 1


def test_the_parts_of_a_step_may_be_called_one_by_one():
    parts = private(noise_multiplier=1e-9)
    inputs, targets = next(iter(parts.loader))
    expected = truth(parts.model._module, inputs, targets)
    loss(parts.model, inputs, targets).backward()
    parts.optimizer.clip_and_accumulate()
    sums = {name: p.summed_grad.double() for name, p in parts.model._module.named_parameters()}
    assert_same(sums, expected)
    parts.optimizer.add_noise()
    assert_same(gradients(parts.model._module), expected)
    with pytest.raises(PrivacyError, match="noise"):
        parts.optimizer.add_noise()
    parts.optimizer.scale_grad()
    assert_same(gradients(parts.model._module, 4), expected)
    assert [steps for *_, steps in parts.engine.accountant.history] == [1]


def test_signal_skip_step_applies_to_one_step_only():
    wrapped, optimizer = by_hand()
    before = flat(dict(wrapped.named_parameters())).clone()
    optimizer.signal_skip_step()
    backward(wrapped)
    assert optimizer.pre_step() is False
    assert optimizer.step_was_skipped
    assert torch.equal(flat(dict(wrapped.named_parameters())), before)
    optimizer.zero_grad()
    assert all(p.summed_grad is not None and p.grad_sample is None for p in wrapped.parameters())
    backward(wrapped)
    optimizer.step()
    assert not optimizer.step_was_skipped
    optimizer.zero_grad()
    assert all(p.summed_grad is None for p in wrapped.parameters())


# Parts of models


def optimizer_of(parameters, noise_multiplier=0.0):
    settings = {"noise_multiplier": noise_multiplier, "max_grad_norm": 1.0, "expected_batch_size": 4}
    return DPOptimizer(torch.optim.SGD(parameters, lr=0.1), **settings)


def test_an_optimizer_over_a_part_of_the_model_clips_that_part():
    wrapped, optimizer = by_hand(parameters=lambda w: w._module[2].parameters())
    hidden = wrapped._module[:2](batch()[0]).detach()
    for _ in range(2):
        optimizer.zero_grad()
        expected = truth(wrapped._module[2], hidden, batch()[1])
        backward(wrapped)
        optimizer.step()
        assert_same(gradients(wrapped._module[2], 4), expected)


def test_a_pass_of_which_a_part_is_clipped_is_probed_as_a_whole():
    wrapped, optimizer = by_hand(parameters=lambda w: w._module[2].parameters())
    forget_notices()
    with warnings.catch_warnings():
        warnings.simplefilter("error", PrivacyWarning)  # of norms that are not those of all parameters
        backward(wrapped)
        optimizer.step()


def test_parameters_added_to_the_optimizer_are_trained():
    wrapped, optimizer = by_hand(parameters=lambda w: w._module[2].parameters())
    step(wrapped, optimizer, *batch())
    optimizer.zero_grad()
    optimizer.add_param_group({"params": list(wrapped._module[0].parameters())})
    assert_clipped_step(wrapped, optimizer, *batch())


def test_two_optimizers_over_one_wrapper_are_rejected_at_the_first_step():
    wrapped, first = by_hand(parameters=lambda w: w._module[0].parameters())
    second = optimizer_of(wrapped._module[2].parameters())
    backward(wrapped)
    with pytest.raises(ParameterMismatchError, match="Another private optimizer"):
        first.step()
    second.step()
    del second
    first.zero_grad()
    backward(wrapped)
    first.step()  # the other one is gone


def test_parameters_of_two_wrappers_are_rejected():
    one, other = GradSampleModule(model()), GradSampleModule(model(1))
    optimizer = optimizer_of([*one.parameters(), *other.parameters()])
    backward(one)
    with pytest.raises(ParameterMismatchError, match="2 models"):
        optimizer.step()


def test_parameters_without_hooks_are_trained_by_gradients_written_to_them():
    wrapped, optimizer = by_hand(wrapper=GradSampleModuleNoOp)
    written = {p: torch.randn(4, *p.shape) for p in wrapped.parameters()}
    for parameter, grad in written.items():
        parameter.grad_sample = grad
    norms = torch.cat([g.flatten(1) for g in written.values()], dim=1).norm(dim=1)
    factors = (1 / norms).clamp(max=1)
    optimizer.step()
    for parameter, grad in written.items():
        expected = torch.einsum("b...,b->...", grad, factors) / 4
        torch.testing.assert_close(parameter.grad, expected, rtol=1e-5, atol=1e-6)


# Sums that are changed between clipping and step

CHANGES = {
    "in-place": lambda p: p.summed_grad.mul_(3.0),
    "replaced": lambda p: setattr(p, "summed_grad", 3 * p.summed_grad),
    "dropped": lambda p: setattr(p, "summed_grad", None),
}
changed = pytest.mark.parametrize("change", CHANGES)


@pytest.mark.one_in(2, "by_parts", others="slow")
@changed
@pytest.mark.parametrize("by_parts", [False, True])
def test_sums_that_were_changed_after_clipping_are_rejected_where_an_epsilon_is_stated(change, by_parts):
    parts = private(noise_multiplier=1.0, poisson_sampling=True)
    before = {name: tensor.clone() for name, tensor in parts.model.state_dict().items()}
    inputs, targets = next(iter(parts.loader))
    loss(parts.model, inputs, targets).backward()
    parts.optimizer.clip_and_accumulate()
    CHANGES[change](parts.optimizer.params[0])
    for _ in range(2):
        with pytest.raises(ScaledGradientError, match=r"summed_grad of parameter '0\.weight'.*clip_and_accumulate\(\)"):
            parts.optimizer.add_noise() if by_parts else parts.optimizer.step()
    assert all(torch.equal(before[name], tensor) for name, tensor in parts.model.state_dict().items())
    parts.optimizer.zero_grad()
    train(parts)  # and the next batches train


@changed
@pytest.mark.parametrize("by_parts", [False, True])
def test_manually_changed_sums_are_used_with_a_warning(change, by_parts):
    wrapped, optimizer = by_hand()
    expected = truth(wrapped._module, *batch())
    expected = {name: total * {"dropped": 0.0}.get(change, 3.0) for name, total in expected.items()}
    loss(wrapped, *batch()).backward()
    optimizer.clip_and_accumulate()
    for parameter in optimizer.params:
        CHANGES[change](parameter)
    forget_notices()
    with pytest.warns(PrivacyWarning, match=r"DPE012.*summed_grad.*responsible for its bound"):
        if by_parts:
            optimizer.add_noise()
            optimizer.scale_grad()
        else:
            optimizer.step()
    assert_same(gradients(wrapped._module, 4), expected)


@pytest.mark.parametrize("mode", ["hooks", "ghost"])
def test_sums_extended_by_more_backward_passes_are_accepted(mode):
    parts = private(noise_multiplier=1.0, grad_sample_mode=mode)
    batches = iter(parts.loader)
    loss(parts.model, *next(batches)).backward()
    parts.optimizer.clip_and_accumulate()
    for _ in range(2):  # the first is clipped before the second runs
        loss(parts.model, *next(batches)).backward()
    parts.optimizer.step()
    assert parts.optimizer.params[0].grad is not None


def test_a_manual_optimizer_over_a_model_of_an_engine_cannot_step():
    made = private()
    before = {name: p.clone() for name, p in made.model.named_parameters()}
    manual_optimizer = optimizer_of(made.model.parameters(), noise_multiplier=0.1)
    inputs, targets = next(iter(made.loader))
    loss(made.model, inputs, targets).backward()
    with pytest.raises(ParameterMismatchError, match="does not include the steps of this optimizer"):
        manual_optimizer.step()
    assert_same(dict(made.model.named_parameters()), before)


def test_a_parameter_of_a_part_that_is_frozen_before_the_backward_pass_is_rejected():
    wrapped, optimizer = by_hand(parameters=lambda w: w._module[2].parameters())
    found = loss(wrapped, *batch())
    wrapped._module[2].bias.requires_grad_(False)
    found.backward()
    with pytest.raises(UnknownParameterError, match=r"'2\.bias'"):
        optimizer.step()
    assert wrapped._module[2].weight.grad is None
