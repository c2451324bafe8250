"""A weight shared by an embedding and a linear layer: the norm of the sum of both uses, cross terms included."""

import pytest
import torch
from torch import nn

from dpengine.capture import LayerCall, Use
from dpengine.grad_modes import choose_method
from dpengine.grad_modes.choose_method import MethodTable, time_algorithms
from dpengine.grad_modes.entry import Entry
from dpengine.grad_modes.method import Algorithm, Method
from dpengine.grad_modes.scratch import Scratch
from dpengine.grad_samplers import tied
from dpengine.grad_samplers.table import BUILTIN
from dpengine.grad_samplers.tied import tied_cost, tied_norm

VOCABULARY, WIDTH, ROWS = 11, 5, 4
WORDS, HEAD = BUILTIN[nn.Embedding]["weight"], BUILTIN[nn.Linear]["weight"]


def calls_of(positions=6, *, padding=None, dtype=torch.float64, pooled=False, opposite=False):
    torch.manual_seed(0)
    words, head = nn.Embedding(VOCABULARY, WIDTH, padding_idx=padding), nn.Linear(WIDTH, VOCABULARY, bias=False)
    words.to(dtype), head.to(dtype)
    head.weight = words.weight
    ids = torch.randint(0, VOCABULARY, (ROWS, positions))
    by_words = torch.randn(ROWS, positions, WIDTH, dtype=dtype)
    shape = (ROWS,) if pooled else (ROWS, positions + 2)  # the linear layer may have other positions, or none
    inputs, by_head = torch.randn(*shape, WIDTH, dtype=dtype), torch.randn(*shape, VOCABULARY, dtype=dtype)
    if opposite:  # the uses cancel except for a relative difference of 1e-5
        ids[:, 1:] = ids[:, :1]
        by_words = inputs[:, :positions] * (1 + 1e-5 * torch.rand(ROWS, positions, 1, dtype=dtype))
        by_head[:] = 0
        by_head.scatter_(2, ids[:, :1].unsqueeze(1).expand(-1, positions, -1), -1.0)
    return [(LayerCall(words, (ids,), by_words, name="words"), WORDS), (LayerCall(head, (inputs,), by_head), HEAD)]


def truth_of(calls):
    total = 0
    for call, sampler in calls:
        total = total + sampler.grad(call.replace(grad_output=call.grad_output.double()) if sampler is WORDS else call)
    return total.double().flatten(1).square().sum(dim=1)


@pytest.mark.parametrize("order", [1, -1], ids=["words-first", "head-first"])
@pytest.mark.parametrize("workspace", [1, 10**9])
@pytest.mark.parametrize("padding", [None, 3])
@pytest.mark.parametrize("pooled", [False, True])
def test_the_norm_of_a_tied_weight_includes_cross_terms(monkeypatch, pooled, padding, workspace, order):
    monkeypatch.setattr(tied, "WORKSPACE_BYTES", workspace)
    calls = calls_of(pooled=pooled, padding=padding)
    norm = tied_norm(calls[::order])
    torch.testing.assert_close(norm.sq_norm_B, truth_of(calls), rtol=1e-10, atol=0)
    alone = sum(sampler.sq_norm(call).double() for call, sampler in calls)
    assert ((norm.sq_norm_B - alone).abs() > 1e-3 * alone).any()  # the cross terms count


def test_the_norm_of_float32_uses_that_cancel_is_not_underestimated():
    calls = calls_of(positions=6, dtype=torch.float32, opposite=True)
    calls[1] = (
        calls[1][0].replace(inputs=(calls[1][0].inputs[0][:, :6],), grad_output=calls[1][0].grad_output[:, :6]),
        HEAD,
    )
    wide = [(c.replace(inputs=tuple(t.double() if t.is_floating_point() else t for t in c.inputs),
                       grad_output=c.grad_output.double()), s) for c, s in calls]  # fmt: skip
    entry = Entry(Use(calls[0][0].layer.weight, "words.weight"), list(calls))
    found = entry.sq_norm(Algorithm(Method.GHOST, "gram"), ROWS, None)
    assert (found.double() >= truth_of(wide) * (1 - 1e-6)).all()


def test_the_rounding_scale_includes_a_linear_layer_with_one_position():
    calls = calls_of(pooled=True)
    (head, _), (words, _) = calls[1], calls[0]
    alone_B = head.inputs[0].norm(dim=1) * head.grad_output.norm(dim=1)
    assert (tied_norm(calls).rounding_scale_B >= (WORDS.rounding_scale(words) + alone_B) * (1 - 1e-9)).all()


def test_only_an_embedding_tied_to_a_linear_layer_has_a_tied_cost():
    calls = calls_of()
    assert tied_cost(calls) is not None
    assert tied_cost(calls[:1]) is None and tied_cost([calls[0], calls[0]]) is None
    bilinear = BUILTIN[nn.Bilinear]["weight"]
    assert tied_cost([calls[0], (calls[1][0], bilinear)]) is None


def test_algorithms_of_a_tied_weight_are_timed_and_do_not_keep_its_gradient(monkeypatch):
    calls = calls_of(dtype=torch.float32)
    entry = Entry(Use(calls[0][0].layer.weight, "words.weight"), list(calls))
    algorithms = [Algorithm(Method.GHOST, "gram"), Algorithm(Method.DISCARD, "direct")]
    assert time_algorithms(entry, algorithms, ROWS).keys() == {"ghost: gram", "discard: direct"}
    timed = []
    monkeypatch.setattr(choose_method, "_MIN_TIMED", 0.0)
    monkeypatch.setattr(
        choose_method,
        "time_algorithms",
        lambda _, algorithms, rows, copies: timed.extend(algorithms) or {str(a): 1.0 for a in algorithms},
    )
    (choice,) = MethodTable().plan([entry], ROWS).values()
    assert choice.algorithm.method is not Method.KEEP and choice.kept_bytes == 0
    assert set(timed) == set(algorithms)


def test_output_gradients_at_the_padding_do_not_change_norms():
    """These gradients are discarded. They may be large: a normalization of zeros divides by sqrt(eps)."""
    (words, sampler), _ = calls_of(padding=3, dtype=torch.float32)
    at_padding = (words.inputs[0] == 3).unsqueeze(2)
    assert at_padding.any()
    large = words.replace(grad_output=words.grad_output.masked_fill(at_padding, 1e12))
    assert torch.equal(sampler.rounding_scale(large), sampler.rounding_scale(words))
    entry = lambda call: Entry(Use(call.layer.weight, "weight"), [(call, sampler)])  # noqa: E731
    algorithm, scratch = Algorithm(Method.GHOST, "shortcut"), Scratch()
    norms_B = [entry(call).sq_norm(algorithm, ROWS, scratch) for call in (words, large)]
    torch.testing.assert_close(norms_B[1], norms_B[0], rtol=1e-12, atol=0)
