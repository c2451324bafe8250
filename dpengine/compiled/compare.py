"""Comparison of compiled code with the hooks before it is used.

Axes: K groups of parameters that are clipped together.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from dpengine.errors import UnsupportedLayerError

from .one_pass import Results

_FULL, _HALF = 1e-2, 1e-1  # relative: what a compiled pass may differ by, far above rounding and below any mistake
_RANDOM = 1  # seed of what both passes draw


def refuse_difference(expected: Results, found: Results, *, half: bool) -> bool:
    """Raises if graphs do not compute what the hooks do. Some faults of compilers show in gradients of samples only.

    Returns False if nothing could be compared: a sample is not finite, or all gradients are zero.
    """
    if bool((expected.sq_norms_BK < 0).any()):
        raise UnsupportedLayerError("the model moves samples to other places.")
    tolerance = _HALF if half else _FULL
    expected_BK, found_BK = expected.sq_norms_BK.sqrt(), found.sq_norms_BK.sqrt()
    if not bool(expected_BK.isfinite().all()) or not bool(expected_BK.any()):
        return False
    largest = float(expected_BK.max())
    agree = (expected_BK - found_BK).abs() <= tolerance * expected_BK + 1e-6 * largest
    pairs = zip(expected.sums, found.sums, strict=True)
    off = math.sqrt(sum(float((a - b).double().square().sum()) for a, b in pairs))
    if not bool(agree.all()) or not off <= tolerance * largest:
        raise UnsupportedLayerError(
            "what was compiled does not give the per-sample gradients that the hooks give: the model draws random "
            "numbers outside torch or keeps state between calls, or it is compiled wrongly."
        )
    refuse_other_outputs(expected.outputs, found.outputs, half=half)
    return True


def refuse_other_outputs(
    expected: Sequence[Tensor], found: Sequence[Tensor], *, half: bool, drawn: bool = False
) -> None:
    """Raises if outputs have other shapes, or other values than expected. ``drawn`` compares the shapes alone."""
    tolerance = _HALF if half else _FULL
    for a, b in zip(expected, found, strict=True):
        if a.shape != b.shape or a.dtype != b.dtype:
            raise UnsupportedLayerError("an output of the model does not have the batch on axis 0.")
        if drawn:
            continue
        a, b = (torch.view_as_real(one) if one.is_complex() else one for one in (a, b))
        if a.is_floating_point():
            finite = a.isfinite()
            scale = float(torch.where(finite, a.abs(), 0).max()) if a.numel() else 0.0
            same = ((a - b).abs() <= tolerance * (a.abs() + scale)) | ~finite
        else:
            same = a == b
        if not bool(same.all()):
            raise UnsupportedLayerError("what was compiled gives other outputs than the model.")


@contextmanager
def random_numbers_kept(device: torch.device) -> Iterator[None]:
    """Draws the same numbers in every such block, and leaves the generators as they were."""
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.default_generator.manual_seed(_RANDOM)
        if device.type == "cuda":
            torch.cuda.manual_seed(_RANDOM)
        yield
