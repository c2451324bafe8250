"""F-M: modules as people write them, through the whole engine: right, or refused by name."""

import copy
import warnings
from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
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
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

from dpengine.errors import (
    BatchMismatchError,
    MissingGradientError,
    PrivacyError,
    UnsupportedLayerError,
)

pytestmark = pytest.mark.filterwarnings("ignore:.*DPE012")
every_mode = pytest.mark.parametrize("mode", MODES)


# F-M1

NORMS = {
    "affine": lambda: nn.BatchNorm1d(5),
    "plain": lambda: nn.BatchNorm1d(5, affine=False),
    "without-statistics": lambda: nn.BatchNorm1d(5, affine=False, track_running_stats=False),
    "of-instances": lambda: nn.Sequential(
        nn.Unflatten(1, (5, 1)), nn.InstanceNorm1d(5, track_running_stats=True), nn.Flatten()
    ),
    "lazy": lambda: nn.LazyBatchNorm1d(),
}


@pytest.mark.parametrize("name", NORMS)
def test_f_m1_batch_norm_is_refused_before_training(name):
    model = nn.Sequential(nn.Linear(FEATURES, 5), NORMS[name](), nn.Linear(5, CLASSES))
    with pytest.raises(UnsupportedLayerError, match=r"DPE001.*1"):
        private(model, tensors())
    assert not model._forward_hooks


# F-M4


class Reused(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        inner = nn.Linear(FEATURES, FEATURES)
        self.layers, self.head = nn.ModuleList([inner, inner, inner]), nn.Linear(FEATURES, CLASSES)

    def forward(self, inputs):
        for layer in self.layers:
            inputs = torch.tanh(layer(inputs))
        return self.head(inputs)


class TiedAcrossKinds(nn.Module):
    """One matrix as a table, as a layer, and transposed in a layer of another class."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.table, self.mix, self.out = nn.Embedding(4, 4), nn.Linear(4, 4), nn.Linear(4, CLASSES)
        self.mix.weight = self.table.weight

    def forward(self, inputs):
        return self.out(torch.tanh(self.mix(self.table((inputs * 7).long() % 4).mean(dim=1))))


class Siamese(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.tower, self.head = mlp(), nn.Linear(CLASSES, CLASSES)

    def forward(self, inputs):
        return self.head(self.tower(inputs) * self.tower(inputs.flip(1)))


class Unrolled(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.cell, self.head = nn.GRUCell(2, 3), nn.Linear(3, CLASSES)

    def forward(self, inputs):
        state = None
        for part in inputs.split(2, dim=1):
            state = self.cell(part, state)
        return self.head(state)


class TiedInBlocks(nn.Module):
    """Two blocks that share a weight, each checkpointed."""

    def __init__(self, reentrant=None):
        super().__init__()
        torch.manual_seed(0)
        self.entry = nn.Linear(FEATURES, 4)
        self.first, self.second, self.head = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, CLASSES)
        self.second.weight = self.first.weight
        self.reentrant = reentrant

    def block(self, hidden):
        return torch.tanh(self.second(torch.tanh(self.first(hidden))))

    def forward(self, inputs):
        hidden = self.entry(inputs)
        for _ in range(2):
            if self.reentrant is None:
                hidden = self.block(hidden)
            else:
                hidden = checkpoint(self.block, hidden, use_reentrant=self.reentrant)
        return self.head(hidden)


@pytest.mark.parametrize("make", [Reused, TiedAcrossKinds, Siamese, Unrolled, TiedInBlocks])
@every_mode
def test_f_m4_the_norm_is_that_of_the_sum_over_all_uses(mode, make):
    assert_right(make(), tensors(), mode=mode)


# F-M5


class Functional(nn.Module):
    def __init__(self, use):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(FEATURES, FEATURES), nn.Linear(FEATURES, CLASSES)
        self.use = use

    def forward(self, inputs):
        return self.use(self, inputs)


USES = {
    "beside-its-layer": lambda m, x: m.second(F.linear(m.first(x), m.first.weight)),
    "bias-alone": lambda m, x: m.second(m.first(x) + m.first.bias),
    "instead-of-its-layer": lambda m, x: F.linear(m.first(x), m.second.weight, m.second.bias),
    "as-a-penalty": lambda m, x: m.second(m.first(x)) + m.first.weight.square().sum(),
}


@pytest.mark.parametrize("use", USES)
@every_mode
def test_f_m5_a_weight_used_past_its_layer_is_refused_and_charged(mode, use):
    engine, model, optimizer, loader = private(Functional(USES[use]), tensors(), mode=mode, noise_multiplier=1.0)
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(MissingGradientError, match=r"DPE002.*'(first|second)\.(weight|bias)'"):
        plain_step(model, optimizer, *next(iter(loader)))
    assert [charge.kind for charge in engine.ledger.history] == ["void"]
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())


# F-M6


class Overwrites(nn.Module):
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
def test_f_m6_what_was_saved_may_not_change_before_the_backward_pass(mode, place, request):
    if (mode, place) == ("ew", "input"):
        request.applymarker(pytest.mark.xfail(strict=True, reason="torch's ExpandedWeights does not watch its inputs"))
    engine, model, optimizer, loader = private(Overwrites(place), tensors(), mode=mode, noise_multiplier=1.0)
    with pytest.raises((RuntimeError, PrivacyError), match=r"inplace operation|another output"):
        plain_step(model, optimizer, *next(iter(loader)))
    engine.detach(model)
    assert [charge.kind for charge in engine.ledger.history] == ["void"]


# F-M7


class Whole(nn.Module):
    def __init__(self, reentrant):
        super().__init__()
        self.net, self.reentrant = mlp(), reentrant

    def forward(self, inputs):
        return self.net(inputs) if self.reentrant is None else self.checkpointed(inputs)

    def checkpointed(self, inputs):
        return checkpoint(self.net, inputs, use_reentrant=self.reentrant)


@pytest.mark.parametrize("reentrant", [False, True])
@every_mode
def test_f_m7_checkpointed_blocks_with_tied_weights_are_right(mode, reentrant):
    assert_right(TiedInBlocks(reentrant), tensors(), plain=TiedInBlocks(), mode=mode)


@every_mode
def test_f_m7_a_model_that_is_one_checkpoint_is_right(mode):
    assert_right(Whole(False), tensors(), plain=Whole(None), mode=mode)


@every_mode
def test_f_m7_a_reentrant_checkpoint_without_gradients_to_pass_on_is_refused(mode):
    with pytest.raises(RuntimeError, match=r"does not require grad|DPE002"):
        release_of(Whole(True), tensors(), mode=mode)


def around(reentrant):
    def step(model, optimizer, inputs, targets):
        optimizer.zero_grad()
        output = checkpoint(model, inputs.requires_grad_(), use_reentrant=reentrant)
        F.cross_entropy(output, targets).backward()
        optimizer.step()

    return step


@pytest.mark.parametrize("reentrant", [False, True])
@every_mode
def test_f_m7_a_checkpoint_around_the_model_is_right_or_refused(mode, reentrant):
    try:
        assert_right(mlp(), tensors(), around(reentrant), mode=mode)
    except PrivacyError:
        assert mode == "ghost"


# F-M8


class LowRank(nn.Module):
    """An adapter beside a frozen layer, of modules or of parameters."""

    def __init__(self, base, how):
        super().__init__()
        self.base, self.how = base.requires_grad_(False), how
        torch.manual_seed(3)
        if how == "modules":
            self.down, self.up = nn.Linear(FEATURES, 2, bias=False), nn.Linear(2, base.out_features, bias=False)
        else:
            self.down, self.up = nn.Parameter(torch.randn(2, FEATURES)), nn.Parameter(torch.randn(base.out_features, 2))

    def forward(self, inputs):
        if self.how == "modules":
            return self.base(inputs) + self.up(self.down(inputs))
        if self.how == "linear":
            return self.base(inputs) + F.linear(F.linear(inputs, self.down), self.up)
        if self.how == "matmul":
            return self.base(inputs) + inputs @ self.down.T @ self.up.T
        return F.linear(inputs, self.base.weight + self.up @ self.down, self.base.bias)


def adapted(how):
    torch.manual_seed(2)
    return nn.Sequential(LowRank(nn.Linear(FEATURES, 5), how), nn.Tanh(), nn.Linear(5, CLASSES))


@pytest.mark.parametrize("how", ["modules", "linear", "matmul", "merged"])
@every_mode
def test_f_m8_adapters_are_right_or_refused_by_name(mode, how):
    try:
        assert_right(adapted(how), tensors(), mode=mode)
    except UnsupportedLayerError as refusal:
        assert how in {"matmul", "merged"} and mode != "functorch"
        assert "'0.down'" in str(refusal) or "'0.up'" in str(refusal)


class Spare(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.used, self.spare = nn.Linear(FEATURES, CLASSES), nn.Linear(FEATURES, 2)

    def forward(self, inputs):
        return self.used(inputs)


@every_mode
def test_f_m8_an_unused_parameter_is_named_or_gets_noise_and_is_never_dropped(mode):
    with pytest.raises(MissingGradientError, match=r"DPE002.*'spare\.weight'"):
        release_of(Spare(), tensors(), mode=mode)
    _, model, optimizer, loader = private(
        Spare(), tensors(), mode=mode, unused_parameters="zero", noise_multiplier=1.0, max_grad_norm=3.0
    )
    plain_step(model, optimizer, *next(iter(loader)))
    assert all(0.3 < float(p.grad.std()) / 3 < 3 for p in model.spare.parameters() if p.numel() > 2)
    model.spare.requires_grad_(False)
    model.used.bias.requires_grad_(False)
    optimizer.zero_grad()
    plain_step(model, optimizer, *next(iter(loader)))
    assert [name for name, p in model.named_parameters() if p.grad is not None] == ["used.weight"]


# F-M9


class TimeFirst(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.lstm, self.head = nn.LSTM(FEATURES, 4), nn.Linear(4, CLASSES)  # forgot batch_first=True

    def forward(self, inputs):
        return self.head(self.lstm(inputs)[0].mean(dim=1))


@every_mode
def test_f_m9_a_recurrent_layer_with_time_first_is_refused_by_name(mode):
    with pytest.raises(BatchMismatchError, match=r"DPE018.*'lstm.*3 rows"):
        release_of(TimeFirst(), tensors(3, FEATURES), mode=mode)


@every_mode
def test_f_m9_time_as_long_as_the_batch_is_refused_too(mode):
    with pytest.raises(PrivacyError, match=r"DPE0(01|18)"):
        release_of(TimeFirst(), tensors(6, FEATURES), mode=mode)


# F-M10


@every_mode
def test_f_m10_dropout_is_clipped_with_the_masks_of_its_own_forward_pass(mode):
    class Masked(nn.Module):
        """Dropout whose masks come with the rows, so that a row alone has the mask that it had among the others."""

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
    assert_right(Masked(), data, mode=mode)

    class Dropping(nn.Module):
        def __init__(self):
            super().__init__()
            self.net, self.drop = mlp(), nn.Dropout(0.4)

        def forward(self, inputs):
            return self.net[2](self.drop(torch.tanh(self.net[0](inputs))))

    def step(model, optimizer, inputs, targets):
        torch.manual_seed(7)
        plain_step(model, optimizer, inputs, targets)

    expected = release_of(Dropping(), tensors(), step, mode="hooks")
    found = release_of(Dropping(), tensors(), step, mode=mode)
    assert float((found - expected).norm() / expected.norm()) < 1e-5


# F-M11


class Double(torch.autograd.Function):
    @staticmethod
    def forward(ctx, inputs):
        return 2 * inputs

    @staticmethod
    def backward(ctx, grad):
        return 2 * grad


class OfFunction(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = mlp()

    def forward(self, inputs):
        return self.net[2](Double.apply(self.net[1](self.net[0](inputs))))


@every_mode
def test_f_m11_a_custom_function_between_layers_is_right(mode):
    assert_right(OfFunction(), tensors(), mode=mode)


def penalised(model, optimizer, inputs, targets):
    optimizer.zero_grad()
    inputs.requires_grad_()
    output = model(inputs)
    (grad,) = torch.autograd.grad(output.sum(), inputs, create_graph=True)
    (F.cross_entropy(output, targets) + grad.square().sum(dim=1).mean()).backward()
    optimizer.step()


@every_mode
def test_f_m11_a_gradient_penalty_is_refused_and_releases_nothing(mode):
    engine, model, optimizer, loader = private(mlp(), tensors(), mode=mode, noise_multiplier=1.0)
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(RuntimeError, match=r"once_differentiable|DPE017"):
        penalised(model, optimizer, *next(iter(loader)))
    engine.detach(model)
    assert [charge.kind for charge in engine.ledger.history] == ["void"]
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())


@every_mode
def test_f_m11_complex_and_lazy_parameters_are_refused_by_name(mode):
    class Complex(nn.Module):
        def __init__(self):
            super().__init__()
            self.phase = nn.Parameter(torch.ones(FEATURES, dtype=torch.complex64))

        def forward(self, inputs):
            return (inputs * self.phase).abs()

    for model in (nn.Sequential(Complex(), mlp()), nn.Sequential(nn.LazyLinear(4), nn.Linear(4, CLASSES))):
        with pytest.raises(UnsupportedLayerError, match=r"DPE001.*0 \("):
            private(model, tensors(), mode=mode)


@pytest.mark.parametrize("mode", MODES)
def test_f_m11_sparse_embeddings_are_right(mode):
    class Sparse(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.table, self.head = nn.Embedding(9, 4, sparse=True), nn.Linear(4, CLASSES)

        def forward(self, inputs):
            return self.head(self.table(inputs.long().abs() % 9).mean(dim=1))

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        assert_right(Sparse(), tensors(), mode=mode)


# Reparametrised layers, and layers that look like another


class Quantised(nn.Linear):
    """A layer for training with rounded weights, straight through."""

    def forward(self, inputs):
        weight = self.weight + (torch.round(self.weight * 8) / 8 - self.weight).detach()
        return F.linear(inputs, weight, self.bias)


class Skipping(nn.Sequential):
    def forward(self, inputs):
        for position, layer in enumerate(self):
            inputs = layer(inputs) + inputs if position == 1 else layer(inputs)
        return inputs


VARIANTS = {
    "weight-norm": lambda: parametrizations.weight_norm(nn.Linear(FEATURES, 5)),
    "orthogonal": lambda: parametrizations.orthogonal(nn.Linear(FEATURES, 5)),
    "quantised": lambda: Quantised(FEATURES, 5),
}


@pytest.mark.parametrize("name", VARIANTS)
@every_mode
def test_f_m4_layers_that_compute_their_weight_are_right(mode, name):
    torch.manual_seed(0)
    model = nn.Sequential(VARIANTS[name](), nn.Tanh(), nn.Linear(5, CLASSES))
    if name == "quantised":
        assert influence(model, tensors(), mode=mode) <= 1 + ROUNDING
    else:
        assert_right(model, tensors(), mode=mode)


@every_mode
def test_f_m4_a_container_with_a_way_of_its_own_is_right(mode):
    torch.manual_seed(0)
    assert_right(Skipping(nn.Linear(FEATURES, 5), nn.Tanh(), nn.Linear(5, CLASSES)), tensors(), mode=mode)


# F-M9: tables that all rows share


class Positions(nn.Module):
    """Position embeddings as they are written: ids of shape (1, T) or (T,), taken beside the batch."""

    def __init__(self, ids, tied):
        super().__init__()
        torch.manual_seed(0)
        self.table, self.head = nn.Embedding(9, FEATURES), nn.Linear(FEATURES, CLASSES)
        self.register_buffer("ids", ids)
        self.tied = tied

    def forward(self, inputs):
        hidden = inputs + self.table(self.ids[..., : inputs.shape[1]])
        if self.tied:  # the same table by rows, too
            hidden = hidden + self.table(inputs[..., 0].abs().long() % 9)
        return self.head(torch.tanh(hidden).mean(dim=1))


@pytest.mark.parametrize("tied", [False, True], ids=["alone", "with-rows"])
@pytest.mark.parametrize("ids", [torch.arange(9).unsqueeze(0), torch.arange(9)], ids=["1-T", "T"])
@every_mode
def test_f_m9_position_embeddings_beside_the_batch_are_right(mode, ids, tied):
    plain = Positions(ids, tied)
    data = tensors(8, FEATURES)
    by_row = copy.deepcopy(plain)
    assert_right(plain, data, plain=by_row, mode=mode)
    release_of(Positions(ids, tied), [t[:1] for t in data], mode=mode)
    _, model, *_ = private(Positions(ids, tied), data, mode=mode)
    assert model(data[0][:0]).shape == (0, CLASSES)


@pytest.mark.parametrize("mode", ["auto", "ghost"])
def test_f_m9_as_many_positions_as_rows_are_refused_at_first_and_right_later(mode):
    with pytest.raises(UnsupportedLayerError, match="rows of a batch apart"):
        release_of(Positions(torch.arange(9), False), tensors(6, FEATURES), mode=mode)
    _, model, optimizer, loader = private(Positions(torch.arange(9), False), tensors(5, FEATURES), mode=mode)
    for inputs, targets in loader:
        plain_step(model, optimizer, inputs, targets)
    assert model.table.weight.grad[:5].norm() > 0


# Outputs that hold the loss


@dataclass
class Output:
    loss: torch.Tensor
    logits: torch.Tensor


class Scored(nn.Module):
    def __init__(self, wrap):
        super().__init__()
        self.net, self.wrap = mlp(), wrap

    def forward(self, inputs, targets):
        logits = self.net(inputs)
        return self.wrap(F.cross_entropy(logits, targets), logits)


def keep_on_the_model(loss, logits):
    Kept.loss = loss


class Kept:
    loss = None


OUTPUTS = {
    "tuple": (lambda loss, logits: (loss, logits), lambda output: output[0]),
    "dict": (lambda loss, logits: {"loss": loss, "logits": logits}, lambda output: output["loss"]),
    "scalar": (lambda loss, logits: loss, lambda output: output),
    "dataclass": (Output, lambda output: output.loss),
    "list-in-dataclass": (lambda loss, logits: Output([loss], None), lambda output: output.loss[0]),
    "elsewhere": (keep_on_the_model, lambda output: Kept.loss),
}
UNSEEN = {"elsewhere"}


@pytest.mark.parametrize("name", OUTPUTS)
@every_mode
def test_f_m4_a_loss_inside_the_output_is_right_or_refused(mode, name):
    wrap, loss_of = OUTPUTS[name]

    def step(model, optimizer, inputs, targets):
        optimizer.zero_grad()
        loss_of(model(inputs, targets)).backward()
        optimizer.step()

    truth = truth_of(mlp(), tensors())
    try:
        found = release_of(Scored(wrap), tensors(), step, mode=mode)
    except PrivacyError:
        assert mode == "ghost" and name in UNSEEN
        return
    assert float((found - truth).norm() / truth.norm()) < 1e-5
    assert influence(Scored(wrap), tensors(), step, mode=mode) <= 1 + ROUNDING
