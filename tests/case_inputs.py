"""Inputs of the cases: batches of random numbers and indices, in every memory layout."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

Part = Callable[[int, torch.dtype], Tensor]


def batch(*parts: Part) -> Callable[[int, torch.dtype], tuple[Tensor, ...]]:
    """Returns a function that concatenates the inputs of all parts."""
    return lambda rows, dtype: tuple(part(rows, dtype) for part in parts)


def floats(*shape: int, layout: Callable[[Tensor], Tensor] = lambda x: x) -> Part:
    """Standard normal numbers ``(B, *shape)`` in a memory layout."""
    return lambda rows, dtype: layout(torch.randn(rows, *shape, dtype=dtype))


def indices(size: int, *shape: int, dtype: torch.dtype = torch.int64) -> Part:
    """Integers ``(B, *shape)`` below ``size``."""
    return lambda rows, _: torch.randint(size, (rows, *shape), dtype=dtype)


def channels_last(x: Tensor) -> Tensor:
    return x.contiguous(memory_format=torch.channels_last if x.dim() == 4 else torch.channels_last_3d)


def transposed(x: Tensor) -> Tensor:
    """The same values, the last two axes exchanged in memory."""
    return x.transpose(-1, -2).contiguous().transpose(-1, -2)


def batch_second(x: Tensor) -> Tensor:
    """The same values, the second axis outermost in memory."""
    return x.transpose(0, 1).contiguous().transpose(0, 1)


def sliced(x: Tensor) -> Tensor:
    """The same values, every second one in memory."""
    wide = x.new_zeros(*x.shape[:-1], 2 * x.shape[-1])
    wide[..., ::2] = x
    return wide[..., ::2]


def expanded(x: Tensor) -> Tensor:
    """The first entry along the last axis, repeated without memory."""
    return x[..., :1].expand_as(x)


def flat_bags(size: int, *, weights: bool = False, end: bool = False):
    """Bags of 0 to 4 entries, as one list with offsets."""

    def make(rows: int, dtype: torch.dtype) -> tuple[Any, ...]:
        lengths = torch.tensor([2, 0, 4, 1, 3])[:rows] if rows else torch.zeros(0, dtype=torch.int64)
        total = int(lengths.sum())
        entries = torch.randint(size, (total,))
        entries[: total // 2] = entries[:1]  # an entry that occurs twice in a bag
        offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
        offsets = offsets if end else offsets[:-1]
        return (entries, offsets, torch.randn(total, dtype=dtype)) if weights else (entries, offsets)

    return make


def bag_alone(end: bool = False):
    """Returns a function that slices one bag out of a flat list."""

    def row(inputs: tuple[Any, ...], i: int) -> tuple[Any, ...]:
        entries, offsets, *weights = inputs
        ends = [*offsets.tolist(), len(entries)]
        one = slice(ends[i], ends[i + 1])
        alone = torch.tensor([0, one.stop - one.start] if end else [0])
        return (entries[one], alone, *[w[one] for w in weights])

    return row
