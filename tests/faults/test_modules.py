"""Modules in a private step: exact, or rejected by name."""

import copy
import warnings
from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
from case_calls import Doubled
from case_models import model_of
from faults.neighbours import (
    CLASSES,
    FEATURES,
    MODES,
    ROUNDING,
    assert_right,
    influence,
    mlp,
    plain_step,
    private,
    release_of,
    tensors,
    truth_of,
)
from torch import nn

from dpengine.errors import BatchMismatchError, PrivacyError, RepeatedBackwardError, UnsupportedLayerError

pytestmark = pytest.mark.filterwarnings("ignore:.*DPE012")
every_mode = pytest.mark.parametrize("mode", MODES)


# Batch normalization mixes samples

BATCH_NORMS = {
    "affine": lambda: nn.BatchNorm1d(5),
    "plain": lambda: nn.BatchNorm1d(5, affine=False),
    "without-statistics": lambda: nn.BatchNorm1d(5, affine=False, track_running_stats=False),
    "of-instances": lambda: nn.Sequential(
        nn.Unflatten(1, (5, 1)), nn.InstanceNorm1d(5, track_running_stats=True), nn.Flatten()
    ),
    "lazy": lambda: nn.LazyBatchNorm1d(),
}


@pytest.mark.parametrize("name", BATCH_NORMS)
@pytest.mark.hazard("M1")
def test_batch_norm_is_rejected_by_make_private(name):
    model = nn.Sequential(nn.Linear(FEATURES, 5), BATCH_NORMS[name](), nn.Linear(5, CLASSES))
    with pytest.raises(UnsupportedLayerError, match=r"DPE001.*1"):
        private(model, tensors())
    assert not model._forward_hooks


# A tensor is changed in place after it was recorded


class OverwritingModel(nn.Module):
    def __init__(self, place):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(FEATURES, FEATURES), nn.Linear(FEATURES, CLASSES)
        self.place = place

    def forward(self, inputs):
        inputs = inputs.clone()
        hidden = self.first(inputs)
        if self.place == "input":
            inputs.zero_()
        squashed = torch.tanh(hidden)
        output = self.second(squashed)
        if self.place == "activation":
            squashed.add_(1.0)
        return output


@pytest.mark.parametrize("place", ["input", "activation"])
@every_mode
@pytest.mark.hazard("M6")
def test_an_in_place_change_of_a_saved_tensor_raises(mode, place):
    engine, model, optimizer, loader = private(OverwritingModel(place), tensors(), mode=mode, noise_multiplier=1.0)
    with pytest.raises((RuntimeError, PrivacyError), match=r"inplace operation|(another|a different) output"):
        plain_step(model, optimizer, *next(iter(loader)))
    engine.detach(model)
    assert [charge.kind for charge in engine.ledger.history] == ["void"]


# Axis 0 is not the batch


@model_of(lambda: {"lstm": nn.LSTM(FEATURES, 4), "head": nn.Linear(4, CLASSES)})
def time_first(m, inputs):
    """Model whose LSTM lacks ``batch_first=True``."""
    return m.head(m.lstm(inputs)[0].mean(dim=1))


@every_mode
@pytest.mark.hazard("M9")
def test_a_time_first_recurrent_layer_is_rejected_by_name(mode):
    with pytest.raises(BatchMismatchError, match=r"DPE018.*'lstm.*3 (rows|samples)"):
        release_of(time_first(), tensors(3, FEATURES), mode=mode)


@pytest.mark.one_in(2, "mode", others="slow")
@every_mode
@pytest.mark.hazard("M9")
def test_a_time_first_layer_is_rejected_if_sequence_length_equals_batch_size(mode):
    with pytest.raises(PrivacyError, match=r"DPE0(01|18)"):
        release_of(time_first(), tensors(6, FEATURES), mode=mode)


# Tables that all samples share


class Positions(nn.Module):
    """Position embeddings in the usual form, with ids of shape (1, T) or (T,) that do not depend on the batch."""

    def __init__(self, ids, tied):
        super().__init__()
        torch.manual_seed(0)
        self.table, self.head = nn.Embedding(9, FEATURES), nn.Linear(FEATURES, CLASSES)
        self.register_buffer("ids", ids)
        self.tied = tied

    def forward(self, inputs):
        hidden = inputs + self.table(self.ids[..., : inputs.shape[1]])
        if self.tied:  # a second lookup, by sample
            hidden = hidden + self.table(inputs[..., 0].abs().long() % 9)
        return self.head(torch.tanh(hidden).mean(dim=1))


@pytest.mark.one_in(6, "mode", "ids", "tied", others="slow")
@pytest.mark.one_in(3, "mode", "ids", "tied")
@pytest.mark.parametrize("tied", [False, True], ids=["positions-only", "positions-and-samples"])
@pytest.mark.parametrize("ids", [torch.arange(9).unsqueeze(0), torch.arange(9)], ids=["1-T", "T"])
@every_mode
@pytest.mark.hazard("M9")
def test_position_embeddings_without_a_batch_axis_are_exact(mode, ids, tied):
    plain = Positions(ids, tied)
    data = tensors(8, FEATURES)
    reference = copy.deepcopy(plain)
    assert_right(plain, data, plain=reference, mode=mode)
    release_of(Positions(ids, tied), [t[:1] for t in data], mode=mode)
    _, model, *_ = private(Positions(ids, tied), data, mode=mode)
    assert model(data[0][:0]).shape == (0, CLASSES)


@pytest.mark.parametrize("mode", ["auto", "ghost"])
@pytest.mark.hazard("M9")
def test_as_many_positions_as_samples_are_exact_or_rejected_if_the_probe_is_inconclusive(mode):
    data = tensors(6, FEATURES)
    assert_right(Positions(torch.arange(9), False), data, plain=Positions(torch.arange(9), False), mode=mode)

    class FailsOnFiveSamples(Positions):
        def forward(self, inputs):
            assert len(inputs) != 5
            return super().forward(inputs)

    with pytest.raises(UnsupportedLayerError, match="samples of a batch independent"):
        release_of(FailsOnFiveSamples(torch.arange(9), False), data, mode=mode)
    _, model, optimizer, loader = private(Positions(torch.arange(9), False), tensors(5, FEATURES), mode=mode)
    for inputs, targets in loader:
        plain_step(model, optimizer, inputs, targets)
    assert model.table.weight.grad[:5].norm() > 0


# A layer draws random numbers


@pytest.mark.one_in(2, "mode", others="slow")
@every_mode
@pytest.mark.hazard("M10")
def test_clipping_uses_the_dropout_masks_of_the_forward_pass(mode):
    class MaskedModel(nn.Module):
        """Dropout with a fixed mask for each sample, so that the mask does not depend on the rest of the batch."""

        def __init__(self):
            super().__init__()
            self.net, self.drop = mlp(), nn.Dropout(0.4)

        def forward(self, inputs):
            torch.manual_seed(5)
            whole = self.drop(torch.ones(6, 5))
            hidden = torch.tanh(self.net[0](inputs[:, :FEATURES]))
            return self.net[2](hidden * whole[inputs[:, FEATURES].long()])

    inputs, targets = tensors()
    data = torch.cat([inputs, torch.arange(6.0).unsqueeze(1)], dim=1), targets
    assert_right(MaskedModel(), data, mode=mode)

    class DropoutModel(nn.Module):
        def __init__(self):
            super().__init__()
            self.net, self.drop = mlp(), nn.Dropout(0.4)

        def forward(self, inputs):
            return self.net[2](self.drop(torch.tanh(self.net[0](inputs))))

    def step(model, optimizer, inputs, targets):
        torch.manual_seed(7)
        plain_step(model, optimizer, inputs, targets)

    expected = release_of(DropoutModel(), tensors(), step, mode="hooks")
    found = release_of(DropoutModel(), tensors(), step, mode=mode)
    assert float((found - expected).norm() / expected.norm()) < 1e-5


# Custom autograd functions, double backward, complex or sparse parameters


@model_of(lambda: {"net": mlp()})
def model_with_function(m, inputs):
    return m.net[2](Doubled.apply(m.net[1](m.net[0](inputs))))


@pytest.mark.one_in(2, "mode", others="slow")
@every_mode
@pytest.mark.hazard("M11")
def test_a_custom_function_between_layers_is_exact(mode):
    assert_right(model_with_function(), tensors(), mode=mode)


def gradient_penalty_step(model, optimizer, inputs, targets):
    optimizer.zero_grad()
    inputs.requires_grad_()
    output = model(inputs)
    (grad,) = torch.autograd.grad(output.sum(), inputs, create_graph=True)
    (F.cross_entropy(output, targets) + grad.square().sum(dim=1).mean()).backward()
    optimizer.step()


@every_mode
@pytest.mark.hazard("M11")
def test_a_gradient_penalty_is_rejected_and_releases_nothing(mode):
    engine, model, optimizer, loader = private(mlp(), tensors(), mode=mode, noise_multiplier=1.0)
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(RepeatedBackwardError, match=r"DPE017.*create_graph=True.*gradient penalty.*clipped_grad"):
        gradient_penalty_step(model, optimizer, *next(iter(loader)))
    engine.detach(model)
    assert [charge.kind for charge in engine.ledger.history] == ["void"]
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())


@every_mode
@pytest.mark.hazard("M11")
def test_a_gradient_penalty_without_a_loss_is_rejected(mode):
    engine, model, _, loader = private(mlp(), tensors(), mode=mode, noise_multiplier=1.0)
    inputs, _ = next(iter(loader))
    (grad,) = torch.autograd.grad(model(inputs.requires_grad_()).sum(), inputs, create_graph=True)
    with pytest.raises((RepeatedBackwardError, RuntimeError), match=r"DPE017|does not require grad"):
        grad.square().sum().backward()
    engine.detach(model)


@every_mode
@pytest.mark.hazard("M11")
def test_complex_and_lazy_parameters_are_rejected_by_name(mode):
    class ComplexScale(nn.Module):
        def __init__(self):
            super().__init__()
            self.phase = nn.Parameter(torch.ones(FEATURES, dtype=torch.complex64))

        def forward(self, inputs):
            return (inputs * self.phase).abs()

    for model in (nn.Sequential(ComplexScale(), mlp()), nn.Sequential(nn.LazyLinear(4), nn.Linear(4, CLASSES))):
        with pytest.raises(UnsupportedLayerError, match=r"DPE001.*0 \("):
            private(model, tensors(), mode=mode)


@pytest.mark.one_in(2, "mode", others="slow")
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.hazard("M11")
def test_sparse_embeddings_are_exact(mode):
    class SparseModel(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.table, self.head = nn.Embedding(9, 4, sparse=True), nn.Linear(4, CLASSES)

        def forward(self, inputs):
            return self.head(self.table(inputs.long().abs() % 9).mean(dim=1))

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        assert_right(SparseModel(), tensors(), mode=mode)


# Outputs that hold the loss


@dataclass
class Output:
    loss: torch.Tensor
    logits: torch.Tensor


class ModelWithLoss(nn.Module):
    def __init__(self, wrap):
        super().__init__()
        self.net, self.wrap = mlp(), wrap

    def forward(self, inputs, targets):
        logits = self.net(inputs)
        return self.wrap(F.cross_entropy(logits, targets), logits)


def store_on_another_object(loss, logits):
    Storage.loss = loss


class Storage:
    loss = None


OUTPUTS = {
    "tuple": (lambda loss, logits: (loss, logits), lambda output: output[0]),
    "dict": (lambda loss, logits: {"loss": loss, "logits": logits}, lambda output: output["loss"]),
    "scalar": (lambda loss, logits: loss, lambda output: output),
    "dataclass": (Output, lambda output: output.loss),
    "list-in-dataclass": (lambda loss, logits: Output([loss], None), lambda output: output.loss[0]),
    "on-another-object": (store_on_another_object, lambda output: Storage.loss),
}
UNTRACED = {"on-another-object"}


@pytest.mark.one_in(10, "mode", "name", others="slow")
@pytest.mark.one_in(5, "mode", "name")
@pytest.mark.parametrize("name", OUTPUTS)
@every_mode
@pytest.mark.hazard("M4")
def test_a_loss_inside_the_output_is_exact_or_rejected(mode, name):
    wrap, loss_of = OUTPUTS[name]

    def step(model, optimizer, inputs, targets):
        optimizer.zero_grad()
        loss_of(model(inputs, targets)).backward()
        optimizer.step()

    truth = truth_of(mlp(), tensors())
    try:
        found = release_of(ModelWithLoss(wrap), tensors(), step, mode=mode)
    except PrivacyError:
        assert mode == "ghost" and name in UNTRACED
        return
    assert float((found - truth).norm() / truth.norm()) < 1e-5
    assert influence(ModelWithLoss(wrap), tensors(), step, mode=mode) <= 1 + ROUNDING
