"""Backward passes, zero_grad, and calls between them."""

import itertools

import inside
import pytest
import torch
import torch.nn.functional as F
from loops import (
    BATCH,
    every_mode,
    exact_gradients,
    examples,
    first_batch,
    gradients_of,
    make_loop,
)
from torch import nn

from dpengine import errors
from dpengine.errors import BatchStateError, PrivacyWarning, RepeatedBackwardError, StaleGradientError

pytestmark = pytest.mark.filterwarnings("ignore:.*DPE012", "ignore:.*DPE006")


# Backward passes and zero_grad


def two_forward_passes(loop, inputs, targets):
    loop.backward(inputs, targets)
    loop.backward(inputs, targets)


def one_forward_pass(loop, inputs, targets):
    outputs = loop.model(inputs)
    F.cross_entropy(outputs, targets).backward(retain_graph=True)
    outputs.square().mean().backward()


@pytest.mark.one_in(2, "mode", others="slow")
@every_mode
@pytest.mark.parametrize("twice", [two_forward_passes, one_forward_pass])
@pytest.mark.hazard("C6")
def test_a_second_backward_over_the_same_samples_raises(twice, mode):
    loop = make_loop(grad_sample_mode=mode, noise_multiplier=1.0)
    chunks = iter(loop.loader)
    with pytest.raises(RepeatedBackwardError, match=r"DPE017.*\(.*a \+ .*b\)\.backward\(\)"):
        twice(loop, *next(chunks))
    with pytest.raises(BatchStateError, match="discarded"):
        loop.optimizer.step()
    assert inside.state(loop.engine).zero
    loop.step(*next(chunks))  # and the next batch trains as usual
    assert loop.charges == [("void", 1), ("release", 1)]


@every_mode
def test_the_graph_of_an_earlier_batch_is_rejected(mode):
    loop = make_loop(grad_sample_mode=mode, sampling="shuffle")  # for batches of one size
    chunks = iter(loop.loader)
    inputs, targets = next(chunks)
    loss = F.cross_entropy(loop.model(inputs), targets)
    loss.backward(retain_graph=True)
    loop.optimizer.step()
    loop.optimizer.zero_grad()
    assert len(next(chunks)[1]) == len(targets)
    with pytest.raises(RepeatedBackwardError):
        loss.backward()


@every_mode
def test_the_sum_of_two_losses_is_one_backward(mode):
    loop = make_loop(grad_sample_mode=mode)
    batch = first_batch(loop.loader)
    both = lambda outputs, t: F.cross_entropy(outputs, t) + outputs.square().sum(1).mean()  # noqa: E731
    with exact_gradients(loop, batch, loss_fn=both):
        both(loop.model(batch[0]), batch[1]).backward()
        loop.optimizer.step()


@pytest.mark.hazard("L1")
def test_a_forgotten_zero_grad_and_accumulation_are_distinguished():
    loop = make_loop(noise_multiplier=1.0)
    chunks = iter(loop.loader)
    loop.backward(*next(chunks))
    loop.optimizer.step()
    with pytest.raises(StaleGradientError, match=r"DPE005.*zero_grad\(\) was not called.*top of the loop"):
        loop.backward(*next(chunks))
    loop.optimizer.zero_grad()
    loop.backward(*next(chunks))
    loop.backward(*next(chunks))
    with pytest.warns(PrivacyWarning, match="DPE006"):
        loop.optimizer.step()


@pytest.mark.parametrize("after", [False, True], ids=["of the model", "after the step"])
def test_zero_grad_of_the_model_or_after_the_step_is_accepted(after):
    loop = make_loop()
    for inputs, targets in loop.loader:
        if not after:
            loop.model.zero_grad()
        loop.backward(inputs, targets)
        loop.optimizer.step()
        if after:
            loop.optimizer.zero_grad()
    assert loop.engine.ledger.steps == len(loop.loader)


def test_a_forgotten_zero_grad_is_found_on_an_empty_batch():
    loop = make_loop(batch_size=1)
    stepped = False
    with pytest.raises(StaleGradientError):
        for inputs, targets in loop.loader:
            if stepped and inside.samples_now(loop.engine) == 0:
                loop.optimizer.step()
            elif not stepped:
                loop.step(inputs, targets)
                stepped = True


# Other calls between those of a training step


def evaluate(loop, inputs, targets):
    loop.model.eval()
    loop.model(inputs)
    loop.model.train()


def without_grad(loop, inputs, targets):
    with torch.no_grad():
        loop.model(inputs)


def forward_only(loop, inputs, targets):
    F.cross_entropy(loop.model(inputs), targets)


def gradient_in_eval_mode(loop, inputs, targets):
    loop.model.eval()
    loop.backward(inputs, targets)
    loop.model.train()
    loop.model.zero_grad()


def fail_in_forward(loop, inputs, targets):
    with pytest.raises(RuntimeError, match="mat1 and mat2"):
        loop.model(inputs[:, :2])


def fail_in_backward(loop, inputs, targets):
    outputs = loop.model(inputs)
    outputs.register_hook(lambda grad: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        F.cross_entropy(outputs, targets).backward()


def fail_inside_backward(loop, inputs, targets):
    """Fails after the hooks of some layers have run."""
    handle = loop.model[1].register_full_backward_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        F.cross_entropy(loop.model(inputs), targets).backward()
    handle.remove()


PASSES = [forward_only, gradient_in_eval_mode, fail_in_forward, evaluate]


@pytest.mark.one_in(10, "mode", "interlude", others="slow")
@pytest.mark.one_in(5, "mode", "interlude")
@every_mode
@pytest.mark.parametrize("interlude", [*PASSES, without_grad, fail_in_backward, fail_inside_backward])
@pytest.mark.hazard("L3")
def test_passes_outside_training_change_nothing(interlude, mode):
    loop = make_loop(grad_sample_mode=mode)
    other = examples(7, scale=3.0).tensors
    for batch in loop.loader:
        with exact_gradients(loop, batch):
            loop.optimizer.zero_grad()
            interlude(loop, *other)
            loop.backward(*batch)
            loop.optimizer.step()
        interlude(loop, *other)
    assert loop.charges == [("release", len(loop.loader))]


@pytest.mark.one_in(4, "mode", "interlude", others="slow")
@pytest.mark.one_in(2, "mode", "interlude")
@every_mode
@pytest.mark.parametrize("interlude", PASSES)
def test_passes_outside_training_change_nothing_between_backward_and_step(interlude, mode):
    loop = make_loop(grad_sample_mode=mode)
    batch = first_batch(loop.loader)
    with exact_gradients(loop, batch):
        loop.backward(*batch)
        interlude(loop, *examples(7, scale=3.0).tensors)
        loop.optimizer.step()


@pytest.mark.one_in(2, "mode", others="slow")
@every_mode
def test_an_interrupt_inside_a_layer_does_not_affect_later_steps(mode, monkeypatch):
    def interrupt(*_, **__):
        raise KeyboardInterrupt

    loop = make_loop(grad_sample_mode=mode)
    inputs, targets = first_batch(loop.loader)
    with exact_gradients(loop, (inputs, targets)):
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(nn.Linear, "forward", interrupt)
            patch.setattr(F, "linear", interrupt)
            loop.model(inputs)
        loop.backward(inputs, targets)
        loop.optimizer.step()
    assert all(isinstance(p, nn.Parameter) for p in loop.model.parameters())


@every_mode
def test_two_older_forward_passes_never_exceed_the_clipping_norm(mode):
    loop = make_loop(grad_sample_mode=mode, max_grad_norm=0.01)
    inputs, targets = first_batch(loop.loader)
    older, oldest = loop.model(inputs), loop.model(2 * inputs)
    fail_inside_backward(loop, inputs, targets)
    try:
        (F.cross_entropy(older, targets) + F.cross_entropy(oldest, targets)).backward()
        loop.optimizer.step()
    except (BatchStateError, errors.UnsupportedLayerError, errors.MissingGradientError):
        return
    released = torch.cat([gradient.flatten() for gradient in gradients_of(loop.model).values()])
    assert released.norm() <= 0.01 * len(targets) / BATCH


@every_mode
def test_a_pass_that_failed_at_its_end_does_not_join_an_older_forward(mode):
    loop = make_loop(
        grad_sample_mode=mode, max_grad_norm=100.0
    )  # so large that clipping does not hide a doubled gradient
    inputs, targets = first_batch(loop.loader)
    with exact_gradients(loop, (inputs, targets), max_norm=100.0):
        older = loop.model(inputs)
        watched = inputs.clone().requires_grad_()
        watched.register_hook(lambda grad: 1 / 0)  # runs after the hooks of all layers
        with pytest.raises(ZeroDivisionError):
            loop.backward(watched, targets)
        F.cross_entropy(older, targets).backward()
        loop.optimizer.step()


@pytest.mark.parametrize(
    ("fail", "message"), [(fail_in_backward, "no backward pass ran"), (fail_inside_backward, "discarded")]
)
def test_a_batch_that_failed_leaves_nothing_in_the_next(fail, message):
    loop = make_loop(accumulation_steps=2)
    chunks = iter(loop.loader)
    loop.backward(*next(chunks))
    fail(loop, *next(chunks))
    with pytest.raises(BatchStateError, match=message):
        loop.optimizer.step()
    first = next(chunks)
    assert inside.state(loop.engine).clean
    assert loop.charges == [("void", 1)]
    with exact_gradients(loop, *itertools.islice(make_loop(accumulation_steps=2).loader, 2, 4)):
        loop.step(*first)
        loop.step(*next(chunks))


def test_a_failure_while_gradients_are_summed_discards_the_batch():
    loop = make_loop(noise_multiplier=1.0)
    chunks = iter(loop.loader)
    batch = next(chunks)
    with inside.failing_sums(loop.engine, MemoryError(), at=3), pytest.raises(MemoryError):
        loop.backward(*batch)
    assert inside.state(loop.engine).zero
    with pytest.raises(BatchStateError, match="discarded"):
        loop.backward(*batch)  # half of the batch was already in the sums, so it must not be retried
    assert loop.charges == [("void", 1)]
