"""Layers whose tensors stay in bfloat16, as on GPUs: products, norms and sums, with the CPU in the place of the GPU."""

import copy

import pytest
import torch
import torch.nn.functional as F
from inside_parts import ClippedPasses
from oracle import relative_error
from torch import nn

from dpengine.capture.record import LayerCall
from dpengine.clipping import Flat
from dpengine.grad_modes import bookkeep, choose_method, rows
from dpengine.grad_modes.method import Method, Way
from dpengine.grad_samplers.linear import SAMPLERS, add_product

ROWS, POSITIONS = 6, 5
WAYS = [Way(Method.KEEP, "direct"), Way(Method.DISCARD, "direct"), Way(Method.GHOST, "gram")]


class Wide(nn.Module):
    """Linear layers whose gradients are too large to be formed with others."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down = nn.Linear(300, 200), nn.Linear(200, 300)
        self.again = nn.Linear(300, 200)

    def forward(self, inputs):
        return self.again(self.down(self.up(inputs).tanh())).mean(1)


@pytest.fixture
def narrow(monkeypatch):
    """Returns what was found of each call, with products of bfloat16 matrices on the CPU."""
    monkeypatch.setattr(rows, "multiplies_bfloat16", lambda device: True)
    found, stays = [], rows.stays_narrow

    def watched(call, samplers):
        found.append(stays(call, samplers))
        return found[-1]

    monkeypatch.setattr(bookkeep, "stays_narrow", watched)
    return found


def sentences():
    torch.manual_seed(1)
    return torch.randn(ROWS, POSITIONS, 300).bfloat16(), torch.randint(0, 200, (ROWS,))


def clipped(model, bound=0.05, batch=None):
    sums = ClippedPasses(model, Flat(bound))
    inputs, targets = batch or sentences()
    with torch.autocast("cpu", torch.bfloat16):
        loss = F.cross_entropy(model(inputs).float(), targets)
    loss.backward()
    found = sums.clip(rows=ROWS)
    return found, {name: total.double() for name, total in sums.totals().items()}


@pytest.mark.parametrize("way", WAYS, ids=str)
def test_sums_and_norms_are_those_of_widened_tensors(way, narrow, monkeypatch):
    monkeypatch.setattr(choose_method, "_fastest", lambda seconds, fits: way if fits(way) else None)
    model = Wide()
    found, sums = clipped(copy.deepcopy(model))
    assert any(narrow)
    monkeypatch.setattr(rows, "multiplies_bfloat16", lambda device: False)
    expected, truth = clipped(model)
    assert relative_error(sums, truth) < 2e-5
    raised = way.method is Method.DISCARD
    assert (1 - 1e-6) < found.largest_norm / expected.largest_norm < (1 + 2e-4 if raised else 1 + 1e-6)


class Tied(nn.Module):
    """A table of words that is also the last layer."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.words, self.head = nn.Embedding(40, 300), nn.Linear(300, 40, bias=False)
        self.head.weight = self.words.weight

    def forward(self, indices):
        return self.head(self.words(indices)).mean(1)


def test_a_tied_parameter_has_the_sums_of_widened_tensors(narrow, monkeypatch):
    words, targets = torch.randint(0, 40, (ROWS, POSITIONS)), torch.randint(0, 40, (ROWS,))
    _, sums = clipped(Tied(), batch=(words, targets))
    assert any(narrow)
    monkeypatch.setattr(rows, "multiplies_bfloat16", lambda device: False)
    _, truth = clipped(Tied(), batch=(words, targets))
    assert relative_error(sums, truth) < 2e-3  # the input of the last layer is rounded to bfloat16, or not


@pytest.mark.parametrize("left_is_narrow", [True, False])
@pytest.mark.parametrize("keep", [0.0, 1.0])
def test_a_product_with_a_split_matrix_is_that_of_float32(left_is_narrow, keep):
    torch.manual_seed(0)
    left, right = torch.randn(7, 40), torch.randn(40, 9)
    left, right = (left.bfloat16(), right) if left_is_narrow else (left, right.bfloat16())
    out = torch.randn(7, 9) if keep else torch.full((7, 9), float("nan"))
    expected = 0.5 * left.double() @ right.double()
    expected = expected + out.double() if keep else expected
    add_product(out, left, right, 0.5, keep)
    bound = 2**-22 * (left.abs().double() @ right.abs().double() + 4)
    assert bool(((out.double() - expected).abs() <= bound).all())


def test_norms_of_gradients_that_are_discarded_are_raised_by_what_tensor_cores_may_lose(narrow, monkeypatch):
    """A product that loses as much as the note allows gives no norm that is too small."""
    monkeypatch.setattr(choose_method, "_fastest", lambda seconds, fits: WAYS[1] if fits(WAYS[1]) else None)

    def lossy(call, out):
        grads, acts = call.grad_output.float(), call.inputs[0].float()
        lost = (POSITIONS / 4 + 8) * 2**-23
        torch.bmm(grads.transpose(1, 2), acts, out=out)
        out -= lost * out.sign() * torch.bmm(grads.abs().transpose(1, 2), acts.abs())

    monkeypatch.setitem(SAMPLERS["weight"].write_grads, "direct", lossy)
    model = Wide()
    found, _ = clipped(copy.deepcopy(model))
    monkeypatch.undo()
    expected, _ = clipped(model)
    assert found.largest_norm >= expected.largest_norm


def test_inputs_have_the_dtype_that_the_layer_multiplied_in():
    """Under autocast a float32 input is rounded before the layer multiplies it, and so it is in the gradient."""
    layer = nn.Linear(3, 2)
    inputs, grads = torch.randn(4, 5, 3), torch.randn(4, 5, 2).bfloat16()
    call = LayerCall(layer, (inputs,), grads, name="layer")
    expected = torch.bmm(grads.float().transpose(1, 2), inputs.bfloat16().float())
    assert torch.equal(SAMPLERS["weight"].grad(call), expected)
