"""Compares nested modules of every kind with a loop over samples."""

import copy
import functools

import pytest
import torch
import torch.nn.functional as F
from case_models import Parts
from inside_parts import ClippedPasses
from oracle import assert_sums_of_loop, clip_by_engine, clip_by_loop, relative_error
from torch import nn
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import checkpoint

from dpengine import register_grad_sampler
from dpengine.clipping import Flat
from dpengine.errors import MissingGradientError, UnsupportedLayerError
from dpengine.grad_samplers.registered import REGISTERED
from dpengine.grad_samplers.rule_check import without_rule_checks

ROWS = 5


def gain():
    """A module with a direct parameter and a layer."""
    return Parts(lambda m, x: m.inner(x) * m.gain, inner=nn.Linear(4, 4), gain=nn.Parameter(torch.ones(4)))


def called_outside_too():
    """Calls a layer inside a unit, and again outside of it."""
    unit = gain()
    run = lambda m, x: m.head(m.again(torch.tanh(m.unit(x))))  # noqa: E731
    return Parts(run, unit=unit, again=unit.inner, head=nn.Linear(4, 3))


def calls_another():
    """A unit that calls a layer outside of it, with which it shares a parameter."""
    layer = nn.Linear(4, 4)
    borrow = lambda m, x: torch.tanh(F.linear(x, m.weight)) + m.others[0](x) * m.weight.mean()  # noqa: E731
    unit = Parts(borrow, weight=layer.weight, others=[layer])
    return Parts(lambda m, x: m.head(m.unit(m.layer(x))), layer=layer, unit=unit, head=nn.Linear(4, 3))


class Several(nn.Module):
    """A unit whose outputs depend on each other and share memory. One is an input."""

    def __init__(self):
        super().__init__()
        self.weight, self.copies = nn.Parameter(torch.eye(4)), False

    def forward(self, inputs):
        hidden = (inputs + 0.0) @ self.weight
        outputs = hidden, {"double": 2 * hidden, "part": hidden[:, :2]}, hidden, inputs
        return pytree.tree_map(torch.clone, outputs) if self.copies else outputs


class WritesToOutputs(nn.Module):
    """Writes in place to what a unit returns."""

    def __init__(self):
        super().__init__()
        self.unit, self.head = Several(), nn.Linear(4, 3)

    def forward(self, inputs):
        hidden, more, same, given = self.unit(inputs * 1.0)
        part = more["part"].mul_(2).sum(dim=1, keepdim=True)
        return self.head(torch.tanh(hidden) + same.mul_(4) + more["double"].mul_(3) + given.mul_(2) + part)


def check(model, mode):
    torch.manual_seed(0)
    model = model.double()
    plain = copy.deepcopy(model)
    if isinstance(plain, WritesToOutputs):
        plain.unit.copies = True
    inputs, targets = torch.randn(ROWS, 4, dtype=torch.float64), torch.arange(ROWS) % 3
    sums = ClippedPasses(model, mode=mode)
    F.cross_entropy(model(inputs), targets).backward()
    assert_sums_of_loop(sums, plain, (inputs,), targets)
    assert sums.is_idle() and all(p.requires_grad for p in model.parameters())


@pytest.mark.parametrize("mode", ["auto", "functorch", "ghost"])
@pytest.mark.parametrize("model", [called_outside_too, calls_another, WritesToOutputs])
def test_units_give_the_sums_of_a_loop(model, mode):
    torch.manual_seed(0)
    check(model(), mode)


class Tied(nn.Module):
    """A layer with a rule, whose child has the same weight."""

    def __init__(self):
        super().__init__()
        self.child = nn.Linear(4, 4)
        self.weight = self.child.weight

    def forward(self, inputs):
        return F.linear(torch.tanh(self.child(inputs)), self.weight) + self.child(inputs)


@pytest.mark.parametrize("mode", ["auto", "ghost"])
def test_a_child_of_a_layer_with_a_rule_is_captured_by_itself(mode):
    torch.manual_seed(0)

    @register_grad_sampler(Tied)
    def rule(layer, inputs, grads):
        (given,) = inputs
        return {layer.weight: torch.einsum("bo,bi->boi", grads, torch.tanh(layer.child(given)))}

    try:
        with without_rule_checks():
            check(nn.Sequential(nn.Linear(4, 4), Tied(), nn.Linear(4, 3)), mode)
    finally:
        REGISTERED.pop(Tied)


@pytest.mark.parametrize("model", [calls_another, WritesToOutputs])
def test_an_exception_in_a_unit_leaves_the_flags_of_its_parameters(model, monkeypatch):
    model = model()
    sums = ClippedPasses(model)

    def interrupt(*_):
        assert not all(p.requires_grad for p in model.parameters())
        raise KeyboardInterrupt

    monkeypatch.setattr(F, "linear", interrupt)
    monkeypatch.setattr(torch.Tensor, "__matmul__", interrupt)
    with pytest.raises(KeyboardInterrupt):
        model(torch.randn(ROWS, 4))
    assert sums.is_idle() and all(p.requires_grad for p in model.parameters())


def gate():
    """A unit with two outputs."""

    def run(m, inputs):
        hidden = inputs @ m.weight
        return hidden, torch.sigmoid(hidden)

    return Parts(run, weight=nn.Parameter(torch.eye(4)))


INNER = {
    "gate": (gate, lambda inner, hidden: torch.mul(*inner(hidden))),
    "lstm": (lambda: nn.LSTM(4, 4, batch_first=True), lambda inner, hidden: sum_of_states(*inner(hidden))),
    "attention": (lambda: nn.MultiheadAttention(4, 2, batch_first=True), lambda inner, h: inner(h, h, h)[0]),
    "encoder": (lambda: nn.TransformerEncoderLayer(4, 2, 8, 0.0, batch_first=True), lambda inner, h: inner(h)),
}


def sum_of_states(output, states):
    return output + sum(state[-1].unsqueeze(1) for state in states)


class Around(nn.Module):
    """Runs an inner module on the output of a layer, and keeps an activation that it does not return."""

    def __init__(self, kind, reentrant=None):
        super().__init__()
        torch.manual_seed(0)
        make, self.run = INNER[kind]
        self.first, self.inner, self.head = nn.Linear(4, 4), make(), nn.Linear(4, 3)
        self.reentrant = reentrant

    def forward(self, inputs):
        hidden = self.first(inputs)
        if self.reentrant is None:
            self.hidden = self.run(self.inner, hidden)
        else:
            self.hidden = checkpoint(self.run, self.inner, hidden, use_reentrant=self.reentrant)
        return self.head(self.hidden.mean(dim=1))


def with_hidden(model):
    """Also returns the activation that a model stores."""
    run = lambda m, x: torch.cat([m.model(x), m.model.hidden.square().mean(dim=(1, 2))[:, None]], dim=1)  # noqa: E731
    return Parts(run, model=model)


def doubled(module, args, output):
    return pytree.tree_map_only(torch.Tensor, lambda tensor: 2 * tensor, output)


def tripled(module, grad_inputs, grad_outputs):
    return pytree.tree_map_only(torch.Tensor, lambda tensor: 3 * tensor, grad_inputs)


SITUATIONS = {
    "eval": lambda model: model.inner.eval(),
    "forward hook": lambda model: model.inner.register_forward_hook(doubled),
    "backward hook": lambda model: model.inner.register_full_backward_hook(tripled),
    "frozen bias": lambda model: [p.requires_grad_(False) for p in model.inner.parameters() if p.dim() == 1],
    "checkpoint": lambda model: setattr(model, "reentrant", False),
    "reentrant": lambda model: setattr(model, "reentrant", True),
}


@pytest.mark.one_in(6, "kind", "situation", others="slow")
@pytest.mark.one_in(3, "kind", "situation")
@pytest.mark.parametrize("mode", ["auto", "hooks", "ghost"])
@pytest.mark.parametrize("situation", SITUATIONS)
@pytest.mark.parametrize("kind", INNER)
def test_hooks_checkpoints_and_losses_of_activations_around_every_kind_of_module(kind, situation, mode):
    model = Around(kind).double()
    plain = copy.deepcopy(model)
    for one in (model, plain):
        SITUATIONS[situation](one)
    plain.reentrant = None
    wrapped = nn.Sequential if mode == "ghost" else with_hidden  # mode ghost starts from what the model returns
    inputs, targets = torch.randn(ROWS, 3, 4, dtype=torch.float64), torch.arange(ROWS) % 3

    def loss(output, targets):
        return F.cross_entropy(output[:, :3], targets) + output[:, 3:].sum() / len(output)

    sums = ClippedPasses(model, mode=mode, probes=False)
    given, expected = inputs.clone().requires_grad_(), inputs.clone().requires_grad_()
    value = loss(wrapped(model)(given), targets)
    if (kind, situation) == ("gate", "forward hook"):  # the output of the hook is not that of the module
        with pytest.raises(UnsupportedLayerError, match="gave a different output"):
            value.backward()
        return
    value.backward()
    prefix = "0." if mode == "ghost" else "model."
    assert_sums_of_loop(sums, wrapped(plain), (inputs,), targets, loss=loss, prefix=prefix)
    loss(wrapped(plain)(expected), targets).backward()
    torch.testing.assert_close(given.grad, expected.grad)


class Stores(nn.Module):
    """A unit that stores an intermediate activation and its output."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 4))
        self.hidden = self.output = None

    def forward(self, inputs):
        self.hidden = torch.tanh(inputs @ self.weight)
        self.output = torch.sin(self.hidden)
        return self.output


@pytest.mark.parametrize("kept", ["hidden", "output"])
def test_a_loss_of_a_tensor_that_a_layer_stored_in_an_attribute_is_rejected(kept):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), Stores(), nn.Linear(4, 3)).double()
    plain, sums = copy.deepcopy(model), ClippedPasses(model)
    inputs, targets = torch.randn(ROWS, 4, dtype=torch.float64), torch.arange(ROWS) % 3
    F.cross_entropy(model(inputs), targets).backward()  # does not use it
    assert_sums_of_loop(sums, plain, (inputs,), targets)
    loss = F.cross_entropy(model(inputs), targets) + getattr(model[1], kept).square().sum(1).mean()
    with pytest.raises(UnsupportedLayerError, match=f"layer '1' stored in its attribute '{kept}'"):
        loss.backward()
    F.cross_entropy(model(inputs), targets).backward()  # the pass with the error is forgotten
    assert sums.clip(rows=ROWS).samples == ROWS


class StoresHarmlessly(nn.Module):
    """Stores its input, a sparse tensor, and in eval mode what it computes."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 4))
        self.inputs = self.sparse = self.saliency = None

    def forward(self, inputs):
        output = torch.sin(inputs @ self.weight)
        self.inputs, self.sparse = inputs, output.to_sparse()
        if not self.training:
            self.saliency = output.sum()
        return output


def test_tensors_without_a_part_of_the_gradient_may_be_stored_in_attributes():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), StoresHarmlessly(), nn.Linear(4, 3)).double()
    plain, sums = copy.deepcopy(model), ClippedPasses(model, Flat(1e9))
    inputs, targets = torch.randn(ROWS, 4, dtype=torch.float64), torch.arange(ROWS) % 3
    model.eval()(inputs)
    model.train()
    for one, reduction in ((model, torch.mean), (plain, torch.sum)):
        losses = F.cross_entropy(one(inputs), targets, reduction="none") + one[1].inputs.square().sum(1)
        reduction(losses).backward()
    sums.clip(rows=ROWS)
    expected = {name: parameter.grad for name, parameter in plain.named_parameters()}
    assert relative_error(sums.totals(), expected) < 1e-9
    model[1].saliency.backward()  # of the pass in eval mode


OPERATIONS = {
    "product": lambda x, gain: x * gain,
    "sum": lambda x, gain: x + gain,
    "sum_of_exponential": lambda x, gain: x + gain.exp(),
    "matrix_product": lambda x, gain: x + x @ gain.unsqueeze(1),
    "einsum": lambda x, gain: torch.einsum("bi,i->bi", x, gain),
}


def recomputes(operation, *, reentrant):
    def run(m, inputs):
        return checkpoint(lambda x: m.layer(OPERATIONS[operation](x, m.gain)), inputs, use_reentrant=m.reentrant)

    part = Parts(run, layer=nn.Linear(4, 4), gain=nn.Parameter(torch.ones(4)), reentrant=reentrant)
    return nn.Sequential(nn.Linear(4, 4), part).double(), (torch.randn(ROWS, 4).double(),)


@pytest.mark.parametrize("mode", ["auto", "whole_model"])
@pytest.mark.parametrize("reentrant", [False, True], ids=["", "reentrant"])
@pytest.mark.parametrize("operation", OPERATIONS)
def test_a_parameter_in_a_checkpoint_is_clipped(operation, reentrant, mode):
    model, inputs = recomputes(operation, reentrant=reentrant)
    found, _ = clip_by_engine(model, inputs, lambda output: output.square().sum(), mode=mode)
    model[1].reentrant = False  # the loop cannot run reentrant checkpoints
    truth, _ = clip_by_loop(model, inputs, lambda output, _: output.square().sum(), ROWS)
    assert relative_error(found, truth) < 1e-6


@pytest.mark.parametrize(
    ("operation", "reentrant", "error", "reason"),
    [
        ("product", False, UnsupportedLayerError, r"'1\.gain' is used by mul in a checkpoint"),
        ("sum_of_exponential", False, UnsupportedLayerError, r"'1\.gain' is used by add in a checkpoint"),
        ("einsum", False, UnsupportedLayerError, r"'1\.gain' is used by einsum in a checkpoint"),
        ("sum", True, MissingGradientError, r"'1\.gain' directly"),
    ],
)
def test_a_parameter_in_a_checkpoint_names_a_mode_that_accepts_it(operation, reentrant, error, reason):
    model, inputs = recomputes(operation, reentrant=reentrant)
    with pytest.raises(error, match=rf"{reason}.*'auto' or, if that is in use, 'whole_model'"):
        clip_by_engine(model, inputs, lambda output: output.square().sum(), mode="hooks")


def test_a_parameter_is_clipped_under_any_hooks_of_saved_tensors():
    model, inputs = nn.Sequential(nn.Linear(4, 4), gain()).double(), (torch.randn(ROWS, 4).double(),)
    truth, _ = clip_by_loop(model, inputs, lambda output, _: output.square().sum(), ROWS)
    pack = functools.partial(torch.clone, memory_format=torch.preserve_format)  # has no name
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda packed: packed):
        found, _ = clip_by_engine(model, inputs, lambda output: output.square().sum(), mode="hooks")
    assert relative_error(found, truth) < 1e-6


def test_a_sum_in_a_checkpoint_needs_no_unit():
    model, inputs = recomputes("sum", reentrant=False)
    found, _ = clip_by_engine(model, inputs, lambda output: output.square().sum(), mode="hooks")
    truth, _ = clip_by_loop(model, inputs, lambda output, _: output.square().sum(), ROWS)
    assert relative_error(found, truth) < 1e-6
