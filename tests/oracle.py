"""Clipped sums by the engine's hooks, and by a loop over single rows that shares no code with them."""

from __future__ import annotations

import copy

import torch
from inside_parts import ClippedPasses
from reference import per_sample_gradients

SLACK = 2.0**-20  # thresholds are met with this much to spare


def clip_by_engine(model, inputs, loss_of, *, policy=None, mode="auto", reduction="sum", batch_first=True):
    """Names to clipped sums, and the statistics, of one forward and backward pass of a copy of the model."""
    model = copy.deepcopy(model)
    passes = ClippedPasses(model, policy, mode=mode, loss_reduction=reduction, batch_first=batch_first)
    loss_of(model(*inputs) if isinstance(inputs, tuple) else model(**inputs)).backward()
    seen = passes.clip()
    found = {name: total.double() for name, total in passes.totals().items()}
    assert all(p.grad is None for p in model.parameters())
    return found, seen


def clip_by_loop(model, inputs, loss_of_row, rows, *, max_norm=1.0, row=None):
    """The same by autograd on each row alone, in float64."""
    gradients = per_sample_gradients(model, loss_of_row, inputs, torch.arange(rows), row=row)
    total = {}
    for one in gradients:
        norm = torch.cat([g.flatten() for g in one.values()]).norm()
        factor = min(1.0, (1 - SLACK) * max_norm / max(float(norm), 1e-300))
        for name, gradient in one.items():
            total[name] = total.get(name, 0) + factor * gradient
    norms = [float(torch.cat([g.flatten() for g in one.values()]).norm()) for one in gradients]
    return total, norms


def relative_error(found, truth):
    """Largest deviation of any parameter's sum, relative to the whole truth."""
    scale = torch.cat([t.flatten() for t in truth.values()]).norm().clamp(min=1e-30)
    assert found.keys() == truth.keys()
    return max(float((found[name] - truth[name]).norm() / scale) for name in truth)
