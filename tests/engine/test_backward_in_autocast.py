"""A backward pass inside autocast: sums equal those outside, without rounding of norms to bfloat16."""

import copy

import pytest
import torch
import torch.nn.functional as F
from inside_parts import ClippedPasses
from oracle import relative_error
from torch import nn

from dpengine import GradSampleModule

ROWS = 4


class Several(nn.Module):
    """Model with layers with several types of grad samplers, and one without."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.conv, self.norm = nn.Conv2d(2, 6, 3), nn.GroupNorm(2, 6)
        self.up, self.scale = nn.Linear(6, 40), nn.LayerNorm(40)
        self.head = nn.Linear(40, 7)
        self.bare = nn.Parameter(torch.randn(7))

    def forward(self, images):
        positions = self.norm(self.conv(images)).tanh().flatten(2).transpose(1, 2)
        hidden = self.scale(self.up(positions)).mean(1)
        return self.head(hidden) * self.bare


def clipped(model, mode, *, inside):
    sums = ClippedPasses(model, mode=mode)
    torch.manual_seed(1)
    images, targets = torch.randn(ROWS, 2, 6, 6), torch.randint(0, 7, (ROWS,))
    with torch.autocast("cpu", torch.bfloat16):
        loss = F.cross_entropy(model(images).float(), targets)
        if inside:
            loss.backward()
            found = sums.clip(rows=ROWS)
    if not inside:
        loss.backward()
        found = sums.clip(rows=ROWS)
    return found.largest_norm, {name: total.double() for name, total in sums.totals().items()}


@pytest.mark.parametrize("mode", ["auto", "hooks", "ghost", "functorch"])
def test_sums_equal_those_of_a_backward_pass_outside_autocast(mode):
    model = Several()
    norm, truth = clipped(copy.deepcopy(model), mode, inside=False)
    found, sums = clipped(model, mode, inside=True)
    assert found == pytest.approx(norm, rel=1e-6)
    assert relative_error(sums, truth) < 1e-6


@pytest.mark.parametrize(
    "read",
    [
        lambda model: model.last_pass.gradients("up.weight"),
        lambda model: model.last_pass.weighted_sum(torch.linspace(0.1, 1, ROWS))["up.weight"],
        lambda model: model.last_pass.norms(),
        lambda model: model.module.head.weight.grad_sample + 0.0,
    ],
    ids=["gradients", "weighted_sum", "norms", "grad_sample"],
)
def test_per_sample_results_equal_those_read_outside_autocast(read):
    found = []
    for inside in (False, True):
        model = GradSampleModule(Several())
        torch.manual_seed(1)
        with torch.autocast("cpu", torch.bfloat16):
            loss = F.cross_entropy(model(torch.randn(ROWS, 2, 6, 6)).float(), torch.arange(ROWS))
        with torch.autocast("cpu", torch.bfloat16, enabled=inside):
            loss.backward()
            found.append(read(model))
    torch.testing.assert_close(found[1], found[0], rtol=1e-6, atol=1e-7)
