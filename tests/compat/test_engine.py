"""``PrivacyEngine`` under Opacus's names: return values, charges, methods that subclasses override, and copies."""

import copy
import gc
import pickle
import weakref

import inside
import pytest
import torch
from opacus_runs import (
    MODES,
    Counting,
    arguments,
    assert_clipped_step,
    assert_same,
    batch,
    by_hand,
    flat,
    gradients,
    loss,
    model,
    private,
    rows,
    step,
    steps_in_history,
    train,
    truth,
)
from torch import nn
from torch.utils.data import DataLoader

import dpengine
from dpengine.compat.opacus import GradSampleModule, PrivacyEngine
from dpengine.compat.opacus.accountants import register_accountant, registry
from dpengine.compat.opacus.optimizers import DPOptimizer
from dpengine.compat.opacus.utils.adaptive_clipping import PrivacyEngineAdaptiveClipping
from dpengine.compat.opacus.utils.batch_memory_manager import BatchMemoryManager
from dpengine.errors import BatchStateError, ParameterMismatchError


def charged_passes(engine):
    """Returns the number of passes over all data in the ledger."""
    return sum(charge.event.cycles(charge.count) for charge in engine.engine.ledger.totals)


@pytest.mark.parametrize("mode", [*MODES, "no_op"])
def test_make_private_returns_four_values_in_ghost_modes_and_three_otherwise(mode):
    plain = model()
    made = PrivacyEngine().make_private(**arguments(plain, grad_sample_mode=mode))
    assert len(made) == (4 if mode == "ghost" else 3)
    assert made[0]._module is plain
    assert isinstance(made[1], DPOptimizer)
    assert len(made[-1]) == 3


@pytest.mark.one_in(2, "mode", others="slow")
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_all_modes_apply_the_clipped_sum_of_a_loop_over_samples(mode, reduction):
    parts = private(grad_sample_mode=mode, loss_reduction=reduction)
    for inputs, targets in parts.loader:
        expected = truth(parts.model._module, inputs, targets)
        parts.optimizer.zero_grad()
        (loss(parts.model, inputs, targets) * (len(inputs) if reduction == "sum" else 1)).backward()
        assert all(p.grad is None or not p.grad.any() for p in parts.model.parameters())
        parts.optimizer.step()
        assert_same(gradients(parts.model._module, 4 if reduction == "mean" else 1), expected)


@pytest.mark.parametrize("mode", ["hooks", "functorch", "ghost"])
def test_without_a_wrapper_the_model_itself_is_trained_and_hooks_are_returned(mode):
    plain = model()
    parts = private(module=plain, wrap_model=False, grad_sample_mode=mode)
    assert not isinstance(parts.model, nn.Module)
    assert_clipped_step(plain, parts.optimizer, *next(iter(parts.loader)))


def make_private_again(parts, **asked):
    parts_as_arguments = {"optimizer": parts.optimizer, "data_loader": parts.loader}
    return parts.engine.make_private(**arguments(parts.model, **parts_as_arguments, **asked))


@pytest.mark.parametrize("poisson", [True, False])
def test_a_second_call_with_the_private_parts_adds_to_epsilon(poisson):
    first = private(noise_multiplier=1.0, poisson_sampling=poisson)
    train(first)
    spent = first.engine.get_epsilon(1e-5)
    made = make_private_again(first, noise_multiplier=2.0, poisson_sampling=poisson)
    second = first._replace(model=made[0], optimizer=made[1], loader=made[2])
    assert second.model is first.model
    assert second.optimizer.original_optimizer is first.optimizer.original_optimizer
    assert len(second.loader) == 3
    train(second)
    assert [(sigma, steps) for sigma, _, steps in first.engine.accountant.history] == [(1.0, 3), (2.0, 3)]
    assert first.engine.get_epsilon(1e-5) > spent


def test_the_optimizer_of_an_earlier_call_is_rejected():
    first = private(noise_multiplier=1.0)
    make_private_again(first, poisson_sampling=False)
    with pytest.raises((ParameterMismatchError, BatchStateError)):
        train(first)


# Without Poisson sampling, each pass is one event that includes every example once


def two_passes(parts):
    train(parts)
    train(parts)


def interrupted_and_restarted(parts):
    for _ in range(4):
        train(parts, steps=5)


def noise_changed_within_a_pass(parts):
    train(parts, steps=4)
    parts.optimizer.noise_multiplier = 2.0
    train(parts, steps=2)
    parts.optimizer.noise_multiplier = 1.0
    train(parts, steps=4)


def started_in_the_middle(parts):
    parts.loader.load_state_dict({"position": 5})
    train(parts)  # 5 batches of one pass, and 5 of the next


def with_memory_manager(parts):
    with BatchMemoryManager(data_loader=parts.loader, max_physical_batch_size=3, optimizer=parts.optimizer) as chunks:
        train(parts._replace(loader=chunks))
    train(parts)


def accumulated_batches(parts):
    for number, (inputs, targets) in enumerate(parts.loader, 1):
        loss(parts.model, inputs, targets).backward()
        if number % 5 == 0:
            parts.optimizer.step()
            parts.optimizer.zero_grad()


def two_iterators(parts):
    first = iter(parts.loader)
    next(first)
    train(parts)  # continues after it: one discarded batch, and ten


PASSES = [
    (two_passes, 2),
    (interrupted_and_restarted, 2),
    (noise_changed_within_a_pass, 3),
    (started_in_the_middle, 2),
    (with_memory_manager, 2),
    (accumulated_batches, 1),
    (two_iterators, 2),
]


@pytest.mark.one_in(2, "drop_last", "train_passes", others="slow")
@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("train_passes, expected", PASSES, ids=[train_passes.__name__ for train_passes, _ in PASSES])
def test_every_pass_that_may_include_an_example_is_charged(train_passes, expected, drop_last):
    rest = 3 if drop_last else 0
    parts = private(count=40 + rest, noise_multiplier=1.0, shuffle=True, drop_last=drop_last)
    assert len(parts.loader) == 10
    train_passes(parts)
    assert charged_passes(parts.engine) == expected


def test_batches_of_two_passes_are_never_merged_into_one_step():
    parts = private(count=12, noise_multiplier=1.0)
    train(parts, steps=2)
    parts.optimizer.zero_grad()
    batches = iter(parts.loader)
    for _ in range(2):
        loss(parts.model, *next(batches)).backward()
        if _ == 0:
            parts.optimizer.clip_and_accumulate()
    with pytest.raises(BatchStateError, match="two passes"):
        parts.optimizer.step()


@pytest.mark.parametrize("poisson", [True, False])
def test_a_custom_accountant_observes_steps_or_passes(poisson, monkeypatch):
    monkeypatch.setattr(registry, "_ACCOUNTANTS", dict(registry._ACCOUNTANTS))
    register_accountant("counting", Counting)
    parts = private(
        engine=PrivacyEngine(accountant="counting"), count=40, noise_multiplier=1.0, poisson_sampling=poisson
    )
    train(parts)
    train(parts, steps=1)
    history = parts.engine.accountant.history
    # A rate below 1 would claim that batches are sampled at random.
    assert history == ([(1.0, pytest.approx(0.1), 1)] * 11 if poisson else [(1.0, 1.0, 1)] * 2)


def test_noise_repeats_with_a_generator_and_never_without():
    def weights(seed):
        generator = None if seed is None else torch.Generator().manual_seed(seed)
        parts = private(noise_multiplier=1.0, noise_generator=generator)
        train(parts)
        return flat(dict(parts.model.named_parameters())).detach()

    assert torch.equal(weights(3), weights(3))
    assert not torch.equal(weights(3), weights(4))
    assert not torch.equal(weights(None), weights(None))


@pytest.mark.hazard("O44")
def test_secure_mode_draws_from_a_cipher_and_rejects_a_generator():
    parts = private(engine=PrivacyEngine(secure_mode=True), noise_multiplier=1.0)
    train(parts)
    assert inside.noise_source(parts.optimizer).describe()["kind"] == "chacha20"
    assert not inside.noise_source(parts.optimizer).insecure_seed
    with pytest.raises(ValueError, match="secure_mode"):
        private(engine=PrivacyEngine(secure_mode=True), noise_generator=torch.Generator())


def test_a_rejected_call_leaves_model_and_optimizer_unchanged():
    plain = model()
    with pytest.raises(ValueError, match=r"max_grad_norm|max_norm"):
        private(module=plain, max_grad_norm=-1.0)
    assert not any(hasattr(p, "grad_sample") for p in plain.parameters())
    assert not any(module._forward_hooks for module in plain.modules())
    assert private(module=plain).model._module is plain


def test_a_frozen_parameter_is_not_moved_by_a_gradient_from_before():
    plain = model()
    loss(plain, *rows().tensors).backward()
    plain[0].requires_grad_(False)
    before = plain[0].weight.clone()
    parts = private(module=plain, noise_multiplier=1.0)
    for inputs, targets in parts.loader:  # cleared at the end of the step, as many loops do
        loss(parts.model, inputs, targets).backward()
        parts.optimizer.step()
        parts.optimizer.zero_grad()
    assert torch.equal(plain[0].weight, before)


def test_a_subclass_may_return_its_own_optimizer():
    class HalvingOptimizer(DPOptimizer):
        def scale_grad(self):
            super().scale_grad()
            for parameter in self.params:
                parameter.grad /= 2

    class Engine(PrivacyEngine):
        def _prepare_optimizer(self, *, optimizer, **settings):
            names = ("noise_multiplier", "max_grad_norm", "expected_batch_size")
            return HalvingOptimizer(optimizer, **{name: settings[name] for name in names})

    parts = private(engine=Engine())
    assert_clipped_step(parts.model, parts.optimizer, *next(iter(parts.loader)), size=8)


def test_the_adaptive_engine_moves_the_threshold_within_its_bounds():
    parts = private(engine=PrivacyEngineAdaptiveClipping(), noise_multiplier=0.5, min_clipbound=0.5, max_clipbound=1.01)
    train(parts)
    assert 0.5 <= parts.optimizer.max_grad_norm <= 1.01
    assert parts.optimizer.max_grad_norm != 1.0
    assert [(sigma, steps) for sigma, _, steps in parts.engine.accountant.history] == [(0.5, 3)]


@pytest.mark.parametrize("mode", ["hooks", "ghost"])
def test_evaluating_other_data_between_backward_and_step_changes_nothing(mode):
    parts = private(grad_sample_mode=mode)
    inputs, targets = next(iter(parts.loader))
    expected = truth(parts.model._module, inputs, targets)
    parts.model(torch.randn(5, 3))  # in train mode, and never used
    loss(parts.model, inputs, targets).backward()
    parts.model.eval()
    with torch.no_grad():
        parts.model(torch.randn(7, 3))
    seen = torch.randn(2, 3, requires_grad=True)
    parts.model(seen).sum().backward()
    assert seen.grad is not None
    parts.model.train()
    parts.optimizer.step()
    assert_same(gradients(parts.model._module, 4), expected)


@pytest.mark.one_in(2, "poisson", "mode", "order", others="slow")
@pytest.mark.parametrize("poisson", [True, False])
@pytest.mark.parametrize("mode", ["hooks", "ghost"])
@pytest.mark.parametrize("order", ["top", "between", "end", "model"])
def test_gradients_may_be_cleared_in_any_order(order, mode, poisson):
    parts = private(poisson_sampling=poisson, grad_sample_mode=mode, noise_multiplier=1.0)
    clear = {"model": parts.model.zero_grad}.get(order, parts.optimizer.zero_grad)
    for inputs, targets in parts.loader:
        if order == "top":
            clear()
        value = loss(parts.model, inputs, targets)
        if order == "between":
            clear()
        value.backward()
        parts.optimizer.step()
        if order in {"end", "model"}:
            clear()
    assert steps_in_history(parts) == 3


def test_wrappers_of_other_settings_are_rejected():
    plain = model()
    with pytest.raises(ValueError, match="to_standard_module"):
        private(module=GradSampleModule(plain, loss_reduction="sum"))


def test_each_overridable_method_receives_the_arguments_that_opacus_passes():
    received = {}

    def recording(name):
        def method(self, *args, **kwargs):
            received[name] = kwargs | ({"args": args} if args else {})
            return getattr(PrivacyEngine, name)(self, *args, **kwargs)

        return method

    names = ("_prepare_model", "_prepare_data_loader", "_prepare_optimizer", "_prepare_criterion")
    engine = type("Own", (PrivacyEngine,), {name: recording(name) for name in names})(accountant="rdp")
    plain, criterion, generator = model(), nn.MSELoss(reduction="none"), torch.Generator()
    settings = {"max_grad_norm": 0.5, "loss_reduction": "sum", "grad_sample_mode": "ghost"}
    of_loader = {"poisson_sampling": True, "batch_first": True, "rand_on_empty": True}
    of_optimizer = {"noise_multiplier": 1.5, "clipping": "flat", "noise_generator": generator}
    options = settings | of_loader | of_optimizer
    parts = private(engine=engine, module=plain, criterion=criterion, wrap_model=True, **options)
    loader, optimizer = received["_prepare_data_loader"], received["_prepare_optimizer"]
    assert received["_prepare_model"] == {"args": (plain,), "batch_first": True, "wrap_model": True} | settings
    assert isinstance(loader.pop("args")[0], DataLoader)
    assert loader == {"distributed": False} | of_loader
    assert isinstance(optimizer.pop("optimizer"), torch.optim.SGD)
    assert optimizer == {"expected_batch_size": 4.0, "distributed": False} | settings | of_optimizer
    passed = {"module": parts.model, "optimizer": parts.optimizer, "criterion": criterion, "loss_reduction": "sum"}
    assert received["_prepare_criterion"] == passed


@pytest.mark.one_in(2, "mode", others="slow")
@pytest.mark.parametrize("mode", MODES)
def test_a_run_without_references_is_garbage_collected(mode):
    parts = private(noise_multiplier=1.0, grad_sample_mode=mode)
    train(parts)
    left = [weakref.ref(part) for part in (parts.engine, parts.model, parts.optimizer, parts.loader)]
    left.append(weakref.ref(parts.loader.dataset))
    del parts
    gc.collect()
    assert [reference() for reference in left] == [None] * len(left)


COPIERS = {"copy": copy.copy, "deepcopy": copy.deepcopy, "pickle": lambda one: pickle.loads(pickle.dumps(one))}
each_copier = pytest.mark.parametrize("copier", COPIERS)


def private_engine():
    engine = dpengine.PrivacyEngine()
    engine.make_private(**arguments())
    return engine


def private_compat_engine():
    return private(noise_multiplier=1.0).engine


@each_copier
@pytest.mark.parametrize("made", [private_engine, private_compat_engine])
def test_an_engine_with_private_models_is_not_copied(copier, made):
    engine = made()
    with pytest.raises(TypeError, match=r"PrivacyEngine cannot be copied.*has private models.*checkpoint"):
        COPIERS[copier](engine)


@each_copier
@pytest.mark.parametrize("kind", [dpengine.PrivacyEngine, PrivacyEngine])
def test_a_copy_of_an_engine_without_private_models_has_its_own_ledger(copier, kind):
    engine = kind()
    other = COPIERS[copier](engine)
    wrapped, optimizer, loader = other.make_private(**arguments())
    for inputs, targets in loader:
        step(wrapped, optimizer, inputs, targets)
    assert other.get_epsilon(1e-3) > 0
    assert engine.get_epsilon(1e-3) == 0 or copier == "copy"


def test_a_copied_accountant_keeps_its_epsilon():
    parts = private(noise_multiplier=1.0, poisson_sampling=True)
    train(parts)
    kept, before = copy.deepcopy(parts.engine.accountant), parts.engine.get_epsilon(1e-3)
    train(parts)
    assert kept.get_epsilon(1e-3) == before < parts.engine.get_epsilon(1e-3)


@each_copier
def test_copying_a_private_optimizer_raises_and_training_continues(copier):
    wrapped, optimizer = by_hand()
    with pytest.raises(TypeError, match=r"DPOptimizer cannot be copied.*state_dict\(\).*make_private"):
        COPIERS[copier](optimizer)
    step(wrapped, optimizer, *batch())
