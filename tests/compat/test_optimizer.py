"""``DPOptimizer`` by hand and through ``make_private``: attributes, steps, and assigned values."""

import math

import inside
import pytest
import torch
from opacus_runs import (
    MODES,
    WRAPPERS,
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
    train,
    truth,
)
from torch import nn
from torch.optim import lr_scheduler

from dpengine.compat.opacus import GradSampleModule, GradSampleModuleFastGradientClipping
from dpengine.compat.opacus.accountants import RDPAccountant
from dpengine.compat.opacus.optimizers import (
    AdaClipDPOptimizer,
    DPOptimizer,
    DPOptimizerFastGradientClipping,
    DPPerLayerOptimizer,
)
from dpengine.errors import BatchStateError, MissingGradientError


@pytest.mark.one_in(2, "mode", others="slow")
@pytest.mark.parametrize("mode", MODES)
def test_a_manual_step_equals_a_loop_over_samples(mode):
    wrapped, optimizer = by_hand(wrapper=WRAPPERS[mode])
    for _ in range(2):
        assert_clipped_step(wrapped, optimizer, *batch())
    optimizer.zero_grad()
    backward(wrapped)
    assert optimizer.step() is None


@pytest.mark.one_in(2, "mode", others="slow")
@pytest.mark.parametrize("mode", MODES)
def test_several_backward_passes_make_one_step_with_one_noise(mode):
    wrapped, optimizer = by_hand(wrapper=WRAPPERS[mode])
    expected = truth(wrapped._module, *batch(6))
    backward(wrapped, 4)
    loss(wrapped, *batch(2, start=4)).backward()
    assert optimizer.accumulated_iterations == 2
    optimizer.step()
    assert_same(gradients(wrapped._module, 4 * 2), expected)


def test_noise_has_the_standard_deviation_of_multiplier_times_threshold():
    wide = nn.Linear(400, 100)
    wrapped, optimizer = by_hand(wide, noise_multiplier=3.0, max_grad_norm=0.5, expected_batch_size=2)
    drawn = []
    for _ in range(2):
        optimizer.zero_grad()
        (wrapped(torch.randn(2, 400)) * 0).mean(dim=0).sum().backward()
        optimizer.step()
        drawn.append(2 * flat({n: p.grad for n, p in wide.named_parameters()}))
    for noise in drawn:  # the std of 40,100 draws is known to 0.36 %
        assert float(noise.std()) == pytest.approx(1.5, rel=0.02)
        assert abs(float(noise.mean())) < 0.05
    both = torch.stack(drawn)
    assert abs(float(torch.corrcoef(both)[0, 1])) < 0.03


def test_a_manually_attached_accountant_observes_each_step_and_accumulation():
    accountant, observed = RDPAccountant(), []
    wrapped, optimizer = by_hand(noise_multiplier=2.0)
    optimizer.attach_step_hook(accountant.get_optimizer_hook_fn(sample_rate=0.1))
    optimizer.attach_step_hook(lambda one: observed.append(one.accumulated_iterations))
    backward(wrapped)
    optimizer.step()
    optimizer.zero_grad()
    backward(wrapped)
    backward(wrapped)
    optimizer.step()
    assert accountant.history == [(2.0, pytest.approx(0.1), 1), (2.0, pytest.approx(0.2), 1)]
    assert observed == [1, 2]
    optimizer.step_hook = None
    assert optimizer.step_hook is None


def test_attributes_are_those_of_the_wrapped_optimizer():
    wrapped, optimizer = by_hand()
    inner = optimizer.original_optimizer
    assert isinstance(optimizer, torch.optim.Optimizer)
    for name in ("param_groups", "state", "defaults"):
        assert getattr(optimizer, name) is getattr(inner, name)
    assert optimizer.params == list(wrapped.parameters())
    replaced = [dict(group, lr=0.5) for group in optimizer.param_groups]
    optimizer.param_groups = replaced
    assert inner.param_groups is replaced
    bias = wrapped._module[0].bias
    before = bias.detach().clone()
    backward(wrapped)
    optimizer.step()
    torch.testing.assert_close(before - bias, 0.5 * bias.grad)
    optimizer.load_state_dict(torch.optim.SGD(wrapped.parameters(), lr=0.25, momentum=0.9).state_dict())
    assert inner.param_groups[0]["lr"] == 0.25
    assert optimizer.state_dict() == inner.state_dict()


def test_two_steps_without_zero_grad_are_a_value_error():
    wrapped, optimizer = by_hand()
    backward(wrapped)
    optimizer.step()
    with pytest.raises(ValueError, match="zero_grad"):
        optimizer.step()
    optimizer.zero_grad()
    backward(wrapped)
    optimizer.step()
    with pytest.raises(ValueError, match="zero_grad"):
        backward(wrapped)


def test_a_rejected_pass_is_not_counted_later():
    wrapped, optimizer = by_hand()
    wrapped.forbid_grad_accumulation()
    backward(wrapped)
    with pytest.raises(ValueError, match="Poisson"):
        backward(wrapped)
    backward(wrapped)
    with pytest.raises(MissingGradientError):
        optimizer.step()
    assert_clipped_step(wrapped, optimizer, *batch())


def test_a_backward_pass_that_was_interrupted_discards_its_batch():
    parts = private(noise_multiplier=1.0)
    inputs, targets = next(iter(parts.loader))
    inputs.requires_grad_().register_hook(lambda grad: 1 / 0)  # runs after the hooks of all layers
    with pytest.raises(ZeroDivisionError):
        loss(parts.model, inputs, targets).backward()
    with pytest.raises(BatchStateError, match="discarded"):
        parts.optimizer.step()


def test_step_returns_the_loss_of_a_closure():
    wrapped, optimizer = by_hand()

    def closure():
        optimizer.zero_grad()
        value = loss(wrapped, *batch())
        value.backward()
        return value

    expected = truth(wrapped._module, *batch())
    value = float(loss(wrapped._module, *batch()).detach())
    assert float(optimizer.step(closure)) == pytest.approx(value)
    assert_same(gradients(wrapped._module, 4), expected)


SCHEDULERS = {
    "step": lambda one: lr_scheduler.StepLR(one, 1, 0.5),
    "lambda": lambda one: lr_scheduler.LambdaLR(one, lambda epoch: 0.9**epoch),
    "one-cycle": lambda one: lr_scheduler.OneCycleLR(one, 0.2, total_steps=10),
    "cosine": lambda one: lr_scheduler.CosineAnnealingLR(one, 5),
}


@pytest.mark.filterwarnings("error:Detected call of")
@pytest.mark.parametrize("make", SCHEDULERS.values(), ids=SCHEDULERS)
def test_a_learning_rate_schedule_around_the_private_optimizer_reaches_the_update(make):
    parts = private()
    plain = torch.optim.SGD(model().parameters(), lr=0.1)
    schedule, expected = make(parts.optimizer), make(plain)
    for _ in range(3):
        before = parts.model._module[0].bias.detach().clone()
        rate = parts.optimizer.param_groups[0]["lr"]
        assert rate == plain.param_groups[0]["lr"]
        train(parts, steps=1)
        moved = parts.model._module[0].bias
        group = parts.optimizer.original_optimizer.param_groups[0]
        if group["momentum"] == 0:
            torch.testing.assert_close(before - moved, rate * moved.grad)
        plain.step()
        schedule.step()
        expected.step()


def test_hooks_of_users_on_steps_are_called_once():
    parts, observed = private(), []
    parts.optimizer.register_step_pre_hook(lambda *_: observed.append("pre"))
    parts.optimizer.register_step_post_hook(lambda *_: observed.append("post"))
    train(parts, steps=2)
    assert observed == ["pre", "post"] * 2


@pytest.mark.parametrize("kinds", [(DPPerLayerOptimizer, DPOptimizer), (DPOptimizer, DPPerLayerOptimizer)])
def test_the_second_optimizer_over_a_model_clips_by_its_own_groups(kinds):
    wrapped = GradSampleModule(model())
    parameters = list(wrapped.parameters())
    for kind in kinds:
        bound = 1.0 if kind is DPOptimizer else [0.5] * len(parameters)
        plain = torch.optim.SGD(parameters, lr=0.0)
        optimizer = kind(plain, noise_multiplier=0.0, max_grad_norm=bound, expected_batch_size=1)
        optimizer.zero_grad()
        (1000 * loss(wrapped, *batch(1))).backward()
        optimizer.step()
        released = torch.cat([p.grad.flatten() for p in parameters])
        assert released.norm() == pytest.approx(optimizer.max_grad_norm, rel=1e-3)


def test_each_parameter_is_clipped_to_its_own_threshold():
    bounds = [0.5, 0.25, 1.0, 0.125]
    wrapped, optimizer = by_hand(kind=DPPerLayerOptimizer, max_grad_norm=bounds, noise_multiplier=0.0)
    assert optimizer.max_grad_norms == bounds
    assert optimizer.max_grad_norm == pytest.approx(math.hypot(*bounds))
    backward(wrapped)
    samples = {p: p.grad_sample + 0 for p in wrapped.parameters()}
    optimizer.step()
    for (parameter, grad), bound in zip(samples.items(), bounds, strict=True):
        factors = (bound / grad.flatten(1).norm(dim=1)).clamp(max=1)
        torch.testing.assert_close(parameter.grad, torch.einsum("b...,b->...", grad, factors) / 4, rtol=1e-4, atol=1e-6)
    optimizer.zero_grad()
    optimizer.noise_multiplier = 2.0
    optimizer.max_grad_norms = [2 * bound for bound in bounds]
    backward(wrapped)
    assert inside.state(optimizer).noise_std == pytest.approx(4 * math.hypot(*bounds))
    with pytest.raises(ValueError, match="3 clipping norms"):
        optimizer.max_grad_norms = bounds[:3]


def adaptive_optimizer(**changed):
    settings = {"target_unclipped_quantile": 0.5, "unclipped_num_std": 1.0, "noise_multiplier": 1.0}
    bounds = {"clipbound_learning_rate": 0.2, "max_clipbound": 10.0, "min_clipbound": 0.01}
    return by_hand(kind=AdaClipDPOptimizer, **(settings | bounds | changed))


def test_the_adaptive_optimizer_keeps_its_settings_and_counts_samples():
    wrapped, optimizer = adaptive_optimizer()
    assert (optimizer.target_unclipped_quantile, optimizer.unclipped_num_std) == (0.5, 1.0)
    for name, value in {"clipbound_learning_rate": 0.4, "max_clipbound": 5.0, "min_clipbound": 0.02}.items():
        setattr(optimizer, name, value)
        assert getattr(optimizer, name) == value
    backward(wrapped)
    optimizer.step()
    assert optimizer.sample_size == 4
    assert optimizer.unclipped_num == 0  # the targets are far off, so all samples are clipped
    assert optimizer.max_grad_norm != 1.0
    for wrong in ({"max_clipbound": 0.001}, {"noise_multiplier": 3.0}):
        with pytest.raises(ValueError, match=r"clipbound|unclipped_num_std"):
            adaptive_optimizer(**wrong)


def test_the_ghost_optimizer_offers_accumulate_for_clipping():
    wrapped, optimizer = by_hand(
        kind=DPOptimizerFastGradientClipping, wrapper=GradSampleModuleFastGradientClipping, noise_multiplier=0.0
    )
    expected = truth(wrapped._module, *batch())
    backward(wrapped)
    optimizer.accumulate()
    assert_same({name: p.summed_grad.double() for name, p in wrapped._module.named_parameters()}, expected)


@pytest.mark.parametrize(
    "settings",
    [
        {"expected_batch_size": None},
        {"loss_reduction": "median"},
        {"max_grad_norm": -1.0},
        {"noise_multiplier": -1.0},
        {"secure_mode": True, "generator": torch.Generator()},
    ],
    ids=lambda settings: next(iter(settings)),
)
def test_settings_out_of_range_raise(settings):
    with pytest.raises(ValueError, match=r".+"):
        by_hand(**settings)


def test_a_step_without_a_backward_pass_names_the_parameter():
    _, optimizer = by_hand()
    with pytest.raises(MissingGradientError, match=r"'0.weight' \(4, 3\)"):
        optimizer.step()
    with pytest.raises(ValueError, match=r"'0\.weight'"):
        _ = optimizer.grad_samples


def test_p_grad_is_none_between_backward_and_step_after_clearing():
    wrapped, optimizer = by_hand()
    optimizer.zero_grad(set_to_none=True)
    backward(wrapped)
    assert all(p.grad is None for p in wrapped.parameters())


@pytest.mark.parametrize("mode", ["hooks", "ghost"])
@pytest.mark.parametrize("moment", ["before the first step", "before forward", "before backward", "before step"])
def test_an_assigned_threshold_takes_effect_at_the_next_step(moment, mode):
    parts = private(grad_sample_mode=mode)

    def write(now):
        if moment == now:
            parts.optimizer.max_grad_norm = 0.5

    write("before the first step")
    batches = iter(parts.loader)
    if moment != "before the first step":
        step(parts.model, parts.optimizer, *next(batches))
        parts.optimizer.zero_grad()
    inputs, targets = next(batches)
    write("before forward")
    value = loss(parts.model, inputs, targets)
    write("before backward")
    value.backward()
    write("before step")
    assert parts.optimizer.max_grad_norm == 0.5
    expected = truth(parts.model._module, inputs, targets, 0.5)
    parts.optimizer.step()
    assert_same(gradients(parts.model._module, 4), expected)


@pytest.mark.parametrize("poisson", [True, False])
def test_an_assigned_noise_multiplier_is_charged_from_the_first_step_that_uses_it(poisson):
    parts = private(noise_multiplier=1.0, poisson_sampling=poisson)
    batches = iter(parts.loader)
    stds = []
    for sigma in (1.0, 4.0, 4.0):
        loss(parts.model, *next(batches)).backward()
        parts.optimizer.noise_multiplier = sigma  # between backward and step
        parts.optimizer.max_grad_norm = 2.0
        stds.append(inside.state(parts.optimizer).noise_std)
        parts.optimizer.step()
        parts.optimizer.zero_grad()
    assert stds == [2.0, 8.0, 8.0]
    assert [(sigma, steps) for sigma, _, steps in parts.engine.accountant.history] == [(1.0, 1), (4.0, 2)]


def test_a_change_between_chunks_takes_effect_at_the_next_logical_batch():
    wrapped, optimizer = by_hand(noise_multiplier=1e-9)
    expected = truth(wrapped._module, *batch(6))
    optimizer.signal_skip_step()
    backward(wrapped, 4)
    optimizer.step()
    optimizer.zero_grad()
    optimizer.max_grad_norm = 0.25
    optimizer.noise_multiplier = 2e-9
    loss(wrapped, *batch(2, start=4)).backward()
    optimizer.step()
    assert_same(gradients(wrapped._module, 4), expected)
    assert optimizer.max_grad_norm == 0.25
    assert inside.state(optimizer).noise_std == pytest.approx(0.5e-9, rel=1e-9, abs=0)


def test_other_attributes_may_be_assigned():
    wrapped, optimizer = by_hand()
    optimizer.expected_batch_size = 16
    assert_clipped_step(wrapped, optimizer, *batch(), size=16)
    optimizer.generator = torch.Generator().manual_seed(0)
    assert inside.noise_source(optimizer).insecure_seed
    for name, value in (("noise_multiplier", -1.0), ("max_grad_norm", 0.0), ("expected_batch_size", -3)):
        before = getattr(optimizer, name)
        with pytest.raises(ValueError, match=r".+"):
            setattr(optimizer, name, value)
        assert getattr(optimizer, name) == before


def test_writing_a_generator_again_never_repeats_noise_of_a_step():
    wrapped, optimizer = by_hand(noise_multiplier=1.0)
    seen = []
    for _ in range(3):
        optimizer.generator = torch.Generator().manual_seed(5)
        optimizer.zero_grad()
        (loss(wrapped, *batch()) * 0).backward()
        optimizer.step()
        seen.append(flat(gradients(wrapped)))
    assert not torch.allclose(seen[0], seen[1])
    assert not torch.allclose(seen[1], seen[2])
