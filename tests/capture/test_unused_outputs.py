"""Layers whose outputs do not affect the loss: autograd passes no gradient to them."""

import pytest
import torch
from case_models import Parts
from inside_parts import ClippedPasses
from torch import nn
from torch.utils.checkpoint import checkpoint

from dpengine.clipping import Flat

MODES = ["auto", "hooks", "functorch", "ew", "ghost"]


def scaled():
    """A layer without a built-in rule."""
    return Parts(lambda m, x: m.scale * x, scale=nn.Parameter(torch.ones(4)))


class Looked(nn.Module):
    """A checkpointed block that reads its input, and is not differentiable in it."""

    def __init__(self):
        super().__init__()
        self.scale, self.table = scaled(), nn.Embedding(2, 3)

    def forward(self, x):
        read = lambda y: self.table((y.detach()[:, 0] > 0).long())  # noqa: E731
        return checkpoint(read, self.scale(x), use_reentrant=True)


@pytest.mark.parametrize("mode", MODES)
def test_a_layer_whose_outputs_have_no_gradient_is_skipped(mode):
    torch.manual_seed(0)
    model, inputs = Looked(), torch.randn(5, 4)
    model(inputs).square().sum().backward()
    assert model.scale.scale.grad is None
    plain = model.table.weight.grad
    model.zero_grad()
    sums = ClippedPasses(model, Flat(1e6), mode=mode, loss_reduction="sum")
    model(inputs).square().sum().backward()
    assert sums.clip(rows=5).samples == 5
    assert sums.unused() == ["scale.scale"]
    found = sums.totals()
    torch.testing.assert_close(found["table.weight"], plain)
    assert not found["scale.scale"].any()
