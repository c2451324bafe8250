"""Defects of Opacus: criteria and loss shapes."""

import functools

import pytest
import torch
import torch.nn.functional as F
from case_models import model_of
from opacus_defects.apis import (
    ALL_APIS,
    COMPAT_APIS,
    DEFAULT_APIS,
    GHOST_APIS,
    assert_bounded,
    assert_equal,
    fixed_loader,
    opacus,
    true_sum,
    with_apis,
)
from opacus_defects.small import batch, mlp, rows
from torch import nn

from dpengine.errors import BatchDependentLossError
from dpengine.validation import check_loss

pytestmark = pytest.mark.filterwarnings("ignore::dpengine.PrivacyWarning")

GHOSTS = ("default-ghost", "compat-ghost")


@with_apis(ALL_APIS)
@pytest.mark.hazard("O1")
def test_the_users_own_criterion_is_clipped_like_the_one_that_was_returned(api):
    criterion = nn.CrossEntropyLoss()
    truth = true_sum(mlp(), criterion, batch(), 1.5)
    assert_equal(api.clipped_sum(mlp(), criterion, batch(), 1.5, plain=True), truth)
    if api.id in GHOSTS:
        assert_equal(api.clipped_sum(mlp(), criterion, batch(), 1.5), truth)


@with_apis(COMPAT_APIS, quick=("compat-ghost",))
@pytest.mark.hazard("O1")
def test_no_sample_exceeds_a_clipping_norm_of_0_016_with_the_users_criterion(api):
    assert_bounded(api, mlp(), nn.CrossEntropyLoss(), batch(), 0.016, plain=True)


CRITERIA = {
    "module": nn.CrossEntropyLoss,
    "function": lambda: F.cross_entropy,
    "lambda": lambda: lambda scores, targets: F.cross_entropy(scores, targets),
    "partial": lambda: functools.partial(F.cross_entropy, reduction="mean"),
}


@pytest.mark.parametrize("name", CRITERIA)
@with_apis(ALL_APIS, quick=("compat-ghost",))
@pytest.mark.hazard("O2")
def test_a_criterion_may_be_a_function_or_a_module(api, name):
    criterion = CRITERIA[name]()
    assert_equal(api.clipped_sum(mlp(), criterion, batch(), 1.5), true_sum(mlp(), nn.CrossEntropyLoss(), batch(), 1.5))
    assert not hasattr(F.cross_entropy, "reduction")  # no attribute is left on torch's function


def one_output():
    """Returns a model, 16 inputs and targets ``(B, 1)``."""
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 1))
    return model, (rows(4, count=16), (rows(count=16).unsqueeze(1) > 0).float())


@pytest.mark.parametrize(
    "criterion",
    [pytest.param(nn.BCEWithLogitsLoss(), id="bce"), pytest.param(nn.MSELoss(), id="mse", marks=pytest.mark.slow)],
)
@with_apis(ALL_APIS)
@pytest.mark.hazard("O3")
def test_losses_of_shape_b_1_are_not_broadcast(api, criterion):
    model, rows16 = one_output()
    assert_equal(api.clipped_sum(model, criterion, rows16, 0.3), true_sum(model, criterion, rows16, 0.3))


@with_apis(DEFAULT_APIS)
@pytest.mark.hazard("O3")
def test_backward_accepts_a_vector_of_losses_and_rejects_other_shapes(api):
    model, (inputs, targets) = one_output()
    truth = true_sum(model, nn.BCEWithLogitsLoss(), (inputs, targets), 0.3)
    private = api.open(model, fixed_loader(16), max_grad_norm=0.3)
    next(iter(private.loader))
    losses = F.binary_cross_entropy_with_logits(private.model(inputs), targets, reduction="none")
    with pytest.raises(BatchDependentLossError, match=r"\(16, 1\)"):
        private.engine.backward(losses)
    private.engine.backward(losses.squeeze(1))
    private.optimizer.step()
    assert_equal(private.sum(), truth)


@pytest.mark.parametrize("shape", ["vector", "column", "scalar"])
@with_apis(COMPAT_APIS, quick=("compat-ghost",))
@pytest.mark.hazard("O3")
def test_a_criterion_of_any_shape_gives_the_same_sum_or_is_rejected_with_its_shape(api, shape):
    model, rows16 = one_output()

    def criterion(outputs, targets):
        each = F.binary_cross_entropy_with_logits(outputs, targets, reduction="none")
        return {"vector": each.squeeze(1), "column": each, "scalar": each.mean()}[shape]

    truth = true_sum(model, nn.BCEWithLogitsLoss(), rows16, 0.3)
    try:
        found = api.clipped_sum(model, criterion, rows16, 0.3)
    except (BatchDependentLossError, RuntimeError) as error:
        assert shape != "scalar"  # a reduced loss must be accepted
        assert "(16" in str(error) or "scalar outputs" in str(error)  # torch's message for an unreduced loss
        return
    assert_equal(found, truth)


# The modes disagree for token losses


@model_of(lambda: {"embedding": nn.Embedding(7, 4), "head": nn.Linear(4, 7)})
def tokens_model(m, tokens):
    """Scores ``(B, T, V)``."""
    return m.head(torch.tanh(m.embedding(tokens)))


def token_batch(*, equal):
    """Returns tokens and next tokens; ``equal``: all samples have the same number of ignored positions."""
    torch.manual_seed(5)
    tokens, following = torch.randint(0, 7, (4, 5)), torch.randint(0, 7, (4, 5))
    for row in range(4):
        following[row, row] = following[row, -1 - row % 2] = -100
        if row == 3 and not equal:
            following[row, :4] = -100
    return tokens, following


def flat_tokens(scores, targets):
    return F.cross_entropy(scores.flatten(0, 1), targets.flatten(), ignore_index=-100)


class TokenLoss(nn.Module):
    """User's criterion over ``(B, T, V)`` and ``(B, T)``."""

    reduction = "mean"

    def forward(self, scores, targets):
        return F.cross_entropy(scores.flatten(0, 1), targets.flatten(), ignore_index=-100, reduction=self.reduction)


@with_apis(ALL_APIS)
@pytest.mark.hazard("O29")
def test_token_losses_with_ignored_positions_give_the_same_sum_in_all_modes(api):
    torch.manual_seed(1)
    model, tokens = tokens_model(), token_batch(equal=False)
    if not api.writes:
        # The loop uses the mean over all tokens; the loss of a sample is its share times the batch size.
        truth = true_sum(model, loss_share(tokens[1]), tokens, 0.2)
        assert_equal(api.clipped_sum(model, TokenLoss(), tokens, 0.2), truth)
    tokens = token_batch(equal=True)
    assert_equal(api.clipped_sum(model, TokenLoss(), tokens, 0.2), true_sum(model, flat_tokens, tokens, 0.2))


def loss_share(targets):
    """Returns the loss of a sample: its share of the mean over all tokens, times the batch size."""
    counted = float((targets != -100).sum())

    def loss(scores, own):
        total = F.cross_entropy(scores.flatten(0, 1), own.flatten(), ignore_index=-100, reduction="sum")
        return len(targets) * total / counted

    return loss


@with_apis(GHOST_APIS)
@pytest.mark.hazard("O29")
def test_a_criterion_with_a_shape_averages_over_the_tokens_of_each_sample(api):
    torch.manual_seed(1)
    model, tokens = tokens_model(), token_batch(equal=False)
    truth = true_sum(model, flat_tokens, tokens, 0.2)
    private = api.open(model, fixed_loader(4), criterion=nn.CrossEntropyLoss(), max_grad_norm=0.2)
    next(iter(private.loader))
    private.optimizer.zero_grad()
    scores = private.model(tokens[0])
    private.criterion(scores.flatten(0, 1), tokens[1].flatten(), shape=scores.shape).backward()
    private.optimizer.step()
    assert_equal(private.sum(), truth)


@pytest.mark.hazard("O29")
def test_token_losses_that_mix_samples_are_rejected():
    torch.manual_seed(1)
    model = tokens_model()
    with pytest.raises(BatchDependentLossError, match=r"per_example\(loss_fn\)"):
        check_loss(model, flat_tokens, token_batch(equal=False))
    private = DEFAULT_APIS[0].open(model, fixed_loader(4))
    next(iter(private.loader))
    with pytest.raises(BatchDependentLossError, match=r"\(4, 5\)"):
        private.engine.backward(private.model(token_batch(equal=True)[0]).sum(dim=2))


def test_compat_is_the_package_under_test():
    assert opacus().__name__ == "dpengine.compat.opacus"
