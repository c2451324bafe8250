"""Clipped sums by the hooks of the engine, and by an independent loop over single samples."""

from __future__ import annotations

import copy

import torch
import torch.nn.functional as F
from inside_parts import ClippedPasses
from reference import clipped_sum, flat_norms, per_sample_gradients

from dpengine import Flat, PerSampleGradientClipper

SLACK = 2.0**-20  # relative margin by which clipped norms are below the clipping norm


def clip_by_engine(model, inputs, loss_of, *, policy=None, mode="auto", reduction="sum", batch_first=True):
    """Runs a forward and backward pass of a copy of the model. Returns the clipped sums by name, and the statistics."""
    model = copy.deepcopy(model)
    passes = ClippedPasses(model, policy, mode=mode, loss_reduction=reduction, batch_first=batch_first)
    loss_of(model(*inputs) if isinstance(inputs, tuple) else model(**inputs)).backward()
    seen = passes.clip()
    found = {name: total.double() for name, total in passes.totals().items()}
    assert all(p.grad is None for p in model.parameters())
    return found, seen


def clip_by_loop(model, inputs, loss_of_row, rows, *, max_norm=1.0, row=None):
    """Returns the clipped sums by name, and the sample norms, from a loop over single samples in float64."""
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
    """Returns the largest error of any parameter's sum, relative to the norm of all expected sums."""
    scale = torch.cat([t.flatten() for t in truth.values()]).norm().clamp(min=1e-30)
    assert found.keys() == truth.keys()
    return max(float((found[name].double() - truth[name]).norm() / scale) for name in truth)


def assert_sums_of_loop(passes, plain, inputs, targets, *, loss=F.cross_entropy, bound=1e-9, prefix="", **options):
    """Clips a backward pass, and compares the sums with those of a loop over the samples with a plain model.

    ``prefix`` is removed from the names of the parameters of the plain model. Returns the statistics of the pass.
    """
    seen = passes.clip(rows=len(targets))
    loss_of_row = lambda output, i: loss(output, targets[i])  # noqa: E731
    truth, _ = clip_by_loop(plain, inputs, loss_of_row, len(targets), **options)
    assert relative_error(passes.totals(), {name.removeprefix(prefix): total for name, total in truth.items()}) < bound
    return seen


def assert_engine_gives_sums_of_loop(
    model, inputs, targets, *, loss=F.cross_entropy, bound=1e-9, reduction="mean", row=None, **options
):
    """Compares the clipped sums of one pass of the engine with those of a loop over samples."""
    found, _ = clip_by_engine(model, inputs, lambda output: loss(output, targets), reduction=reduction, **options)
    loss_of_row = lambda output, i: loss(output, targets[i])  # noqa: E731
    truth, _ = clip_by_loop(model, inputs, loss_of_row, len(targets), row=row)
    assert relative_error(found, truth) < bound


def clipper_at_median(model, gradients, **options):
    """A clipper with the median of the norms that a loop over samples found as its clipping norm."""
    max_norm = flat_norms(gradients).median().item()
    return PerSampleGradientClipper(model, Flat(max_norm), **{"loss_reduction": "sum", **options})


def assert_clips_as_loop(clipper, gradients, *, bound=1e-5, divisor=1):
    """Clips what was recorded, and compares ``.grad`` with the clipped sum of the gradients of a loop over samples."""
    clipper.clip_and_accumulate()
    assert_sum_is_that_of_loop(clipper, gradients, bound=bound, divisor=divisor)


def assert_sum_is_that_of_loop(clipper, gradients, *, bound=1e-5, divisor=1):
    """Compares ``.grad`` with the clipped sum of the gradients of a loop over samples."""
    clipper.pre_step()
    truth = clipped_sum(gradients, clipper.norm_clipper.max_norm)
    found = torch.cat([clipper.module.get_parameter(name).grad.flatten() for name in truth])
    expected = torch.cat([total.flatten() for total in truth.values()]) / divisor
    assert (found - expected).norm() < bound * expected.norm()
