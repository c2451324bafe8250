"""Splits the batch that a ``collate_fn`` returns into the rows of single examples, and compares rows."""

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

_RTOL, _ATOL = 1e-4, 1e-5  # tolerances, because values may be computed for the entire batch
_DEPTH = 8  # maximum depth of nested containers
_CONTAINERS = (Tensor, np.ndarray, list, tuple, collections.abc.Mapping)
_KINDS = "biufc"  # dtype kinds of NumPy arrays that are compared as tensors


@dataclasses.dataclass(frozen=True)
class Entry:
    """A tensor, list or other value of a batch.

    Attributes:
        path: Path in the batch, such as ``batch['x']``.
        rows: Part of the value for each example; None if the value is not split by example.
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
    """Batch axis, and the numbers of examples of a batch and of another batch with which it is compared."""

    batch: int
    other: int
    axis: int


def entries(batch: Any, other: Any, sizes: Sizes) -> dict[str, Entry]:
    """Returns the entries of a batch by path. ``other`` is a batch with another number of examples."""
    all_entries = list(_entries(batch, other, sizes, "batch", _DEPTH))
    flat = [e for e in all_entries if e.rows is None and isinstance(e.value, Tensor) and e.value.dim()]
    for offsets in [e for e in all_entries if flat and e.rows is not None and _are_offsets(e.value)]:
        ends = offsets.value[1:].tolist()
        split = {r.path: list(torch.tensor_split(r.value, ends)) for r in flat if len(r.value) >= max(ends)}
        if split:
            all_entries = [dataclasses.replace(e, rows=split.get(e.path, e.rows)) for e in all_entries if e != offsets]
            break
    return {entry.path: entry for entry in all_entries}


def _entries(batch: Any, other: Any, sizes: Sizes, path: str, depth: int) -> Iterator[Entry]:
    batch, other = to_standard_types(batch, sizes.axis), to_standard_types(other, sizes.axis)
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


def to_standard_types(value: Any, axis: int = 0) -> Any:
    """Converts nested, sparse and packed tensors, arrays, mappings and objects to tensors, dicts, lists or tuples.

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
    """Returns True if the value may be the offsets of examples in a flat tensor."""
    if not isinstance(value, Tensor) or value.dim() != 1 or len(value) < 2 or is_real(value):
        return False
    return bool(value[0] == 0) and bool((value.diff() >= 0).all())


def is_real(value: Tensor) -> bool:
    """Returns True for a floating-point or complex tensor."""
    return value.is_floating_point() or value.is_complex()


def is_order(entry: Entry) -> bool:
    """Returns True if the entry may be the permutation that sorted the batch."""
    value, rows = entry.value, entry.rows or []
    if isinstance(value, Tensor):
        if value.dim() != 1 or is_real(value):
            return False
        value = value.tolist()
    return all(type(index) is int for index in value) and sorted(value) == list(range(len(rows)))


def same(a: Any, b: Any, *, padded: str = "") -> bool:
    """Returns True if two values are equal, up to rounding.

    Args:
        a: First value.
        b: Second value.
        padded: ``"constant"`` if tensors may differ by padding with a constant, ``"any"`` if they may differ by padding
            with any values.
    """
    a, b = to_standard_types(a), to_standard_types(b)
    if isinstance(a, (list, tuple)) and isinstance(b, (list, tuple)):
        if len(a) == len(b):
            return all(same(*pair, padded=padded) for pair in zip(a, b, strict=True))
        if not padded or not all(isinstance(number, numbers.Real) for number in (*a, *b)):
            return False
        a, b = torch.tensor(a), torch.tensor(b)
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return _same_tensors(a.detach(), b.detach(), padded)
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key], padded=padded) for key in a)
    if isinstance(a, float) and isinstance(b, float):
        return math.isclose(a, b, rel_tol=_RTOL) or (math.isnan(a) and math.isnan(b))
    try:
        return bool(a == b)
    except Exception:
        return False


def _same_tensors(a: Tensor, b: Tensor, padded: str) -> bool:
    if a.shape == b.shape:
        return _close(a, b)
    if not padded or a.dim() != b.dim():
        return False
    common = [min(sizes) for sizes in zip(a.shape, b.shape, strict=True)]
    for sides in itertools.product(
        (0, 2, 1), repeat=min(2, sum(m != n for m, n in zip(a.shape, b.shape, strict=True)))
    ):
        parts = [_split_padding(tensor, common, a.shape, b.shape, sides) for tensor in (a, b)]
        if _close(parts[0][0], parts[1][0]) and (padded == "any" or all(_constant(padding) for _, padding in parts)):
            return True
    return False


def _split_padding(
    tensor: Tensor, common: Sequence[int], shape: Sequence[int], other_shape: Sequence[int], sides: Sequence[int]
) -> tuple[Tensor, Tensor]:
    """Returns the part of a tensor without padding, of shape ``common``, and the values of the padding.

    ``shape`` and ``other_shape`` are the shapes of both tensors. For each axis that differs, ``sides`` is 0 for padding
    at the end, 2 for padding at the front, and 1 for both.
    """
    next_side = itertools.chain(sides, itertools.repeat(sides[-1]))
    starts = [
        0 if m == n else (size - length) * next(next_side) // 2
        for size, length, m, n in zip(tensor.shape, common, shape, other_shape, strict=True)
    ]
    index = tuple(slice(start, start + length) for start, length in zip(starts, common, strict=True))
    outside = torch.ones(tensor.shape, dtype=torch.bool, device=tensor.device)
    outside[index] = False
    return tensor[index], tensor[outside]


def _constant(values: Tensor) -> bool:
    return len(values) == 0 or _close(values, values[:1].expand_as(values))


def _close(a: Tensor, b: Tensor) -> bool:
    if not (is_real(a) or is_real(b)):
        return torch.equal(a, b)
    wide = torch.complex128 if a.is_complex() or b.is_complex() else torch.float64
    a, b = a.to(wide), b.to(wide)
    largest = a.abs().nan_to_num(0.0, 0.0, 0.0).max() if a.numel() else a.abs().sum()
    return torch.allclose(a, b, rtol=_RTOL, atol=_ATOL * float(largest), equal_nan=True)
