"""Checks the results of compiled code against those of the hooks, before it is used.

Axes: K groups of parameters that are clipped together.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from dpengine.errors import UnsupportedLayerError

from .tensor_pass import Results

_FULL, _HALF = 1e-2, 1e-1  # relative tolerances, above rounding errors and below the effect of a wrong graph
_SEED = 1  # seed of the random numbers of both passes


def check_equal_results(expected: Results, found: Results, *, half: bool) -> bool:
    """Raises UnsupportedLayerError if graphs and hooks give different results.

    Norms are compared as well as sums, because some compiler errors affect only single samples. Returns False if the
    results cannot be compared because a norm is not finite or all gradients are zero.
    """
    if bool((expected.sq_norms_BK < 0).any()):
        raise UnsupportedLayerError("the model changes the positions of samples.")
    tolerance = _HALF if half else _FULL
    expected_BK, found_BK = expected.sq_norms_BK.sqrt(), found.sq_norms_BK.sqrt()
    if not bool(expected_BK.isfinite().all()) or not bool(expected_BK.any()):
        return False
    largest = float(expected_BK.max())
    agree = (expected_BK - found_BK).abs() <= tolerance * expected_BK + 1e-6 * largest
    pairs = zip(expected.sums, found.sums, strict=True)
    error = math.sqrt(sum(float((a - b).double().square().sum()) for a, b in pairs))
    if not bool(agree.all()) or not error <= tolerance * largest:
        raise UnsupportedLayerError(
            "compiled code and hooks give different per-sample gradients. The model draws random numbers outside "
            "torch, keeps state between calls, or is compiled incorrectly."
        )
    check_equal_outputs(expected.outputs, found.outputs, half=half)
    return True


def check_equal_outputs(
    expected: Sequence[Tensor], found: Sequence[Tensor], *, half: bool, drawn: bool = False
) -> None:
    """Raises if outputs differ from the expected ones in shape, or in value unless they are random (``drawn``)."""
    tolerance = _HALF if half else _FULL
    for a, b in zip(expected, found, strict=True):
        if a.shape != b.shape or a.dtype != b.dtype:
            raise UnsupportedLayerError("an output of the model does not have the batch on axis 0.")
        if drawn:
            continue
        a, b = (torch.view_as_real(tensor) if tensor.is_complex() else tensor for tensor in (a, b))
        if a.is_floating_point():
            finite = a.isfinite()
            scale = float(torch.where(finite, a.abs(), 0).max()) if a.numel() else 0.0
            same = ((a - b).abs() <= tolerance * (a.abs() + scale)) | ~finite
        else:
            same = a == b
        if not bool(same.all()):
            raise UnsupportedLayerError("compiled code and model give different outputs.")


@contextmanager
def fixed_random_numbers(device: torch.device) -> Iterator[None]:
    """Draws the same random numbers in each such context, and restores the generators on exit."""
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.default_generator.manual_seed(_SEED)
        if device.type == "cuda":
            torch.cuda.manual_seed(_SEED)
        yield
