"""Weights that are used repeatedly or outside their layer, computed, adapted or unused."""

import copy

import pytest
import torch
import torch.nn.functional as F
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
)
from torch import nn
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

from dpengine.errors import MissingGradientError, PrivacyError, UnsupportedLayerError

pytestmark = pytest.mark.filterwarnings("ignore:.*DPE012")
every_mode = pytest.mark.parametrize("mode", MODES)


# A parameter is tied, used twice or recurrent


class ModelWithReusedLayer(nn.Module):
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
    """One matrix as an embedding, a linear layer, and transposed in a layer of another class."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.table, self.mix, self.out = nn.Embedding(4, 4), nn.Linear(4, 4), nn.Linear(4, CLASSES)
        self.mix.weight = self.table.weight

    def forward(self, inputs):
        return self.out(torch.tanh(self.mix(self.table((inputs * 7).long() % 4).mean(dim=1))))


@model_of(lambda: {"tower": mlp(), "head": nn.Linear(CLASSES, CLASSES)})
def siamese(m, inputs):
    return m.head(m.tower(inputs) * m.tower(inputs.flip(1)))


@model_of(lambda: {"cell": nn.GRUCell(2, 3), "head": nn.Linear(3, CLASSES)})
def unrolled(m, inputs):
    state = None
    for part in inputs.split(2, dim=1):
        state = m.cell(part, state)
    return m.head(state)


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


@pytest.mark.one_in(6, "mode", "make", others="slow")
@pytest.mark.one_in(3, "mode", "make")
@pytest.mark.parametrize("make", [ModelWithReusedLayer, TiedAcrossKinds, siamese, unrolled, TiedInBlocks])
@every_mode
@pytest.mark.hazard("M4")
def test_the_norm_is_that_of_the_sum_over_all_uses(mode, make):
    assert_right(make(), tensors(), mode=mode)


# Reparametrized layers, and layers that look like another


class QuantizedLinear(nn.Linear):
    """Linear layer with rounded weights and a straight-through gradient."""

    def forward(self, inputs):
        weight = self.weight + (torch.round(self.weight * 8) / 8 - self.weight).detach()
        return F.linear(inputs, weight, self.bias)


class ResidualSequential(nn.Sequential):
    def forward(self, inputs):
        for position, layer in enumerate(self):
            inputs = layer(inputs) + inputs if position == 1 else layer(inputs)
        return inputs


VARIANTS = {
    "weight-norm": lambda: parametrizations.weight_norm(nn.Linear(FEATURES, 5)),
    "orthogonal": lambda: parametrizations.orthogonal(nn.Linear(FEATURES, 5)),
    "quantized": lambda: QuantizedLinear(FEATURES, 5),
}


@pytest.mark.one_in(4, "mode", "name", others="slow")
@pytest.mark.one_in(2, "mode", "name")
@pytest.mark.parametrize("name", VARIANTS)
@every_mode
@pytest.mark.hazard("M4")
def test_layers_that_compute_their_weight_are_exact(mode, name):
    torch.manual_seed(0)
    model = nn.Sequential(VARIANTS[name](), nn.Tanh(), nn.Linear(5, CLASSES))
    if name == "quantized":
        assert influence(model, tensors(), mode=mode) <= 1 + ROUNDING
    else:
        assert_right(model, tensors(), mode=mode)


@pytest.mark.one_in(2, "mode", others="slow")
@every_mode
@pytest.mark.hazard("M4")
def test_a_container_with_its_own_forward_is_exact(mode):
    torch.manual_seed(0)
    assert_right(ResidualSequential(nn.Linear(FEATURES, 5), nn.Tanh(), nn.Linear(5, CLASSES)), tensors(), mode=mode)


# A weight is used outside its layer


class FunctionalModel(nn.Module):
    def __init__(self, use):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(FEATURES, FEATURES), nn.Linear(FEATURES, CLASSES)
        self.use = use

    def forward(self, inputs):
        return self.use(self, inputs)


USES = {
    "in-addition-to-its-layer": lambda m, x: m.second(F.linear(m.first(x), m.first.weight)),
    "bias-alone": lambda m, x: m.second(m.first(x) + m.first.bias),
    "instead-of-its-layer": lambda m, x: F.linear(m.first(x), m.second.weight, m.second.bias),
    "as-a-penalty": lambda m, x: m.second(m.first(x)) + m.first.weight.square().sum(),
}


@pytest.mark.parametrize("use", USES)
@pytest.mark.filterwarnings("ignore:.*DPE028")
@pytest.mark.hazard("M5")
def test_a_weight_used_outside_its_layer_is_exact_in_the_default_mode(use):
    assert_right(FunctionalModel(USES[use]), tensors())


@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize("mode", [mode for mode in MODES if mode != "auto"])
@pytest.mark.hazard("M5")
def test_a_weight_used_outside_its_layer_is_rejected_and_charged(mode, use):
    engine, model, optimizer, loader = private(FunctionalModel(USES[use]), tensors(), mode=mode, noise_multiplier=1.0)
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(MissingGradientError, match=r"DPE002.*'(first|second)\.(weight|bias)'"):
        plain_step(model, optimizer, *next(iter(loader)))
    assert [charge.kind for charge in engine.ledger.history] == ["void"]
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())


@pytest.mark.one_in(2, "mode", others="slow")
@pytest.mark.parametrize("unfrozen", ["first", "second"])
@every_mode
def test_a_weight_that_is_unfrozen_later_and_used_outside_its_layer_is_rejected(mode, unfrozen):
    model = FunctionalModel(USES["in-addition-to-its-layer"] if unfrozen == "first" else USES["instead-of-its-layer"])
    getattr(model, unfrozen).requires_grad_(False)
    engine, model, optimizer, loader = private(model, tensors(), mode=mode, make_optimizer=_every_parameter_of(model))
    plain_step(model, optimizer, *next(iter(loader)))  # the default mode examines the first batch
    getattr(model, unfrozen).requires_grad_(True)
    with pytest.raises(MissingGradientError, match=rf"DPE002.*'{unfrozen}\.weight'.*outside the forward"):
        plain_step(model, optimizer, *next(iter(loader)))
    assert [charge.kind for charge in engine.ledger.history][-1] == "void"


def _every_parameter_of(model):
    return lambda trainable: torch.optim.SGD(model.parameters(), lr=1.0)


# Activations are checkpointed


class CheckpointedModel(nn.Module):
    def __init__(self, reentrant):
        super().__init__()
        self.net, self.reentrant = mlp(), reentrant

    def forward(self, inputs):
        return self.net(inputs) if self.reentrant is None else self.checkpointed(inputs)

    def checkpointed(self, inputs):
        return checkpoint(self.net, inputs, use_reentrant=self.reentrant)


@pytest.mark.one_in(4, "mode", "reentrant", others="slow")
@pytest.mark.one_in(2, "mode", "reentrant")
@pytest.mark.parametrize("reentrant", [False, True])
@every_mode
@pytest.mark.hazard("M7")
def test_checkpointed_blocks_with_tied_weights_are_exact(mode, reentrant):
    assert_right(TiedInBlocks(reentrant), tensors(), plain=TiedInBlocks(), mode=mode)


@pytest.mark.one_in(2, "mode", others="slow")
@every_mode
@pytest.mark.hazard("M7")
def test_a_model_in_one_checkpoint_is_exact(mode):
    assert_right(CheckpointedModel(False), tensors(), plain=CheckpointedModel(None), mode=mode)


@every_mode
@pytest.mark.hazard("M7")
def test_a_reentrant_checkpoint_without_input_gradients_is_rejected(mode):
    with pytest.raises(RuntimeError, match=r"does not require grad|DPE002"):
        release_of(CheckpointedModel(True), tensors(), mode=mode)


def checkpointed_step(reentrant):
    def step(model, optimizer, inputs, targets):
        optimizer.zero_grad()
        output = checkpoint(model, inputs.requires_grad_(), use_reentrant=reentrant)
        F.cross_entropy(output, targets).backward()
        optimizer.step()

    return step


@pytest.mark.one_in(4, "reentrant", "mode", others="slow")
@pytest.mark.one_in(2, "reentrant", "mode")
@pytest.mark.parametrize("reentrant", [False, True])
@every_mode
@pytest.mark.hazard("M7")
def test_a_checkpoint_around_the_model_is_exact_or_rejected(mode, reentrant):
    try:
        assert_right(mlp(), tensors(), checkpointed_step(reentrant), mode=mode)
    except PrivacyError:
        assert mode == "ghost"


# Parameters are frozen, unused or low-rank adapters


class LowRank(nn.Module):
    """Low-rank adapter of a frozen layer, built from modules or from parameters."""

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


def adapted_model(how):
    torch.manual_seed(2)
    return nn.Sequential(LowRank(nn.Linear(FEATURES, 5), how), nn.Tanh(), nn.Linear(5, CLASSES))


@pytest.mark.one_in(6, "mode", "how", others="slow")
@pytest.mark.one_in(3, "mode", "how")
@pytest.mark.parametrize("how", ["modules", "linear", "matmul", "merged"])
@every_mode
@pytest.mark.hazard("M8")
def test_adapters_are_exact_or_rejected_by_name(mode, how):
    try:
        assert_right(adapted_model(how), tensors(), mode=mode)
    except UnsupportedLayerError as error:
        assert how in {"matmul", "merged"} and mode != "functorch"
        assert "'0.down'" in str(error) or "'0.up'" in str(error)


@model_of(lambda: {"used": nn.Linear(FEATURES, CLASSES), "spare": nn.Linear(FEATURES, 2)})
def spare_model(m, inputs):
    return m.used(inputs)


@pytest.mark.one_in(2, "mode", others="slow")
@every_mode
@pytest.mark.hazard("M8")
def test_an_unused_parameter_is_rejected_or_gets_noise(mode):
    with pytest.raises(MissingGradientError, match=r"DPE002.*'spare\.weight'"):
        release_of(spare_model(), tensors(), mode=mode)
    _, model, optimizer, loader = private(
        spare_model(), tensors(), mode=mode, unused_parameters="zero", noise_multiplier=1.0, max_grad_norm=3.0
    )
    plain_step(model, optimizer, *next(iter(loader)))
    assert all(0.3 < float(p.grad.std()) / 3 < 3 for p in model.spare.parameters() if p.numel() > 2)
    model.spare.requires_grad_(False)
    model.used.bias.requires_grad_(False)
    optimizer.zero_grad()
    plain_step(model, optimizer, *next(iter(loader)))
    assert [name for name, p in model.named_parameters() if p.grad is not None] == ["used.weight"]
