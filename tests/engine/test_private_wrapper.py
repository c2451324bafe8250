"""``make_private`` on a ``GradSampleModule``: its hooks are removed during the run and restored by detach."""

import contextlib
import copy
from functools import partial

import inside
import pytest
import spread_runs
import torch
import torch.nn.functional as F
from inside_parts import fail_to_attach
from launch import launched
from loops import assert_same_gradients, examples, expected_gradients, gradients_of, make_loop, mlp
from reference import flat_norms, per_sample_gradients
from torch import nn

from dpengine import GradSampleModule, PerSampleGradientClipper, PrivacyEngine
from dpengine.checkpoint import load, save
from dpengine.errors import BatchStateError, UnknownParameterError, UnsupportedLayerError

pytestmark = pytest.mark.filterwarnings("ignore:.*DPE012")


def wrapped(**settings):
    return GradSampleModule(mlp(), **settings)


def warm_up(model, samples=5):
    """Runs a backward pass and compares its norms with a loop over samples."""
    inputs, targets = (tensor[:samples] for tensor in examples().tensors)
    F.cross_entropy(model(inputs), targets).backward()
    return flat_norms(per_sample_gradients(copy.deepcopy(model.module), F.cross_entropy, (inputs,), targets))


def assert_records(model):
    """Asserts that the hooks of the wrapper are attached, and no others."""
    expected = warm_up(model)
    torch.testing.assert_close(model.last_pass.norms(), expected, rtol=1e-5, atol=1e-7)
    assert model.module[0].weight.grad_sample.shape == (5, 5, 4)
    assert model.module[0].weight.grad is None


def assert_off(model):
    """Asserts that the wrapper has no results."""
    with pytest.raises(BatchStateError, match="private in an engine"):
        model.last_pass  # noqa: B018
    assert not any(hasattr(p, "grad_sample") for p in model.parameters())


def batch_of(loop, *, least=2):
    return next(batch for batch in loop.loader if len(batch[1]) >= least)


def assert_step(loop):
    """Asserts that the gradients of a step equal those of a loop over the samples of its batch."""
    batch = batch_of(loop)
    expected = expected_gradients(loop.model.module, [batch])
    loop.step(*batch)
    assert_same_gradients(gradients_of(loop.model.module), expected)


class Failing:
    """Accountant whose storage fails when a batch is discarded."""

    name = "failing"

    def epsilon(self, history, delta, relation):
        return float(len(history))

    def delta(self, history, epsilon, relation):
        return 0.5

    def charged(self, charge):
        if charge.kind == "void":
            raise OSError


# During the run


def test_run_on_the_wrapper_equals_a_run_on_the_module():
    model, plain = wrapped(), mlp()
    warm_up(model)
    loops = [make_loop(one, noise_multiplier=1.0) for one in (model, plain)]
    assert loops[0].model is model
    for loop in loops:
        for batch in loop.loader:
            loop.step(*batch)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), plain.parameters(), strict=True))
    assert loops[0].engine.epsilon == loops[1].engine.epsilon
    assert [line.split()[0] for line in loops[0].engine.explain().splitlines()] == [
        line.split()[0] for line in loops[1].engine.explain().splitlines()
    ]


@pytest.mark.parametrize("mode", ["auto", "hooks", "functorch", "ew", "ghost"])
def test_gradients_are_those_of_a_loop_over_samples(mode):
    model = wrapped(force_functorch=True)  # another mode than that of the run
    warm_up(model)
    loop = make_loop(model, grad_sample_mode=mode)
    assert_step(loop)


def test_settings_of_the_wrapper_hold_for_the_run():
    loop = make_loop(wrapped(loss_reduction="sum"), loss_reduction="sum")
    inputs, targets = batch_of(loop)
    expected = expected_gradients(loop.model.module, [(inputs, targets)], divisor=1)
    loop.optimizer.zero_grad()
    F.cross_entropy(loop.model(inputs), targets, reduction="sum").backward()
    loop.optimizer.step()
    assert_same_gradients(gradients_of(loop.model.module), expected)


def test_wrapper_has_no_results_while_private():
    model = wrapped()
    warm_up(model)
    loop = make_loop(model)
    assert_off(model)
    loop.step(*batch_of(loop))
    assert_off(model)


def test_the_wrapper_cannot_be_removed_while_private():
    loop = make_loop(wrapped())
    with pytest.raises(BatchStateError, match=r"Call engine\.detach\(model\) first"):
        loop.model.to_standard_module()
    assert_step(loop)


def test_backward_over_a_forward_pass_from_before_shows_nothing():
    model = wrapped()
    inputs, targets = (tensor[:5] for tensor in examples().tensors)
    loss = F.cross_entropy(model(inputs), targets)
    loop = make_loop(model)
    with pytest.raises(BatchStateError, match="private in an engine"):
        loss.backward()
    assert_off(model)
    assert_step(loop)


def test_second_set_of_hooks_on_the_module_is_rejected():
    loop = make_loop(wrapped())
    inner = loop.model.module
    for watch in (
        lambda: GradSampleModule(inner),
        lambda: GradSampleModule(loop.model),
        lambda: PerSampleGradientClipper(inner, inside.policy(loop.engine)),
        lambda: make_loop(inner),
        lambda: make_loop(nn.Sequential(loop.model)),
    ):
        with pytest.raises(UnknownParameterError, match=r"(already watched|private already)"):
            watch()


def test_wrapping_a_private_module_is_rejected():
    model = wrapped()
    model.to_standard_module()
    loop = make_loop(model.module)
    with pytest.raises(UnknownParameterError, match="private already"):
        make_loop(model, engine=loop.engine)


def test_copy_made_while_private_has_no_private_hooks():
    loop = make_loop(wrapped())
    other = copy.deepcopy(loop.model)
    assert isinstance(other.to_standard_module(), nn.Sequential)
    F.cross_entropy(other(torch.randn(3, 4)), torch.zeros(3, dtype=torch.long)).backward()
    assert other.module[0].weight.grad is not None


# The end


def test_detach_attaches_the_hooks_again():
    model = wrapped()
    warm_up(model)
    loop = make_loop(model)
    loop.step(*batch_of(loop))
    loop.engine.detach(model)
    loop.optimizer.zero_grad()
    with pytest.raises(BatchStateError, match="No backward pass"):  # results from before the run are gone
        model.last_pass  # noqa: B018
    assert_records(model)
    assert isinstance(model.to_standard_module(), nn.Sequential)


def test_the_hooks_come_back_if_the_last_charge_fails():
    loop = make_loop(wrapped(), engine=PrivacyEngine(accountant=Failing(), seed=0), noise_multiplier=1.0)
    loop.backward(*batch_of(loop))
    with pytest.raises(OSError):
        loop.engine.detach(loop.model)
    assert_records(loop.model)


def test_backward_over_a_forward_pass_of_the_run_is_not_recorded_afterwards():
    loop = make_loop(wrapped())
    inputs, targets = batch_of(loop)
    loss = F.cross_entropy(loop.model(inputs), targets)
    loop.engine.detach(loop.model)
    with pytest.raises(BatchStateError, match="before the model was detached"):
        loss.backward()
    with pytest.raises(BatchStateError, match="No backward pass"):
        loop.model.last_pass  # noqa: B018


def test_a_second_run_follows():
    model = wrapped()
    for _ in range(2):
        assert_records(model)
        loop = make_loop(model)
        assert_step(loop)
        loop.engine.detach(model)
        loop.optimizer.zero_grad()
    assert_records(model)


def test_only_the_returned_object_can_be_detached():
    loop = make_loop(wrapped())
    with pytest.raises(UnknownParameterError, match="is not private in this engine"):
        loop.engine.detach(loop.model.module)


def test_a_wrapper_without_hooks_stays_without_them():
    model = wrapped()
    model.to_standard_module()
    loop = make_loop(model)
    assert_step(loop)
    loop.engine.detach(model)
    loop.optimizer.zero_grad()
    warm_up(model)
    assert model.module[0].weight.grad is not None


@pytest.mark.parametrize(("saved", "loaded"), [(wrapped, mlp), (mlp, wrapped)], ids=["wrapped first", "plain first"])
def test_a_checkpoint_does_not_depend_on_the_wrapper(saved, loaded, tmp_path):
    first = make_loop(saved(), noise_multiplier=1.0)
    first.step(*batch_of(first))
    save(tmp_path / "run", first.engine)
    second = make_loop(loaded(), noise_multiplier=1.0)
    load(tmp_path / "run", second.engine)
    assert all(torch.equal(a, b) for a, b in zip(first.model.parameters(), second.model.parameters(), strict=True))


# Rejected arguments


@contextlib.contextmanager
def unchanged():
    """Asserts that the block does not change the results and hooks of a wrapper."""
    model = wrapped()
    expected = warm_up(model)
    shown = model.module[0].weight.grad_sample
    yield model
    torch.testing.assert_close(model.last_pass.norms(), expected, rtol=1e-5, atol=1e-7)
    assert model.module[0].weight.grad_sample is shown
    model.zero_grad()
    assert_records(model)
    loop = make_loop(model)
    loop.step(*batch_of(loop))


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"batch_first": False}, "batch_first=False, and the GradSampleModule has batch_first=True"),
        ({"loss_reduction": "sum"}, "loss_reduction='sum', and the GradSampleModule has loss_reduction='mean'"),
        ({"clipping": "unknown"}, "unknown"),
    ],
    ids=["batch_first", "loss_reduction", "another argument"],
)
def test_an_argument_that_does_not_fit_changes_nothing(options, named):
    with unchanged() as model, pytest.raises(ValueError, match=named):
        make_loop(model, **options)


@pytest.mark.parametrize("part", ["optimizer", "models"])  # before the hooks, and after them
def test_an_error_while_hooks_are_attached_changes_nothing(part, monkeypatch):
    def fail(*args, **kwargs):
        raise RuntimeError("in between")

    with unchanged() as model, monkeypatch.context() as patch, pytest.raises(RuntimeError, match="in between"):
        fail_to_attach(patch, part, fail)
        make_loop(model)


@pytest.mark.parametrize(
    ("ranks", "outside", "inner"), [(2, False, False), (2, True, False), (1, True, False), (1, False, True)]
)
def test_distributed_models_are_rejected(ranks, outside, inner):
    for error in launched(ranks, partial(spread_runs.recorded, outside=outside, inside=inner)):
        assert isinstance(error, UnsupportedLayerError) and "single process" in str(error), error
