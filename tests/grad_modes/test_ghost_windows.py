"""Mode ``"ghost"`` processes layer calls in windows. The sums do not depend on the size of a window."""

import pytest
import torch
import torch.nn.functional as F
from case_models import Parts
from inside_parts import ClippedPasses
from oracle import SLACK, relative_error
from reference import per_sample_gradients
from torch import nn

from dpengine.clipping import Flat, PerLayer
from dpengine.grad_modes import reweight

ROWS = 5
SIZES = [0, 600, 2**30]


class Mixed(nn.Module):
    """Equal layers, a layer that is called twice, a parameter of the model itself, and a layer with two inputs."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        self.norm = nn.LayerNorm(4)
        self.scale = nn.Parameter(torch.ones(4))
        self.twice = nn.Linear(4, 4)
        self.pair = nn.Bilinear(4, 4, 3)

    def forward(self, inputs):
        hidden = self.twice(inputs) * self.scale
        for layer in self.layers:
            hidden = hidden + torch.tanh(layer(self.norm(hidden)))
        hidden = self.twice(hidden).mean(1)
        return self.pair(hidden, hidden.tanh())


def loop_over_samples(model, inputs, targets, group_of, bounds):
    """The sum of the gradients of single samples, each clipped group by group."""
    total = dict.fromkeys(group_of, 0)
    loss_fn = lambda output, target: F.cross_entropy(output, target)  # noqa: E731
    for one in per_sample_gradients(model, loss_fn, (inputs,), targets):
        for group, bound in enumerate(bounds):
            names = [name for name in one if group_of[name] == group]
            norm = float(torch.cat([one[name].flatten() for name in names]).norm())
            for name in names:
                total[name] = total[name] + min(1, (1 - SLACK) * bound / norm) * one[name]
    return total


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("per_layer", [False, True], ids=["flat", "per layer"])
def test_the_clipped_sum_is_that_of_a_loop_over_samples_for_windows_of_every_size(monkeypatch, size, per_layer):
    monkeypatch.setattr(reweight, "WINDOW_BYTES", size)
    model = Mixed().double()
    names = [name for name, _ in model.named_parameters()]
    bounds = [0.05 + 0.01 * i for i in range(7)] if per_layer else [0.3]
    policy = PerLayer(bounds) if per_layer else Flat(0.3)
    group_of = dict(zip(names, policy.group_of(names), strict=True))
    inputs, targets = torch.randn(ROWS, 3, 4, dtype=torch.float64), torch.arange(ROWS) % 3
    truth = loop_over_samples(model, inputs, targets, group_of, bounds)
    sums = ClippedPasses(model, policy, mode="ghost")
    F.cross_entropy(model(inputs), targets).backward()
    sums.clip(rows=ROWS)
    assert relative_error(sums.totals(), truth) < 1e-9


def test_layers_in_one_window_are_formed_together_and_no_window_holds_more_than_its_size(monkeypatch):
    windows, record = [], reweight.Reweight._record_norms

    def recorded(mode, tensors):
        windows.append(sum(tensor.nbytes for _, tensor in tensors))
        record(mode, tensors)

    monkeypatch.setattr(reweight.Reweight, "_record_norms", recorded)
    model = nn.Sequential(*[nn.Linear(16, 16) for _ in range(20)])
    inputs, call_bytes = torch.randn(8, 16), 2 * 8 * 16 * 4
    monkeypatch.setattr(reweight, "WINDOW_BYTES", 5 * call_bytes)
    sums = ClippedPasses(model, Flat(0.3), mode="ghost", probes=False)
    model(inputs).square().sum().backward()
    sums.clip(rows=8)
    assert [size // call_bytes for size in windows] == 2 * [5, 5, 5, 5, 0]


CANCELLING = 64  # positions whose gradients cancel, so that rounding decides what their sum is


def two_layers(reuse):
    """Layers of one shape, of which the second may be used twice."""
    run = lambda m, inputs, others: (m.a(inputs), m.b(others) + (m.b(others) if m.reuse else 0))  # noqa: E731
    return Parts(run, a=nn.Linear(3, 3, bias=False), b=nn.Linear(3, 3, bias=False), reuse=reuse)


def cancelling(seed, rows):
    torch.manual_seed(seed)
    inputs, grads = 1e9 * torch.randn(1, CANCELLING, 3), torch.randn(1, CANCELLING, 3)
    half = CANCELLING // 2
    order = torch.randperm(half)
    inputs[:, half:], grads[:, half:] = inputs[:, :half][:, order], -grads[:, :half][:, order]
    return inputs.repeat(rows, 1, 1), grads.repeat(rows, 1, 1)


@pytest.mark.parametrize(("reuse", "not_finite"), [(False, False), (True, False), (False, True)])
def test_both_passes_form_gradients_by_the_same_products(reuse, not_finite):
    """Else the sum of samples whose gradients cancel in one product only is far above the clipping norm."""
    for seed in range(10):
        inputs, grads = cancelling(seed, 3)
        if not_finite:
            grads[2] = torch.nan
        model = two_layers(reuse)
        sums = ClippedPasses(model, Flat(1.0), mode="ghost", probes=False)
        first, second = model(inputs, torch.zeros(3, CANCELLING, 3))
        ((first * grads).sum() / 3 + (second * 0).sum()).backward()
        sums.clip(rows=3)
        assert float(sums.totals()["a.weight"].norm()) <= 3.01


def test_a_bias_that_is_used_several_times_is_summed_as_its_norm_was_computed():
    for seed in range(5):
        torch.manual_seed(seed)
        layer = nn.Linear(1, 5)
        one, other = torch.randint(-(2**23), 2**23, (2, 8, 5)).float() * 2**12
        sums = ClippedPasses(layer, Flat(1.0), mode="ghost", probes=False)
        x = torch.zeros(8, 1)
        uses = (layer(x) * one).sum() + (layer(x) * other).sum() - (layer(x) * (one + other)).sum()
        (uses / 8).backward()
        sums.clip(rows=8)
        assert float(sums.totals()["bias"].norm()) <= 8.1
