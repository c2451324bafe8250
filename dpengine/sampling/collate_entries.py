"""Takes the result of a ``collate_fn`` apart into the rows of single examples, and compares rows."""

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

_RTOL, _ATOL = 1e-4, 1e-5  # of values that are computed for a batch at once
_DEPTH = 8  # of nested containers
_CONTAINERS = (Tensor, np.ndarray, list, tuple, collections.abc.Mapping)
_KINDS = "biufc"  # of NumPy arrays that are compared as tensors


@dataclasses.dataclass(frozen=True)
class Entry:
    """A tensor, list or other value of a batch.

    Attributes:
        path: Its place in the batch, such as ``batch['x']``.
        rows: Its part for each example; None if it has no such parts.
        value: The value.
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
        """Number of its items along the first axis."""
        if isinstance(self.value, Tensor):
            return len(self.value) if self.value.dim() else None
        return len(self.value) if isinstance(self.value, (list, tuple)) else None


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Numbers of examples of a batch and of another batch, and the axis that counts them."""

    batch: int
    other: int
    axis: int


def entries(batch: Any, other: Any, sizes: Sizes) -> dict[str, Entry]:
    """Returns the entries of a batch by path. ``other`` is a batch with another number of examples."""
    found = list(_entries(batch, other, sizes, "batch", _DEPTH))
    ragged = [one for one in found if one.rows is None and isinstance(one.value, Tensor) and one.value.dim()]
    for offsets in [one for one in found if ragged and one.rows is not None and _are_offsets(one.value)]:
        ends = offsets.value[1:].tolist()
        split = {r.path: list(torch.tensor_split(r.value, ends)) for r in ragged if len(r.value) >= max(ends)}
        if split:
            found = [dataclasses.replace(one, rows=split.get(one.path, one.rows)) for one in found if one != offsets]
            break
    return {one.path: one for one in found}


def _entries(batch: Any, other: Any, sizes: Sizes, path: str, depth: int) -> Iterator[Entry]:
    batch, other = plain(batch, sizes.axis), plain(other, sizes.axis)
    if isinstance(batch, Tensor):
        both = [t.shape if isinstance(t, Tensor) else () for t in (batch, other)]
        for axis in (sizes.axis, 1 - sizes.axis):
            if [shape[axis] if len(shape) > axis else None for shape in both] == [sizes.batch, sizes.other]:
                yield Entry(path, list(batch.detach().unbind(axis)), batch)
                return
    if isinstance(batch, (list, tuple)) and isinstance(other, (list, tuple)):
        if (len(batch), len(other)) == (sizes.batch, sizes.other):
            yield Entry(path, list(batch), batch)
            return
        if len(batch) == len(other) and depth:
            for i, (one, two) in enumerate(zip(batch, other, strict=True)):
                yield from _entries(one, two, sizes, f"{path}[{i}]", depth - 1)
            return
    if isinstance(batch, dict) and isinstance(other, dict) and batch.keys() == other.keys() and depth:
        for key in batch:
            yield from _entries(batch[key], other[key], sizes, f"{path}[{key!r}]", depth - 1)
        return
    yield Entry(path, None, batch)


def plain(value: Any, axis: int = 0) -> Any:
    """Returns a value as a tensor, dict, list or tuple if it is like one."""
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
    return dict(fields) if any(isinstance(one, _CONTAINERS) for one in fields.values()) else value


def _are_offsets(value: Any) -> bool:
    """Returns True for offsets of bags in a flat tensor."""
    if not isinstance(value, Tensor) or value.dim() != 1 or len(value) < 2 or is_real(value):
        return False
    return bool(value[0] == 0) and bool((value.diff() >= 0).all())


def is_real(value: Tensor) -> bool:
    """Returns True for a tensor of numbers that are rounded."""
    return value.is_floating_point() or value.is_complex()


def is_order(entry: Entry) -> bool:
    """Returns True if the entry may hold the places of the examples in a sorted batch."""
    value, rows = entry.value, entry.rows or []
    if isinstance(value, Tensor):
        if value.dim() != 1 or is_real(value):
            return False
        value = value.tolist()
    return all(type(one) is int for one in value) and sorted(value) == list(range(len(rows)))


def same(one: Any, other: Any, *, padded: str = "") -> bool:
    """Returns True if two values are equal, up to rounding.

    Args:
        one: A value.
        other: A value.
        padded: ``"constant"`` if tensors may differ by padding with one value, ``"any"`` for padding of any values.
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
    kept = [min(sizes) for sizes in zip(one.shape, other.shape, strict=True)]
    for place in itertools.product(
        (0, 2, 1), repeat=min(2, sum(a != b for a, b in zip(one.shape, other.shape, strict=True)))
    ):
        parts = [_part(tensor, kept, one.shape, other.shape, place) for tensor in (one, other)]
        if _close(parts[0][0], parts[1][0]) and (padded == "any" or all(_constant(rest) for _, rest in parts)):
            return True
    return False


def _part(tensor: Tensor, kept: Sequence[int], one: Sequence[int], other: Sequence[int], place: Sequence[int]) -> Any:
    """Returns the part of a tensor without padding, and the values of the padding.

    ``place`` is 0 for padding at the end of an axis, 2 for the front, and 1 for both, for each axis that differs.
    """
    places = itertools.chain(place, itertools.repeat(place[-1]))
    starts = [
        0 if a == b else (size - keep) * next(places) // 2
        for size, keep, a, b in zip(tensor.shape, kept, one, other, strict=True)
    ]
    index = tuple(slice(start, start + keep) for start, keep in zip(starts, kept, strict=True))
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
