"""Every method gives the same norms and sums, and the choice keeps to its budget."""

import pytest
import torch
from torch import nn

from dpengine.capture import LayerCall, Use
from dpengine.grad_samplers import BUILTIN
from dpengine.gradients.bookkeep import Bookkeep
from dpengine.gradients.choose_method import Method, Situation, by_shape
from dpengine.gradients.flat_buffer import FlatBuffer

LINEAR = BUILTIN[nn.Linear]


def call_of(rows, time, inside, outside):
    layer = nn.Linear(inside, outside)
    return LayerCall(layer, (torch.randn(rows, time, inside),), torch.randn(rows, time, outside), name="layer")


@pytest.mark.parametrize("method", Method)
def test_every_method_gives_the_same_norms_and_sums(method):
    torch.manual_seed(0)
    call = call_of(5, 7, 6, 4)
    weight = call.layer.weight
    found = Bookkeep(choose=lambda situation: method)
    found.receive(call, {"weight": Use(weight, "layer.weight")}, LINEAR)
    per_row = torch.einsum("bto,bti->boi", call.grad_output.double(), call.inputs[0].double())
    norms = found.sq_norms({weight: 0}, 1, 2.0)[:, 0]
    torch.testing.assert_close(norms, 4 * per_row.flatten(1).norm(dim=1) ** 2, rtol=1e-5, atol=0)
    factors = torch.rand(5, 1)
    buffer = FlatBuffer([weight])
    found.add_sums({weight: 0}, factors, buffer)
    truth = torch.einsum("b,boi->oi", factors[:, 0].double(), per_row)
    torch.testing.assert_close(dict(buffer)[weight].double(), truth, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("time", "width", "left", "expected"),
    [
        (1, 64, 10**9, Method.GHOST),  # one position: the norm is a product of two norms
        (16, 256, 10**9, Method.GHOST),  # few positions, many features
        (200, 256, 10**9, Method.KEEP),  # many positions: the Gram costs more than the gradient
        (200, 256, 0, Method.DISCARD),  # the same, and no memory to keep it
        (60, 256, 10**9, Method.KEEP),  # the Gram costs fewer operations, but keeping saves the weighted product
        (60, 256, 0, Method.GHOST),
    ],
)
def test_the_choice_follows_shape_and_budget(time, width, left, expected):
    call = call_of(2, time, width, width)
    situation = Situation(LINEAR["weight"], call, 2 * width * width * 4, left, in_rows=True)
    assert by_shape(situation) is expected


def test_the_choice_does_not_look_at_data():
    call = call_of(2, 16, 64, 64)
    other = call.replace(inputs=(call.inputs[0] * float("nan"),), grad_output=call.grad_output * 1e30)
    chosen = {by_shape(Situation(LINEAR["weight"], one, 1, 10**9, in_rows=True)) for one in (call, other)}
    assert len(chosen) == 1


def test_what_is_kept_stays_within_the_budget():
    calls = [call_of(2, 200, 64, 64) for _ in range(4)]
    one = 2 * 64 * 64 * 4
    found = Bookkeep(keep_budget=2 * one)
    weights = [call.layer.weight for call in calls]
    for i, call in enumerate(calls):
        found.receive(call.replace(name=f"layer{i}"), {"weight": Use(weights[i], f"layer{i}.weight")}, LINEAR)
    found.sq_norms(dict.fromkeys(weights, 0), 1, 1.0)
    assert sum(grad.numel() * 4 for grad in found.kept().values()) <= 2 * one
    assert len(found.kept()) == 2
