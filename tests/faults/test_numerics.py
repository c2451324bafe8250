"""Rounding, overflow and cancellation do not raise the sensitivity."""

import inside
import pytest
import torch
import torch.nn.functional as F
from faults.neighbours import (
    CLASSES,
    FEATURES,
    MODES,
    ROUNDING,
    influence,
    mlp,
    private,
    release_of,
    tensors,
    unprobed,
    without,
)
from torch import nn

pytestmark = pytest.mark.filterwarnings("ignore:.*DPE012")
every_mode = pytest.mark.parametrize("mode", MODES)


def half_precision_step(dtype, reduction):
    def step(model, optimizer, inputs, targets):
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=dtype):
            output = model(inputs)
        F.cross_entropy(output.float(), targets, reduction=reduction).backward()
        optimizer.step()

    return step


@pytest.mark.one_in(5, "mode", "size", "dtype")
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("size", [1e-4, 1.0, 1e3, 1e5])
@every_mode
@pytest.mark.hazard("U1")
def test_norms_neither_overflow_nor_underflow_in_half_precision(mode, size, dtype):
    inputs, targets = tensors()
    torch.manual_seed(0)
    step = half_precision_step(dtype, "sum")
    data = size * inputs, targets
    moved = influence(nn.Linear(FEATURES, CLASSES), data, step, mode=mode, loss_reduction="sum")
    assert moved <= 1 + ROUNDING


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.hazard("U1")
def test_one_sample_changes_a_half_precision_mean_beyond_the_bound_by_rounding_only(dtype):
    """One more sample changes the divisor and so the rounding of all gradients, a known excess of this size."""
    torch.manual_seed(0)
    moved = influence(nn.Linear(FEATURES, CLASSES), tensors(), half_precision_step(dtype, "mean"))
    assert 1 < moved <= 1 + 6 * torch.finfo(dtype).eps


@pytest.mark.one_in(6, "mode", "size", others="slow")
@pytest.mark.one_in(3, "mode", "size")
@pytest.mark.parametrize("size", [1e-30, 1e-22, 1e-19, 1e19, 1e22, 1e30])
@every_mode
@pytest.mark.hazard("U1")
def test_gradients_whose_squares_overflow_or_underflow_float32_are_clipped(mode, size):
    def step(model, optimizer, inputs, targets):
        optimizer.zero_grad()
        (size * F.cross_entropy(model(inputs), targets)).backward()
        optimizer.step()

    found = release_of(mlp(), tensors(), step, mode=mode)
    assert found.isfinite().all()
    assert influence(mlp(), tensors(), step, whole=found, mode=mode) <= 1 + ROUNDING


class Weighted(nn.Module):
    """Applies a layer at each position. Its output gradients are part of the data."""

    def __init__(self, layer, call):
        super().__init__()
        self.layer, self.call = layer, call

    def forward(self, inputs, weights):
        return (self.call(self.layer, inputs) * weights).flatten(1).sum(dim=1)


def weighted_step(model, optimizer, inputs, weights):
    optimizer.zero_grad()
    model(inputs, weights).mean().backward()
    optimizer.step()


WIDTH, OTHERS = 64, 39
LAYERS = {
    "linear": (lambda: nn.Linear(WIDTH, WIDTH, bias=False), lambda layer, x: layer(x)),
    "linear-small": (lambda: nn.Linear(4, 4, bias=False), lambda layer, x: layer(x[..., :4])),
    "linear-twice": (
        lambda: nn.Linear(WIDTH, WIDTH, bias=False),
        lambda layer, x: torch.stack([layer(x[:, 0]), layer(x[:, 1])], dim=1),
    ),
    "conv": (
        lambda: nn.Conv1d(WIDTH, WIDTH, 1, bias=False),
        lambda layer, x: layer(x.transpose(1, 2)).transpose(1, 2),
    ),
    "embedding": (lambda: nn.Embedding(3, WIDTH), lambda layer, x: layer(x[..., 0].long())),
    "layer-norm": (lambda: nn.LayerNorm(WIDTH), lambda layer, x: layer(x)),
}


@pytest.mark.one_in(10, "mode", "name", "size", others="slow")
@pytest.mark.one_in(5, "mode", "name", "size")
@pytest.mark.parametrize("size", [1e5, 1e9])
@pytest.mark.parametrize("name", LAYERS)
@every_mode
@pytest.mark.hazard("U2")
def test_cancellation_within_a_sample_does_not_round_other_samples_away(mode, name, size):
    """The last sample has large gradients of opposite signs at two positions, whose sum is zero."""
    make, call = LAYERS[name]
    torch.manual_seed(0)
    layer = make()
    positions = 2 if name in {"linear-small", "linear-twice"} else 8
    inputs = torch.zeros(OTHERS + 1, positions, WIDTH)
    inputs[..., 0] = 1
    width = 4 if name == "linear-small" else WIDTH
    weights = torch.zeros(OTHERS + 1, positions, width)
    weights[:OTHERS, 0, 0] = 1.0
    weights[OTHERS, 0] = size * torch.randn(width)
    weights[OTHERS, 1] = -weights[OTHERS, 0]
    data = inputs, weights
    model = Weighted(layer, call)
    whole = release_of(model, data, weighted_step, mode=mode)
    with unprobed():
        moved = whole - release_of(model, without(data, OTHERS), weighted_step, mode=mode)
    assert float(moved.norm()) <= 1.01


SMALL_AND_LARGE = {
    "linear": (lambda: nn.Linear(256, 4, bias=False), lambda layer, x: layer(x), (256,), (4,)),
    "linear-over-time": (
        lambda: nn.Linear(64, 4, bias=False),
        lambda layer, x: layer(x.view(-1, 4, 64)),
        (256,),
        (4, 4),
    ),
    "conv": (lambda: nn.Conv1d(1, 4, 256, bias=False), lambda layer, x: layer(x.unsqueeze(1)), (256,), (4, 1)),
    "bag": (
        lambda: nn.EmbeddingBag(256, 4, mode="sum"),
        lambda layer, x: layer(torch.arange(256).expand(len(x), 256), per_sample_weights=x),
        (256,),
        (4,),
    ),
}


@pytest.mark.one_in(6, "name", "mode", others="slow")
@pytest.mark.one_in(3, "name", "mode")
@pytest.mark.parametrize("name", SMALL_AND_LARGE)
@every_mode
@pytest.mark.hazard("U1")
def test_a_gradient_is_clipped_if_the_squares_of_its_factors_underflow(mode, name):
    make, call, shape, out = SMALL_AND_LARGE[name]
    torch.manual_seed(0)
    inputs, weights = torch.zeros(16, *shape), torch.zeros(16, *out)
    inputs[0], weights[0] = 2.6e-23, 9e18 * 16 * 64
    model, data = Weighted(make(), call), (inputs, weights)
    whole = release_of(model, data, weighted_step, mode=mode)
    with unprobed():
        moved = whole - release_of(model, without(data, 0), weighted_step, mode=mode)
    assert 0.5 < float(moved.norm()) <= 1 + 1e-5


@pytest.mark.parametrize("name", ["embedding", "bag", "linear"])
@pytest.mark.parametrize("mode", ["auto", "ghost"])
@pytest.mark.hazard("U2")
def test_a_long_sum_with_cancellation_stays_within_the_clipping_norm(mode, name):
    """Small terms are rounded away in the norm but not in the scaled sum, unless both are computed alike."""
    large, count, factor = 6144.0, 512, 0.53
    parts = [large / count] * count + [0.49 * 2**-11] * count + [-large / count] * count + [1 / factor]
    weights = torch.zeros(2, len(parts), 1)
    weights[0] = torch.tensor(parts).unsqueeze(1)
    layer, call, inputs = {
        "embedding": (nn.Embedding(2, 1), lambda layer, x: layer(x), torch.zeros(2, len(parts), dtype=torch.long)),
        "bag": (
            nn.EmbeddingBag(2, 1, mode="sum"),
            lambda layer, x: layer(torch.zeros(x.shape, dtype=torch.long), per_sample_weights=x).unsqueeze(1),
            weights.squeeze(2),
        ),
        "linear": (nn.Linear(1, 1, bias=False), lambda layer, x: layer(x), torch.ones(2, len(parts), 1)),
    }[name]
    data = inputs, torch.ones(2, 1, 1) if name == "bag" else weights
    model = Weighted(layer, call)

    def step(model, optimizer, inputs, weights):
        optimizer.zero_grad()
        model(inputs, weights).sum().backward()
        optimizer.step()

    whole = release_of(model, data, step, mode=mode, loss_reduction="sum")
    with unprobed():
        moved = whole - release_of(model, without(data, 0), step, mode=mode, loss_reduction="sum")
    assert float(moved.norm()) <= 1.01


@every_mode
@pytest.mark.hazard("U3")
def test_a_sum_of_small_half_precision_gradients_does_not_stagnate(mode):
    rows = 4000
    torch.manual_seed(0)
    model = nn.Linear(1, 1, bias=False).bfloat16()
    data = torch.full((rows, 1), 1.0, dtype=torch.bfloat16), torch.full((rows, 1), 2.0**-7, dtype=torch.bfloat16)

    def step(model, optimizer, inputs, weights):
        optimizer.zero_grad()
        (model(inputs) * weights).float().mean().backward()
        optimizer.step()

    found = release_of(model, data, step, mode=mode, target_delta=1e-5)
    assert float(found) == pytest.approx(rows * 2.0**-7, rel=2.0**-8)  # a bfloat16 sum would stop at 4


@pytest.mark.hazard("U5")
def test_the_order_of_samples_changes_a_sum_by_less_than_the_rounding_slack():
    engine, model, *_ = private(mlp(), tensors())
    passes = inside.passes_of_run(engine)
    inputs, targets = tensors(rows=2000)
    found = []
    for seed in range(5):
        order = torch.randperm(2000, generator=torch.Generator().manual_seed(seed))
        F.cross_entropy(model(inputs[order]), targets[order]).backward()
        passes.clip()
        found.append(torch.cat([total.flatten().double() for total in passes.totals().values()]))
        passes.discard()
    largest = max(float((one - found[0]).norm()) for one in found)
    assert 0 < largest < 2000 * 2.0**-20  # the slack of 2000 clipped samples
