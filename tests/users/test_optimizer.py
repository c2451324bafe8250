"""The optimizer keeps its identity, class and state for the user's tools."""

import copy
import functools
import gc
import io
import pickle
import warnings

import inside
import pytest
import torch
from inside_parts import REJECTED_OPTIMIZERS
from loops import (
    exact_gradients,
    expected_gradients,
    first_batch,
    gradients_of,
    make_loop,
    mlp,
    state_of,
    train,
    unchanged,
)
from torch import nn
from torch.optim import lr_scheduler
from torch.optim.optimizer import _global_optimizer_pre_hooks, register_optimizer_step_pre_hook

import dpengine
from dpengine.errors import BatchStateError, DetachedError, UnknownParameterError

pytestmark = pytest.mark.filterwarnings("ignore:.*DPE012")

OPTIMIZERS = [
    value
    for value in vars(torch.optim).values()
    if isinstance(value, type) and issubclass(value, torch.optim.Optimizer) and value is not torch.optim.Optimizer
]
SUPPORTED = [kind for kind in OPTIMIZERS if kind.__name__ not in REJECTED_OPTIMIZERS]
every_optimizer = pytest.mark.parametrize("kind", SUPPORTED, ids=lambda kind: kind.__name__)
SCHEDULERS = {
    "StepLR": lambda o: lr_scheduler.StepLR(o, 1, gamma=0.5),
    "LambdaLR": lambda o: lr_scheduler.LambdaLR(o, lambda step: 1 / (1 + step)),
    "CosineAnnealingLR": lambda o: lr_scheduler.CosineAnnealingLR(o, 4),
    "OneCycleLR": lambda o: lr_scheduler.OneCycleLR(o, 0.1, total_steps=8, cycle_momentum=False),
    "CyclicLR": lambda o: lr_scheduler.CyclicLR(o, 0.01, 0.1, step_size_up=2, cycle_momentum=False),
    "SequentialLR": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.ConstantLR(o, 0.5), lr_scheduler.ExponentialLR(o, 0.9)], milestones=[2]
    ),
    "ChainedScheduler": lambda o: lr_scheduler.ChainedScheduler(
        [lr_scheduler.LinearLR(o), lr_scheduler.ExponentialLR(o, 0.9)]
    ),
    "MultiplicativeLR": lambda o: lr_scheduler.MultiplicativeLR(o, lambda step: 0.5),
}
every_scheduler = pytest.mark.parametrize("schedule", SCHEDULERS.values(), ids=SCHEDULERS)


def matrix_loop(kind, **options):
    """Returns a loop whose parameters are all matrices, since one of the optimizers accepts no others."""
    return make_loop(mlp(bias=False), make_optimizer=functools.partial(kind, lr=0.05), **options)


def loop_with_optimizer(optimizer, model, **options):
    return make_loop(model, make_optimizer=lambda parameters: optimizer, **options)


class Shadow:
    """The user's optimizer on a copy of the model, stepped with the private gradients."""

    def __init__(self, model, kind):
        self.model = copy.deepcopy(model)
        self.optimizer = kind(self.model.parameters(), lr=0.05)

    def follow(self, model):
        for mine, theirs in zip(self.model.parameters(), model.parameters(), strict=True):
            mine.grad = theirs.grad.clone()
        self.optimizer.step()

    def assert_equal(self, model):
        for mine, theirs in zip(self.model.parameters(), model.parameters(), strict=True):
            torch.testing.assert_close(mine, theirs, rtol=0, atol=0)


@pytest.mark.one_in(3, "kind", others="slow")
@every_optimizer
def test_the_optimizer_keeps_its_class_groups_and_state(kind):
    model = mlp(bias=False)
    optimizer = kind(model.parameters(), lr=0.05)
    groups, state, defaults, state_dict = (
        optimizer.param_groups,
        optimizer.state,
        optimizer.defaults,
        optimizer.state_dict(),
    )
    loop = loop_with_optimizer(optimizer, model)
    assert loop.model is model and type(model) is nn.Sequential
    assert loop.optimizer is optimizer and isinstance(optimizer, kind)
    assert optimizer.param_groups is groups and optimizer.state is state and optimizer.defaults is defaults
    assert optimizer.state_dict() == state_dict
    loop.step(*first_batch(loop.loader))
    assert optimizer.state_dict().keys() == state_dict.keys()
    assert optimizer.state_dict()["param_groups"][0].keys() == state_dict["param_groups"][0].keys()


@pytest.mark.one_in(6, "kind", others="slow")
@pytest.mark.one_in(3, "kind")
@every_optimizer
@pytest.mark.hazard("L10")
def test_a_scheduler_built_before_make_private_counts_private_steps(kind):
    model = mlp(bias=False)
    optimizer = kind(model.parameters(), lr=0.05)
    scheduler = lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    loop = loop_with_optimizer(optimizer, model, noise_multiplier=1.0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for steps, batch in enumerate(loop.loader, start=1):
            loop.step(*batch)
            scheduler.step()
            assert (
                loop.engine.ledger.steps == steps
            )  # the private step ran, not the one that the scheduler set on the instance
    assert scheduler.get_last_lr()[0] == pytest.approx(0.05 * 0.5**4)
    assert inside.state(loop.engine).written == set(model.parameters())


@pytest.mark.one_in(4, "schedule", "before", others="slow")
@pytest.mark.one_in(2, "schedule", "before")
@every_scheduler
@pytest.mark.parametrize("before", [True, False], ids=["before", "after"])
@pytest.mark.hazard("L10")
def test_the_learning_rate_follows_the_schedule(schedule, before):
    model = mlp(bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    scheduler = schedule(optimizer) if before else None
    loop = loop_with_optimizer(optimizer, model)
    scheduler = scheduler or schedule(optimizer)
    shadow = Shadow(model, torch.optim.SGD)
    shadow_scheduler = schedule(shadow.optimizer)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for batch in loop.loader:
            loop.step(*batch)
            shadow.follow(model)
            scheduler.step()
            shadow_scheduler.step()
            assert scheduler.get_last_lr() == shadow_scheduler.get_last_lr()
    shadow.assert_equal(model)


@pytest.mark.one_in(6, "kind", others="slow")
@pytest.mark.one_in(3, "kind")
@every_optimizer
def test_a_scheduler_built_after_make_private_sets_the_rate_of_the_next_step(kind):
    loop = matrix_loop(kind)
    scheduler = lr_scheduler.StepLR(loop.optimizer, 1, gamma=0.1)
    shadow = Shadow(loop.model, kind)
    shadow_scheduler = lr_scheduler.StepLR(shadow.optimizer, 1, gamma=0.1)
    for batch in loop.loader:
        loop.step(*batch)
        shadow.follow(loop.model)
        scheduler.step()
        shadow_scheduler.step()
    shadow.assert_equal(loop.model)


class ClosureSpy(torch.optim.SGD):
    """Records the arguments of its step."""

    def step(self, closure=None):
        self.given = [*getattr(self, "given", []), closure]
        return super().step()


@pytest.mark.one_in(3, "kind", others="slow")
@every_optimizer
@pytest.mark.hazard("L7")
def test_a_closure_runs_once_and_its_loss_is_returned(kind):
    loop = matrix_loop(kind)
    inputs, targets = first_batch(loop.loader)
    calls = []

    def closure():
        loop.optimizer.zero_grad()
        calls.append((torch.is_grad_enabled(), loop.backward(inputs, targets)))
        return calls[-1][1]

    with torch.no_grad():
        returned = loop.optimizer.step(closure)
    assert calls == [(True, returned)] and calls[0][1] is returned
    assert loop.engine.ledger.steps == 1


def test_a_closure_that_detaches_the_model_changes_no_weight():
    loop = matrix_loop(torch.optim.SGD)
    inputs, targets = first_batch(loop.loader)

    def closure():
        loss = loop.backward(inputs, targets)
        loop.engine.detach(loop.model)
        return loss

    with unchanged(loop.model), pytest.raises(DetachedError, match=r"DPE019.*between two steps"):
        loop.optimizer.step(closure)
    assert loop.engine.ledger.steps == 1


def test_the_base_step_never_receives_the_closure():
    loop = matrix_loop(ClosureSpy)
    batch = first_batch(loop.loader)
    with exact_gradients(loop, batch):
        loop.optimizer.step(lambda: loop.backward(*batch))
    assert loop.optimizer.given == [None]


@pytest.mark.one_in(3, "kind", others="slow")
@every_optimizer
@pytest.mark.hazard("O21")
def test_user_hooks_fire_once_and_see_noised_gradients(kind):
    loop = matrix_loop(kind, noise_multiplier=1.0)
    seen = {"pre": [], "post": []}
    loop.optimizer.register_step_pre_hook(lambda *_: seen["pre"].append(gradients_of(loop.model)))
    loop.optimizer.register_step_post_hook(lambda *_: seen["post"].append(gradients_of(loop.model)))
    inputs, targets = first_batch(loop.loader)
    without_noise = expected_gradients(loop.model, [(inputs, targets)])
    loop.step(inputs, targets)
    assert loop.engine.ledger.steps == 1
    for gradients in seen.values():
        assert len(gradients) == 1
        for name, gradient in gradients[0].items():
            assert torch.equal(gradient, loop.model.get_parameter(name).grad)
            assert not torch.isclose(gradient.double(), without_noise[name], atol=1e-6).any()


def reload_state(optimizer):
    optimizer.load_state_dict(optimizer.state_dict())


def replace_groups(optimizer):
    optimizer.param_groups = [dict(group) for group in optimizer.param_groups]  # as accelerate.prepare does


@pytest.mark.one_in(8, "kind", "replace", others="slow")
@pytest.mark.one_in(4, "kind", "replace")
@every_optimizer
@pytest.mark.parametrize("replace", [reload_state, replace_groups])
def test_learning_rates_take_effect_after_the_groups_were_replaced(kind, replace):
    loop = matrix_loop(kind)
    shadow = Shadow(loop.model, kind)
    for position, batch in enumerate(loop.loader):
        loop.step(*batch)
        shadow.follow(loop.model)
        if position == 0:
            replace(loop.optimizer)
        for one in (loop.optimizer, shadow.optimizer):
            one.param_groups[0]["lr"] = 0.01 * (position + 1)
    shadow.assert_equal(loop.model)


def by_torch_save(optimizer):
    file = io.BytesIO()
    torch.save(optimizer, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


COPIES = {"deepcopy": copy.deepcopy, "pickle": lambda o: pickle.loads(pickle.dumps(o)), "torch.save": by_torch_save}


@pytest.mark.one_in(6, "kind", "make_copy", others="slow")
@pytest.mark.one_in(3, "kind", "make_copy")
@every_optimizer
@pytest.mark.parametrize("make_copy", COPIES.values(), ids=COPIES)
def test_a_copy_has_the_state_and_no_engine(kind, make_copy):
    loop = matrix_loop(kind)
    lr_scheduler.StepLR(loop.optimizer, 1)  # sets ``step`` on the instance
    loop.step(*first_batch(loop.loader))
    other = make_copy(loop.optimizer)
    assert isinstance(other, kind)
    assert str(other.state_dict()) == str(loop.optimizer.state_dict())
    parameters = nn.ParameterList(other.param_groups[0]["params"])
    with unchanged(parameters), pytest.raises(DetachedError, match=r"DPE019.*dpengine\.detach\(optimizer\)"):
        other.step()
    dpengine.detach(other)
    assert type(other) is kind
    before = state_of(parameters)
    for p in parameters:
        p.grad = torch.ones_like(p)
    other.step()
    assert not any(torch.equal(before[name], value) for name, value in state_of(parameters).items())


def test_a_copy_can_be_attached_again():
    loop = make_loop()
    model, optimizer = copy.deepcopy((loop.model, loop.optimizer))
    second = loop_with_optimizer(optimizer, model, engine=loop.engine)
    batch = first_batch(second.loader)
    with exact_gradients(second, batch):
        second.step(*batch)
    second.engine.detach(model)
    assert type(optimizer) is torch.optim.SGD


@every_optimizer
def test_the_repr_shows_the_private_settings(kind):
    loop = matrix_loop(kind, noise_multiplier=1.25, max_grad_norm=0.5)
    assert repr(loop.optimizer).startswith(f"DP{kind.__name__}(noise_multiplier=1.25, max_grad_norm=0.5")
    assert "INSECURE_SEED" in repr(loop.optimizer)
    assert "detached copy" in repr(copy.deepcopy(loop.optimizer))
    shown = repr(loop.optimizer)
    loop.engine.detach(loop.model)
    assert shown.endswith(f") of {loop.optimizer!r}")


@pytest.mark.hazard("L9")
def test_a_group_added_later_is_rejected_by_name():
    loop = make_loop()
    extra = nn.Linear(2, 2)
    loop.model.add_module("added", nn.Linear(2, 2))
    for parameters, says in (
        (extra.parameters(), r"DPE016.*Parameter\(2, 2\), Parameter\(2,\).*engine\.detach"),
        (loop.model[0].weight, r"\(0\.weight\)"),
        (loop.model.added.parameters(), r"DPE016.*added\.weight"),
        ([("head", extra.weight)], r"\(head\)"),
    ):
        with pytest.raises(UnknownParameterError, match=says):
            loop.optimizer.add_param_group({"params": parameters})
    assert len(loop.optimizer.param_groups) == 1
    loop.engine.detach(loop.model)


def test_a_detached_copy_accepts_new_parameter_groups():
    other = copy.deepcopy(make_loop().optimizer)
    other.add_param_group({"params": nn.Linear(2, 2).parameters()})
    assert len(other.param_groups) == 2


@pytest.mark.one_in(8, "kind", "set_to_none", others="slow")
@pytest.mark.one_in(4, "kind", "set_to_none")
@every_optimizer
@pytest.mark.parametrize("set_to_none", [True, False])
def test_zero_grad_works_with_and_without_set_to_none(kind, set_to_none):
    loop = matrix_loop(kind)
    shadow = Shadow(loop.model, kind)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for batch in loop.loader:
            loop.optimizer.zero_grad(set_to_none=set_to_none)
            assert all(p.grad is None or not p.grad.any() for p in loop.model.parameters())
            with exact_gradients(loop, batch):
                loop.backward(*batch)
                loop.optimizer.step()
            shadow.follow(loop.model)
    shadow.assert_equal(loop.model)


def test_every_optimizer_of_torch_is_supported_or_rejected():
    assert {kind.__name__ for kind in OPTIMIZERS} == {kind.__name__ for kind in SUPPORTED} | set(REJECTED_OPTIMIZERS)
    assert set(REJECTED_OPTIMIZERS) == {"LBFGS", "SparseAdam"}


@pytest.mark.parametrize("name", sorted(REJECTED_OPTIMIZERS))
@pytest.mark.parametrize("derived", [False, True])
def test_unsupported_optimizers_are_rejected_and_left_unchanged(name, derived):
    kind = getattr(torch.optim, name)
    kind = type("Mine", (kind,), {}) if derived else kind
    model = mlp(bias=False)
    optimizer = kind(model.parameters())
    before = dict(optimizer.__dict__)
    with pytest.raises(UnknownParameterError, match=r"DPE016.*cannot be made private.*SGD or AdamW"):
        loop_with_optimizer(optimizer, model)
    assert type(optimizer) is kind
    assert optimizer.__dict__ == before
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


@pytest.mark.slow
def test_garbage_collecting_a_run_during_the_step_of_another_optimizer_is_harmless():
    before = len(_global_optimizer_pre_hooks)
    held, other = [make_loop(noise_multiplier=1.0)], torch.optim.SGD(mlp().parameters())

    def collect(*_):
        held.clear()
        gc.collect()

    handles = [register_optimizer_step_pre_hook(hook) for hook in (collect, lambda *_: None)]
    try:
        other.step()
    finally:
        for handle in handles:
            handle.remove()
    held.append(make_loop(noise_multiplier=1.0))
    assert len(_global_optimizer_pre_hooks) <= before + 1  # none from the collected run


class AccumulatingWrapper(torch.optim.Optimizer):
    """A wrapper that skips updates while it accumulates, as the optimizer of accelerate does."""

    def __init__(self, optimizer):
        self.optimizer, self.sync = optimizer, False

    param_groups = property(lambda self: self.optimizer.param_groups)
    state = property(lambda self: self.optimizer.state)
    defaults = property(lambda self: self.optimizer.defaults)

    def step(self, closure=None):
        self.sync = not self.sync
        if not self.sync:
            self.optimizer.step(closure)

    def zero_grad(self, set_to_none=True):
        if not self.sync:
            self.optimizer.zero_grad(set_to_none)


def test_a_step_whose_update_is_skipped_is_rejected_at_once():
    loop = make_loop(noise_multiplier=1.0, make_optimizer=lambda p: AccumulatingWrapper(torch.optim.SGD(p, lr=0.1)))
    with pytest.raises(
        BatchStateError, match=r"DPE022.*AccumulatingWrapper.step\(\) updated no parameter.*accumulation_steps="
    ):
        loop.step(*first_batch(loop.loader))
    assert loop.engine.ledger.steps == 1


def test_the_remedy_for_a_skipped_update_is_accumulation_of_the_engine():
    loop = make_loop(noise_multiplier=1.0, accumulation_steps=2, seed=3)
    train(loop)
    assert loop.engine.ledger.steps == len(loop.loader)


class TransparentWrapper(AccumulatingWrapper):
    def step(self, closure=None):
        self.optimizer.step(closure)

    def zero_grad(self, set_to_none=True):
        self.optimizer.zero_grad(set_to_none)


class DataUpdateSGD(torch.optim.SGD):
    """Updates ``p.data``, which does not increment the version of a parameter."""

    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                p.data.add_(p.grad, alpha=-group["lr"])


SILENT_UPDATES = {
    "data": lambda p: DataUpdateSGD(p, lr=0.1),
    "learning rate of 0": lambda p: torch.optim.SGD(p, lr=0.0),
    "fused": lambda p: torch.optim.SGD(p, lr=0.1, fused=True),
    "wrapped": lambda p: TransparentWrapper(torch.optim.SGD(p, lr=0.1)),
}


@pytest.mark.parametrize("make", SILENT_UPDATES.values(), ids=SILENT_UPDATES)
def test_updates_that_change_no_version_counter_or_no_value_are_accepted(make):
    loop = make_loop(noise_multiplier=1.0, make_optimizer=make)
    assert train(loop) == loop.engine.ledger.steps
