"""The replay detector: the same step on a data set and its neighbours, without noise, and how far the sums part."""

from __future__ import annotations

import copy

import torch
import torch.nn.functional as F
from inside_parts import unprobed as unprobed
from reference import clipped_sum, per_sample_gradients
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from dpengine import PrivacyEngine

MODES = ["auto", "hooks", "functorch", "ew", "ghost"]
ROWS, FEATURES, CLASSES = 6, 4, 3
SLACK = 2.0**-20  # by which thresholds are lowered, so that rounding stays within them
ROUNDING = 1e-6  # float32 sums of a few rows, relative to the threshold


def mlp():
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(FEATURES, 5), nn.Tanh(), nn.Linear(5, CLASSES))


def tensors(*shape, rows=ROWS):
    """Inputs of very different lengths, and classes."""
    generator = torch.Generator().manual_seed(2)
    inputs = torch.randn(rows, *(shape or (FEATURES,)), generator=generator)
    scale = torch.tensor([1.0, 5.0, 0.1, 20.0, 1.0, 3.0]).repeat(rows // 6 + 1)[:rows]
    return inputs * scale.view(-1, *[1] * (inputs.dim() - 1)), torch.randint(0, CLASSES, (rows,), generator=generator)


def plain_step(model, optimizer, inputs, targets):
    optimizer.zero_grad()
    F.cross_entropy(model(inputs), targets).backward()
    optimizer.step()


def private(model, data, *, make_optimizer=None, mode="auto", **options):
    """Engine, model, optimizer and a loader of the whole data in one batch; p.grad will be the sum itself."""
    engine = PrivacyEngine(seed=0)
    make_optimizer = make_optimizer or (lambda parameters: torch.optim.SGD(parameters, lr=1.0))
    optimizer = make_optimizer([p for p in model.parameters() if p.requires_grad])
    loader = DataLoader(TensorDataset(*data), batch_size=max(1, len(data[0])))
    constants = {"sample_rate": 1.0, "expected_batch_size": 1.0, "target_delta": 1e-3}
    settings = {"noise_multiplier": 0.0, "max_grad_norm": 1.0, "grad_sample_mode": mode, **constants, **options}
    return engine, *engine.make_private(model, optimizer, loader, **settings)


def release_of(model, data, step=plain_step, **options):
    """The sum that one step releases, as one float64 vector; the model stays as it is."""
    model = copy.deepcopy(model)
    _, model, optimizer, loader = private(model, data, **options)
    for batch in loader:
        step(model, optimizer, *batch)
    found = [p.grad if p.grad is not None else torch.zeros_like(p) for p in model.parameters() if p.requires_grad]
    return torch.cat([grad.flatten().double() for grad in found])


def without(data, row):
    """The neighbour that lacks one row."""
    return [torch.cat([t[:row], t[row + 1 :]]) for t in data]


def influence(model, data, step=plain_step, *, whole=None, **options):
    """Returns the largest change of the released sum when one row is left out."""
    whole = release_of(model, data, step, **options) if whole is None else whole
    assert whole.isfinite().all() and whole.norm() > 0  # a sum of nothing would move by nothing
    with unprobed():  # the probe is most of a step here, and the batch was probed as a whole
        parted = [whole - release_of(model, without(data, row), step, **options) for row in range(len(data[0]))]
    return max(float(difference.norm()) for difference in parted)


def truth_of(model, data, max_norm=1.0):
    """The clipped sum of a loop over rows, as one float64 vector."""
    rows = per_sample_gradients(model, F.cross_entropy, (data[0],), data[1])
    total = clipped_sum(rows, (1 - SLACK) * max_norm)
    return torch.cat([total[name].flatten() for name, p in model.named_parameters() if p.requires_grad])


def assert_right(model, data, step=plain_step, *, plain=None, **options):
    """The released sum is that of a loop over rows, and no row moves it by more than the threshold."""
    truth = truth_of(plain or model, data)
    found = release_of(model, data, step, **options)
    assert float((found - truth).norm() / truth.norm()) < 1e-5
    assert influence(model, data, step, whole=found, **options) <= 1 + ROUNDING
