"""Compares the noise-free sums of one step on a data set and on its neighbors."""

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
SLACK = 2.0**-20  # relative reduction of the clipping norm that leaves room for rounding
ROUNDING = 1e-6  # of float32 sums of a few samples, relative to the clipping norm


def mlp():
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(FEATURES, 5), nn.Tanh(), nn.Linear(5, CLASSES))


def tensors(*shape, rows=ROWS):
    """Returns inputs with very different norms, and classes."""
    generator = torch.Generator().manual_seed(2)
    inputs = torch.randn(rows, *(shape or (FEATURES,)), generator=generator)
    scale = torch.tensor([1.0, 5.0, 0.1, 20.0, 1.0, 3.0]).repeat(rows // 6 + 1)[:rows]
    return inputs * scale.view(-1, *[1] * (inputs.dim() - 1)), torch.randint(0, CLASSES, (rows,), generator=generator)


def plain_step(model, optimizer, inputs, targets):
    optimizer.zero_grad()
    F.cross_entropy(model(inputs), targets).backward()
    optimizer.step()


def private(model, data, *, make_optimizer=None, mode="auto", **options):
    """Returns an engine, model, optimizer and loader of one full batch; ``p.grad`` is the clipped sum."""
    engine = PrivacyEngine(seed=0)
    make_optimizer = make_optimizer or (lambda parameters: torch.optim.SGD(parameters, lr=1.0))
    optimizer = make_optimizer([p for p in model.parameters() if p.requires_grad])
    loader = DataLoader(TensorDataset(*data), batch_size=max(1, len(data[0])))
    constants = {"sample_rate": 1.0, "expected_batch_size": 1.0, "target_delta": 1e-3}
    settings = {"noise_multiplier": 0.0, "max_grad_norm": 1.0, "grad_sample_mode": mode, **constants, **options}
    return engine, *engine.make_private(model, optimizer, loader, **settings)


def release_of(model, data, step=plain_step, **options):
    """Returns the sum that one step releases as a float64 vector; does not change the model."""
    model = copy.deepcopy(model)
    _, model, optimizer, loader = private(model, data, **options)
    for batch in loader:
        step(model, optimizer, *batch)
    found = [p.grad if p.grad is not None else torch.zeros_like(p) for p in model.parameters() if p.requires_grad]
    return torch.cat([grad.flatten().double() for grad in found])


def without(data, row):
    """Returns the data without one sample."""
    return [torch.cat([t[:row], t[row + 1 :]]) for t in data]


def influence(model, data, step=plain_step, *, whole=None, **options):
    """Returns the largest change of the released sum if one sample is removed."""
    whole = release_of(model, data, step, **options) if whole is None else whole
    assert whole.isfinite().all() and whole.norm() > 0  # a zero sum would not change
    with unprobed():  # the probe takes most of the time, and has already seen the full batch
        differences = [whole - release_of(model, without(data, row), step, **options) for row in range(len(data[0]))]
    return max(float(difference.norm()) for difference in differences)


def truth_of(model, data, max_norm=1.0):
    """Returns the clipped sum of a loop over samples as a float64 vector."""
    rows = per_sample_gradients(model, F.cross_entropy, (data[0],), data[1])
    total = clipped_sum(rows, (1 - SLACK) * max_norm)
    return torch.cat([total[name].flatten() for name, p in model.named_parameters() if p.requires_grad])


def assert_right(model, data, step=plain_step, *, plain=None, **options):
    """Asserts that the sum equals that of a loop over samples, and that no sample adds more than the clipping norm."""
    truth = truth_of(plain or model, data)
    found = release_of(model, data, step, **options)
    assert float((found - truth).norm() / truth.norm()) < 1e-5
    assert influence(model, data, step, whole=found, **options) <= 1 + ROUNDING
