"""Reductions of a loss, and losses that mix samples."""

import pytest
import torch
import torch.nn.functional as F
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
)

import dpengine
from dpengine.errors import BatchDependentLossError, BatchMismatchError, ReductionError
from dpengine.validation.loss import check_loss, per_example

pytestmark = pytest.mark.filterwarnings("ignore:.*DPE012", "ignore:.*DPE006")


# Reductions, and losses that mix samples


def token_mean(outputs, targets):
    return F.cross_entropy(outputs.flatten(0, 1), targets.flatten(), ignore_index=-1)


def token_batch():
    torch.manual_seed(5)
    inputs, targets = torch.randn(5, 7, FEATURES), torch.randint(0, CLASSES, (5, 7))
    targets[0, 2:] = -1  # sample 0 is short, so its weight in a mean over tokens depends on the other samples
    return inputs, targets


@pytest.mark.hazard("B16")
def test_a_summed_loss_is_detected_where_a_mean_was_declared():
    batch = examples().tensors
    summed = lambda outputs, targets: F.cross_entropy(outputs, targets, reduction="sum")  # noqa: E731
    message = r'DPE013.*looks like a sum, expected a mean.*up to twice the clipping norm.*loss_reduction="sum"'
    with pytest.raises(ReductionError, match=message):
        check_loss(mlp(), summed, batch)
    check_loss(mlp(), summed, batch, loss_reduction="sum")
    with pytest.raises(ReductionError, match=r'looks like a mean, expected a sum.*loss_reduction="mean"'):
        check_loss(mlp(), F.cross_entropy, batch, loss_reduction="sum")
    check_loss(mlp(), F.cross_entropy, batch)


@pytest.mark.one_in(2, "mode", others="slow")
@every_mode
def test_a_loss_that_is_declared_as_a_sum_gives_the_same_gradients(mode):
    loop = make_loop(loss_reduction="sum", grad_sample_mode=mode)
    inputs, targets = first_batch(loop.loader)
    expected = expected_gradients(loop.model, [(inputs, targets)], divisor=1)
    F.cross_entropy(loop.model(inputs), targets, reduction="sum").backward()
    loop.optimizer.step()
    assert_same_gradients(gradients_of(loop.model), expected)


def test_a_loss_that_mixes_samples_is_detected_and_the_suggested_fix_works():
    with pytest.raises(
        BatchDependentLossError, match=r"DPE010.*sample 0 depends on the other samples.*per_example\(loss_fn\)"
    ):
        check_loss(mlp(), token_mean, token_batch())
    check_loss(mlp(), per_example(token_mean), token_batch())


def token_means(outputs, targets):
    """Returns the loss of each sample, ``(B,)``."""
    each = F.cross_entropy(outputs.transpose(1, 2), targets, ignore_index=-1, reduction="none")
    return each.sum(1) / (targets != -1).sum(1)


@pytest.mark.one_in(2, "mode", others="slow")
@pytest.mark.parametrize("reduction", ["mean", "sum"])
@every_mode
def test_backward_of_the_engine_clips_losses_of_single_samples(reduction, mode):
    dataset = torch.utils.data.TensorDataset(*token_batch())
    loop = make_loop(dataset=dataset, batch_size=3, loss_reduction=reduction, grad_sample_mode=mode, max_grad_norm=0.8)
    inputs, targets = first_batch(loop.loader, least=2)
    expected = expected_gradients(
        loop.model, [(inputs, targets)], max_norm=0.8, divisor=3 if reduction == "mean" else 1, loss_fn=token_mean
    )
    loop.engine.backward(token_means(loop.model(inputs), targets))
    loop.optimizer.step()
    assert_same_gradients(gradients_of(loop.model), expected)


@pytest.mark.parametrize("shape", [(), (5, 7)])
@pytest.mark.hazard("B16")
def test_backward_of_the_engine_needs_one_loss_per_sample(shape):
    loop = make_loop()
    next(iter(loop.loader))
    with pytest.raises(BatchDependentLossError, match=r'DPE010.*one number per sample.*reduction="none"'):
        loop.engine.backward(torch.zeros(shape, requires_grad=True))
    with pytest.raises(BatchMismatchError, match=r"DPE018.*loss_per_example has 99 numbers"):
        loop.engine.backward(torch.zeros(99, requires_grad=True))


def test_backward_of_the_engine_scales_with_the_scaler():
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    loop = make_loop(grad_scaler=scaler)
    inputs, targets = first_batch(loop.loader)
    expected = expected_gradients(loop.model, [(inputs, targets)])
    loop.engine.backward(F.cross_entropy(loop.model(inputs), targets, reduction="none"))
    scaler.step(loop.optimizer)
    assert_same_gradients(gradients_of(loop.model), expected)


def test_check_loss_is_exported():
    assert dpengine.check_loss is check_loss
