"""The criterion of ghost modes: each equivalent form of a loss gives the same clipped sums."""

import functools

import pytest
import torch
import torch.nn.functional as F
from opacus_runs import assert_same, gradients
from reference import clipped_sum, per_sample_gradients
from torch import nn

from dpengine.compat.opacus import GradSampleModuleFastGradientClipping
from dpengine.compat.opacus.optimizers import DPOptimizerFastGradientClipping
from dpengine.compat.opacus.utils.adaptive_clipping import DPLossFastGradientAdaptiveClipping
from dpengine.compat.opacus.utils.fast_gradient_clipping_utils import DPLossFastGradientClipping
from dpengine.errors import BatchDependentLossError

SPELLINGS = {
    "module": nn.CrossEntropyLoss(),
    "module-none": nn.CrossEntropyLoss(reduction="none"),
    "function": F.cross_entropy,
    "partial": functools.partial(F.cross_entropy, label_smoothing=0.0),
    "lambda": lambda out, y: F.cross_entropy(out, y, reduction="none"),
    "lambda-column": lambda out, y: F.cross_entropy(out, y, reduction="none").unsqueeze(1),
}


def make_wrapped(reduction="mean"):
    torch.manual_seed(0)
    wrapped = GradSampleModuleFastGradientClipping(nn.Linear(3, 5), loss_reduction=reduction)
    optimizer = DPOptimizerFastGradientClipping(
        torch.optim.SGD(wrapped.parameters(), lr=0.1),
        noise_multiplier=0.0,
        max_grad_norm=0.3,
        expected_batch_size=4,
        loss_reduction=reduction,
    )
    return wrapped, optimizer, torch.randn(4, 3), torch.tensor([0, 4, 2, 2])


def truth(module, inputs, targets, factor=1.0):
    rows = per_sample_gradients(module, lambda out, y: factor * F.cross_entropy(out, y), (inputs,), targets)
    return clipped_sum(rows, 0.3)


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("criterion", SPELLINGS.values(), ids=SPELLINGS)
def test_every_spelling_of_a_loss_gives_the_clipped_sum(criterion, reduction):
    wrapped, optimizer, inputs, targets = make_wrapped(reduction)
    loss = DPLossFastGradientClipping(wrapped, optimizer, criterion, reduction)(wrapped(inputs), targets)
    expected = truth(wrapped._module, inputs, targets)
    plain = F.cross_entropy(wrapped._module.double()(inputs.double()), targets, reduction=reduction)
    wrapped._module.float()
    assert loss.item() == pytest.approx(float(plain), rel=1e-5)
    assert torch.equal(loss.detach(), loss.reduced.detach())
    loss.backward()
    optimizer.step()
    assert_same(gradients(wrapped._module, 4 if reduction == "mean" else 1), expected)


def test_the_reduction_of_the_users_criterion_stays_as_it_is():
    wrapped, optimizer, inputs, targets = make_wrapped()
    own = nn.CrossEntropyLoss(reduction="sum")
    DPLossFastGradientClipping(wrapped, optimizer, own)(wrapped(inputs), targets)
    assert own.reduction == "sum"


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_losses_add_up_and_are_scaled_before_clipping(reduction):
    wrapped, optimizer, inputs, targets = make_wrapped(reduction)
    criterion = DPLossFastGradientClipping(wrapped, optimizer, nn.CrossEntropyLoss(), reduction)
    out = wrapped(inputs)
    one, other = criterion(out, targets), criterion(out, targets)
    total = 2 * one + other / 2 - other * 0.25 + 3 - 1
    assert float(total) == pytest.approx(2.25 * one.item() + 2, rel=1e-5)
    assert float(-total) == pytest.approx(-float(total))
    assert float(5 - one) == pytest.approx(5 - one.item(), rel=1e-5)
    expected = truth(wrapped._module, inputs, targets, factor=2.25)
    total.backward()
    optimizer.step()
    assert_same(gradients(wrapped._module, 4 if reduction == "mean" else 1), expected)


@pytest.mark.parametrize("shaped", [True, False])
def test_token_losses_belong_to_their_sample_and_ignored_tokens_to_none(shaped):
    torch.manual_seed(0)
    wrapped = GradSampleModuleFastGradientClipping(nn.Linear(3, 5))
    optimizer = DPOptimizerFastGradientClipping(
        torch.optim.SGD(wrapped.parameters(), lr=0.1), noise_multiplier=0.0, max_grad_norm=1e3, expected_batch_size=2
    )
    inputs, targets = torch.randn(2, 4, 3), torch.tensor([[1, 2, -100, -100], [0, 4, 3, 3]])
    criterion = DPLossFastGradientClipping(wrapped, optimizer, nn.CrossEntropyLoss())
    out = wrapped(inputs).flatten(0, 1)
    loss = criterion(out, targets.flatten(), shape=(2, 4)) if shaped else criterion(out, targets.flatten())

    def of_row(row_out, row_targets):
        return F.cross_entropy(row_out.flatten(0, 1), row_targets.flatten())

    expected = clipped_sum(per_sample_gradients(wrapped._module, of_row, (inputs,), targets), 1e3)
    loss.backward()
    optimizer.step()
    assert_same(gradients(wrapped._module, 2), expected)


def test_losses_that_do_not_divide_into_samples_are_rejected():
    wrapped, optimizer, inputs, targets = make_wrapped()
    criterion = DPLossFastGradientClipping(wrapped, optimizer, lambda out, y: out.flatten()[:7])
    with pytest.raises(BatchDependentLossError, match="reduction"):
        criterion(wrapped(inputs), targets)


def test_sums_of_losses_of_other_samples_and_unknown_reductions_are_rejected():
    wrapped, optimizer, inputs, targets = make_wrapped()
    criterion = DPLossFastGradientClipping(wrapped, optimizer, nn.CrossEntropyLoss())
    one, other = criterion(wrapped(inputs), targets), criterion(wrapped(inputs[:3]), targets[:3])
    with pytest.raises(ValueError, match=r"\(4,\) and \(3,\)"):
        _ = one + other
    with pytest.raises(TypeError, match="number"):
        _ = one + torch.ones(4)
    with pytest.raises(ValueError, match="loss_reduction"):
        DPLossFastGradientClipping(wrapped, optimizer, nn.CrossEntropyLoss(), "median")


def test_the_adaptive_criterion_makes_the_optimizer_adaptive_once():
    wrapped, optimizer, inputs, targets = make_wrapped()
    settings = {"target_unclipped_quantile": 0.5, "min_clipbound": 0.1, "max_clipbound": 9.0}
    for _ in range(2):
        criterion = DPLossFastGradientAdaptiveClipping(wrapped, optimizer, nn.CrossEntropyLoss(), **settings)
    criterion(wrapped(inputs), targets).backward()
    assert optimizer.max_grad_norm == pytest.approx(0.3)
    optimizer.step()
    assert optimizer.max_grad_norm != pytest.approx(0.3)
    assert 0.1 <= optimizer.max_grad_norm <= 9.0
