"""Splits the result of a ``collate_fn`` into the rows of single examples, and compares rows."""

from __future__ import annotations

import collections.abc
import dataclasses
import itertools
import math
import numbers
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pad_packed_sequence

_RTOL, _ATOL = 1e-4, 1e-5  # tolerances for values that are computed for a batch at once
_DEPTH = 8  # maximum depth of nested containers
_CONTAINERS = (Tensor, np.ndarray, list, tuple, collections.abc.Mapping)
_KINDS = "biufc"  # dtype kinds of NumPy arrays that are compared as tensors


@dataclasses.dataclass(frozen=True)
class Entry:
    """A tensor, list or other value of a batch.

    Attributes:
        path: Path in the batch, such as ``batch['x']``.
        rows: The part of each example; None if the value has no part for each example.
        value: The tensor, list or other value.
    """

    path: str
    rows: list[Any] | None
    value: Any

    def row(self, i: int) -> Any:
        """Returns the row of an example."""
        assert self.rows is not None
        return self.rows[i]

    @property
    def size(self) -> int | None:
        """Length of the first axis; None without one."""
        if isinstance(self.value, Tensor):
            return len(self.value) if self.value.dim() else None
        return len(self.value) if isinstance(self.value, (list, tuple)) else None


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Numbers of examples in a batch and in another batch, and the batch axis."""

    batch: int
    other: int
    axis: int


def entries(batch: Any, other: Any, sizes: Sizes) -> dict[str, Entry]:
    """Returns the entries of a batch by path. ``other`` is a batch with another number of examples."""
    all_entries = list(_entries(batch, other, sizes, "batch", _DEPTH))
    ragged = [e for e in all_entries if e.rows is None and isinstance(e.value, Tensor) and e.value.dim()]
    for offsets in [e for e in all_entries if ragged and e.rows is not None and _are_offsets(e.value)]:
        ends = offsets.value[1:].tolist()
        split = {r.path: list(torch.tensor_split(r.value, ends)) for r in ragged if len(r.value) >= max(ends)}
        if split:
            all_entries = [dataclasses.replace(e, rows=split.get(e.path, e.rows)) for e in all_entries if e != offsets]
            break
    return {entry.path: entry for entry in all_entries}


def _entries(batch: Any, other: Any, sizes: Sizes, path: str, depth: int) -> Iterator[Entry]:
    batch, other = plain(batch, sizes.axis), plain(other, sizes.axis)
    if isinstance(batch, Tensor):
        shapes = [t.shape if isinstance(t, Tensor) else () for t in (batch, other)]
        for axis in (sizes.axis, 1 - sizes.axis):
            if [shape[axis] if len(shape) > axis else None for shape in shapes] == [sizes.batch, sizes.other]:
                yield Entry(path, list(batch.detach().unbind(axis)), batch)
                return
    if isinstance(batch, (list, tuple)) and isinstance(other, (list, tuple)):
        if (len(batch), len(other)) == (sizes.batch, sizes.other):
            yield Entry(path, list(batch), batch)
            return
        if len(batch) == len(other) and depth:
            for i, (item, other_item) in enumerate(zip(batch, other, strict=True)):
                yield from _entries(item, other_item, sizes, f"{path}[{i}]", depth - 1)
            return
    if isinstance(batch, dict) and isinstance(other, dict) and batch.keys() == other.keys() and depth:
        for key in batch:
            yield from _entries(batch[key], other[key], sizes, f"{path}[{key!r}]", depth - 1)
        return
    yield Entry(path, None, batch)


def plain(value: Any, axis: int = 0) -> Any:
    """Converts nested, sparse and packed tensors, arrays, mappings and records to tensors, dicts, lists or tuples.

    Other values are returned unchanged. ``axis`` is the batch axis.
    """
    if isinstance(value, Tensor):
        if value.is_nested:
            return list(value.unbind())
        return value if value.layout is torch.strided else value.to_dense()
    if isinstance(value, PackedSequence):
        data, lengths = pad_packed_sequence(value, batch_first=axis == 0)
        return {"data": data, "lengths": lengths}
    if isinstance(value, np.ndarray):
        return torch.from_numpy(value.copy()) if value.dtype.kind in _KINDS else value.tolist()
    if isinstance(value, collections.abc.Mapping):
        return dict(value)
    if isinstance(value, tuple) and hasattr(value, "_asdict"):
        return value._asdict()
    if isinstance(value, (type, nn.Module, numbers.Number)) or callable(value):
        return value
    fields = getattr(value, "__dict__", {}) or {
        name: getattr(value, name) for name in getattr(value, "__slots__", ()) if hasattr(value, name)
    }
    return dict(fields) if any(isinstance(field, _CONTAINERS) for field in fields.values()) else value


def _are_offsets(value: Any) -> bool:
    """Returns True if the value may be the offsets of bags in a flat tensor."""
    if not isinstance(value, Tensor) or value.dim() != 1 or len(value) < 2 or is_real(value):
        return False
    return bool(value[0] == 0) and bool((value.diff() >= 0).all())


def is_real(value: Tensor) -> bool:
    """Returns True for a floating-point or complex tensor, whose values are rounded."""
    return value.is_floating_point() or value.is_complex()


def is_order(entry: Entry) -> bool:
    """Returns True if the entry may be the permutation that sorted the batch."""
    value, rows = entry.value, entry.rows or []
    if isinstance(value, Tensor):
        if value.dim() != 1 or is_real(value):
            return False
        value = value.tolist()
    return all(type(index) is int for index in value) and sorted(value) == list(range(len(rows)))


def same(one: Any, other: Any, *, padded: str = "") -> bool:
    """Returns True if two values are equal, up to rounding.

    Args:
        one: A value.
        other: A value.
        padded: ``"constant"`` if tensors may differ by padding with one value, ``"any"`` by padding with any values.
    """
    one, other = plain(one), plain(other)
    if isinstance(one, (list, tuple)) and isinstance(other, (list, tuple)):
        if len(one) == len(other):
            return all(same(*pair, padded=padded) for pair in zip(one, other, strict=True))
        if not padded or not all(isinstance(number, numbers.Real) for number in (*one, *other)):
            return False
        one, other = torch.tensor(one), torch.tensor(other)
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return _same_tensors(one.detach(), other.detach(), padded)
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key], padded=padded) for key in one)
    if isinstance(one, float) and isinstance(other, float):
        return math.isclose(one, other, rel_tol=_RTOL) or (math.isnan(one) and math.isnan(other))
    try:
        return bool(one == other)
    except Exception:
        return False


def _same_tensors(one: Tensor, other: Tensor, padded: str) -> bool:
    if one.shape == other.shape:
        return _close(one, other)
    if not padded or one.dim() != other.dim():
        return False
    common = [min(sizes) for sizes in zip(one.shape, other.shape, strict=True)]
    for sides in itertools.product(
        (0, 2, 1), repeat=min(2, sum(a != b for a, b in zip(one.shape, other.shape, strict=True)))
    ):
        parts = [_split_padding(tensor, common, one.shape, other.shape, sides) for tensor in (one, other)]
        if _close(parts[0][0], parts[1][0]) and (padded == "any" or all(_constant(padding) for _, padding in parts)):
            return True
    return False


def _split_padding(
    tensor: Tensor, common: Sequence[int], one: Sequence[int], other: Sequence[int], sides: Sequence[int]
) -> tuple[Tensor, Tensor]:
    """Returns the part of a tensor without padding, of shape ``common``, and the values of the padding.

    ``one`` and ``other`` are the shapes of both tensors. For each axis that differs, ``sides`` is 0 for padding at the
    end, 2 for padding at the front, and 1 for both.
    """
    next_side = itertools.chain(sides, itertools.repeat(sides[-1]))
    starts = [
        0 if a == b else (size - length) * next(next_side) // 2
        for size, length, a, b in zip(tensor.shape, common, one, other, strict=True)
    ]
    index = tuple(slice(start, start + length) for start, length in zip(starts, common, strict=True))
    outside = torch.ones(tensor.shape, dtype=torch.bool, device=tensor.device)
    outside[index] = False
    return tensor[index], tensor[outside]


def _constant(values: Tensor) -> bool:
    return len(values) == 0 or _close(values, values[:1].expand_as(values))


def _close(one: Tensor, other: Tensor) -> bool:
    if not (is_real(one) or is_real(other)):
        return torch.equal(one, other)
    wide = torch.complex128 if one.is_complex() or other.is_complex() else torch.float64
    one, other = one.to(wide), other.to(wide)
    largest = one.abs().nan_to_num(0.0, 0.0, 0.0).max() if one.numel() else one.abs().sum()
    return torch.allclose(one, other, rtol=_RTOL, atol=_ATOL * float(largest), equal_nan=True)
