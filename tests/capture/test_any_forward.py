"""Calls of modules inside each other, and outputs that depend on each other, against a loop over samples."""

import copy

import pytest
import torch
import torch.nn.functional as F
from inside_parts import ClippedPasses
from oracle import clip_by_loop, relative_error
from torch import nn
from torch.utils import _pytree as pytree

from dpengine import register_grad_sampler
from dpengine.grad_samplers.registered import REGISTERED
from dpengine.grad_samplers.rule_check import without_rule_checks

ROWS = 5


class Gain(nn.Module):
    """A module with a parameter of its own and a layer."""

    def __init__(self):
        super().__init__()
        self.inner, self.gain = nn.Linear(4, 4), nn.Parameter(torch.ones(4))

    def forward(self, inputs):
        return self.inner(inputs) * self.gain


class CalledOutsideToo(nn.Module):
    """Calls a layer inside a unit, and once more by itself."""

    def __init__(self):
        super().__init__()
        self.unit = Gain()
        self.again, self.head = self.unit.inner, nn.Linear(4, 3)

    def forward(self, inputs):
        return self.head(self.again(torch.tanh(self.unit(inputs))))


class Borrows(nn.Module):
    """Uses its weight, and calls a layer that has the same one and is not its child."""

    def __init__(self, other):
        super().__init__()
        self.weight, self.others = other.weight, [other]

    def forward(self, inputs):
        return torch.tanh(F.linear(inputs, self.weight)) + self.others[0](inputs) * self.weight.mean()


class CallsAnother(nn.Module):
    """A unit that calls a layer outside of it, with which it shares a parameter."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.unit, self.head = Borrows(self.layer), nn.Linear(4, 3)

    def forward(self, inputs):
        return self.head(self.unit(self.layer(inputs)))


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
    sums.clip(rows=ROWS)
    assert sums.is_idle() and all(p.requires_grad for p in model.parameters())
    found = {name: total.double() for name, total in sums.totals().items()}
    truth, _ = clip_by_loop(plain, (inputs,), lambda output, i: F.cross_entropy(output, targets[i]), ROWS)
    assert relative_error(found, truth) < 1e-9


@pytest.mark.parametrize("mode", ["auto", "functorch", "ghost"])
@pytest.mark.parametrize("model", [CalledOutsideToo, CallsAnother, WritesToOutputs])
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


@pytest.mark.parametrize("model", [CallsAnother, WritesToOutputs])
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
