"""Gradients as whole numbers whose norm is at most the scale, exactly: what discrete noise can be added to."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

_MOST = 2**62  # sums of so many whole numbers fit in 64 bits
_EXACT_IN_INT64 = 3 * 10**9  # the square of a norm up to this does


def grid_bound(bound: float, scale: float, numbers: int, batch: int) -> float:
    """To what a gradient is clipped before it is rounded: rounding may add half the root of how many numbers it has.

    Args:
        bound: What its norm shall be at most.
        scale: The norm of what is rounded, in units of the grid.
        numbers: How many numbers a gradient has.
        batch: How many gradients are added.

    Returns:
        The smaller threshold.

    Raises:
        ValueError: If nothing is left, or the sums might overflow.
    """
    if batch * scale >= _MOST:
        raise ValueError(f"grid_scale={scale:g} with {batch} examples may overflow 64 bits; take a smaller one.")
    left = bound - math.sqrt(numbers) * bound / (2 * scale)
    if not left > 0:
        raise ValueError(
            f"grid_scale={scale:g} is too coarse for gradients of {numbers} numbers: rounding alone would pass the "
            f"threshold. Take more than {math.sqrt(numbers) / 2:g}."
        )
    return left


def on_grid(leaves: Sequence[Tensor], factor_B: Tensor, bound: float, scale: float) -> list[Tensor]:
    """Whole numbers near ``scale / bound`` times the clipped gradients, of norm ``scale`` at most.

    Args:
        leaves: ``(B, ...)`` each, finite.
        factor_B: What brings their norm down to ``grid_bound``.
        bound: The threshold.
        scale: The grid.

    Returns:
        int64 tensors of the same shapes.
    """
    flat_BP = torch.cat([leaf.reshape(len(leaf), -1).double() for leaf in leaves], dim=1)
    rounded_BP = (flat_BP * factor_B.unsqueeze(1) * (scale / bound)).round()
    for i in torch.nonzero(_maybe_above(rounded_BP, scale)).flatten().tolist():
        rounded_BP[i] = _within(rounded_BP[i], int(scale**2) if scale == int(scale) else math.floor(scale**2))
    parts = rounded_BP.to(torch.int64).split([leaf[0].numel() for leaf in leaves], dim=1)
    return [part.reshape(leaf.shape) for part, leaf in zip(parts, leaves, strict=True)]


def _maybe_above(rounded_BP: Tensor, scale: float) -> Tensor:
    """Rows whose norm may be above the scale: float64 squares are off by less than one part in 2**40."""
    return rounded_BP.square().sum(dim=1) > scale**2 * (1 - 2.0**-40)


def _within(row_P: Tensor, most: int) -> Tensor:
    """The row, shrunk until its exact squared norm is at most ``most``."""
    values = [int(value) for value in row_P.tolist()]
    total = sum(value * value for value in values)
    if total > most:
        shrink = math.sqrt(most / total)
        values = [int(value * shrink) for value in values]
        total = sum(value * value for value in values)
    while total > most:
        i = max(range(len(values)), key=lambda k: abs(values[k]))
        total -= 2 * abs(values[i]) - 1
        values[i] -= 1 if values[i] > 0 else -1
    return torch.tensor(values, dtype=row_P.dtype, device=row_P.device)
