"""Adversarial samples for which a norm and a sum would differ if they were rounded differently."""

import functools
import itertools

import pytest
import torch
from inside_parts import ClippedPasses
from torch import nn

from dpengine.capture import LayerCall, Use
from dpengine.clipping.flat import Flat
from dpengine.errors import UnsupportedLayerError
from dpengine.grad_modes import entry
from dpengine.grad_modes.choose_method import MethodTable
from dpengine.grad_modes.method import Algorithm, Method
from dpengine.grad_samplers.table import BUILTIN

ROUNDING = 1e-5


def clip_model(model, loss, *, mode="auto", bound=1.0, **settings):
    """Returns the norm of the clipped sum relative to the clipping norm, and the sum as a vector."""
    passes = ClippedPasses(model, Flat(bound), mode=mode, loss_reduction="sum", **settings)
    try:
        loss(model).backward()
        passes.clip()
        total = torch.cat([view.double().flatten() for view in passes.totals().values()])
    finally:
        passes.detach()
    return float(total.norm()) / bound, total


@functools.cache
def order_dependent_numbers(positions=9, columns=7):
    """Returns numbers ``(T,)`` whose rounded sum over positions depends on the batch size."""
    torch.manual_seed(0)
    best, kept = 0.0, None
    for _ in range(4000):
        parts = torch.randn(positions, columns) * 4
        i, j = torch.randperm(positions)[:2].tolist()
        large = 2.0 ** float(torch.empty(1).uniform_(24, 28))
        parts[i], parts[j] = large, -large
        few = parts.unsqueeze(1).expand(positions, 1, columns).contiguous().transpose(0, 1).sum(dim=1)[0]
        many = parts.repeat(1, 32).view(positions, 1, -1).transpose(0, 1).sum(dim=1)[0, :columns]
        ratio = few.abs() / many.abs().clamp(min=0.01)
        if float(ratio.max()) > best:
            best, kept = float(ratio.max()), parts[:, int(ratio.argmax())].clone()
    return kept


@pytest.mark.one_in(3, "mode", "kind", others="slow")
@pytest.mark.parametrize(("mode", "budget"), [("ghost", 0), ("auto", 0), ("auto", 2**29)])
@pytest.mark.parametrize("kind", ["Linear", "LayerNorm"])
@pytest.mark.hazard("U2")
def test_norms_and_sums_round_per_sample_gradients_alike(kind, mode, budget, monkeypatch):
    rows, positions, width = 87, 9, 1001
    monkeypatch.setattr(entry, "CHUNK_BYTES", 31 * 4 * width)  # fewer samples than the batch has
    layer = nn.Linear(1, width) if kind == "Linear" else nn.LayerNorm(width)
    layer.weight.requires_grad_(False)
    grads = torch.zeros(positions, rows, width)
    grads[:, -1, -7:-1] = order_dependent_numbers().view(positions, 1)
    inputs = torch.zeros(positions, rows, layer.weight.shape[-1])
    moved, _ = clip_model(
        layer,
        lambda m: (m(inputs) * grads).sum(),
        mode=mode,
        bound=0.01,
        batch_first=False,
        methods=MethodTable(keep_budget=budget),
    )
    assert moved <= 1 + ROUNDING


@pytest.mark.parametrize("mode", ["auto", "ghost"])
@pytest.mark.parametrize("rows", [9, 257])
@pytest.mark.hazard("U2")
def test_cancellation_in_a_float64_sample_does_not_round_other_samples_away(rows, mode):
    torch.manual_seed(0)
    model = nn.Linear(4, 4, bias=False).double()
    nn.init.zeros_(model.weight)
    inputs, targets = torch.randn(rows, 3, 4).double(), torch.ones(rows, 3, 4).double() * 5
    inputs[-1] = 0
    crafted, crafted_targets = inputs.clone(), targets.clone()
    crafted[-1, :2], crafted_targets[-1] = 1e12, torch.tensor([[1e12], [-1e12], [0.0]]).expand(3, 4)
    loss = lambda x, y: lambda m: ((m(x) - y) ** 2).sum() / 2  # noqa: E731
    _, without = clip_model(model, loss(inputs[:-1], targets[:-1]), mode=mode)
    _, with_it = clip_model(model, loss(crafted, crafted_targets), mode=mode)
    assert float((with_it - without).norm()) <= 1e-3


@pytest.mark.hazard("U2")
def test_the_norm_of_a_tied_float64_weight_is_not_too_low_under_cancellation():
    words, head = nn.Embedding(5, 3).double(), nn.Linear(3, 5, bias=False).double()
    head.weight = words.weight
    for seed in range(50):
        torch.manual_seed(seed)
        acts, by_head = torch.randn(1, 1, 3).double() * 1e10, torch.zeros(1, 1, 5).double()
        by_head[0, 0, 2] = 1e10 * (1 + torch.rand(()))
        by_words = -(1 + 2e-9) * by_head[0, 0, 2] * acts
        true = float((by_head[0, 0, 2] * acts + by_words).norm())
        calls = [
            (LayerCall(words, (torch.tensor([[2]]),), by_words), BUILTIN[nn.Embedding]["weight"]),
            (LayerCall(head, (acts,), by_head), BUILTIN[nn.Linear]["weight"]),
        ]
        both = entry.Entry(Use(words.weight, "words.weight"), calls)
        assert float(both.sq_norm(Algorithm(Method.GHOST, "gram"), 1, None)) >= true**2


@pytest.mark.hazard("U1")
def test_a_subnormal_clipping_factor_is_not_rounded_up():
    for k in range(50):
        model, scale = nn.Linear(4, 1, bias=False), 10 ** (36.5 + 0.035 * k)
        worst, total = clip_model(model, lambda m: m(torch.ones(1, 4)).sum() * scale, bound=1e-6)  # noqa: B023 - called at once
        assert worst <= 1 + ROUNDING and bool(total.isfinite().all())


@pytest.mark.hazard("C1")
def test_ghost_rejects_a_layer_whose_input_differs_in_the_second_forward_pass():
    count = itertools.count()  # state outside the model, which the engine cannot restore

    class CountingModel(nn.Module):
        """Scales the layer's input from the second forward pass on, without changing the output."""

        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(4, 2, bias=False)

        def forward(self, inputs):
            hidden = self.layer(inputs * (1000.0 if next(count) else 1.0))
            return hidden - hidden.detach() + inputs[:, :2]

    torch.manual_seed(0)
    inputs = torch.randn(2, 4)
    with pytest.raises(UnsupportedLayerError, match=r"DPE001.*Layer 'layer' had another input"):
        clip_model(CountingModel(), lambda m: m(inputs).sum(), mode="ghost", bound=0.1)


def test_crafted_cancellation_exceeds_the_clipping_norm_by_at_most_one_32nd():
    """Float32 rounding exceeds the norm by 0.8 % here; the documented bound is 1 / 32."""
    length = 2048
    parts = torch.full((length,), 1.51)
    parts[0], parts[-1], parts[1] = 6072064.534690503, -6072064.534690503, 53453.3
    layer = nn.Linear(1, 1, bias=False)
    inputs = parts.view(1, length, 1)
    moved, _ = clip_model(layer, lambda m: m(inputs).sum(), mode="ghost", methods=MethodTable(timed=False))
    assert moved <= 1 + 1 / 32
