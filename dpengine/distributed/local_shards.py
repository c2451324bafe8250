"""Position of a rank's part of a parameter in the whole, also for DTensors.

Noise is addressed by positions in the whole, so it does not depend on how a parameter is cut. A mesh has the axes of
the data (replicas, shards) first, then perhaps one that splits layers. A parameter is cut along the latter first; the
part that its layer uses is then cut again for the shards.
"""

from __future__ import annotations

import itertools
import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

from torch import Tensor, nn

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Box:
    """A part of a tensor: along each axis, where it begins and how long it is.

    Attributes:
        start: Along each axis.
        size: Along each axis.
    """

    start: Shape
    size: Shape

    @classmethod
    def whole(cls, shape: Sequence[int]) -> Box:
        """All of a tensor."""
        return cls((0,) * len(shape), tuple(shape))

    @cached_property
    def numel(self) -> int:
        """Numbers in the part."""
        return math.prod(self.size)

    def part(self, axis: int, number: int, parts: int) -> Box:
        """One of several parts along an axis, as ``torch.chunk`` cuts them; the last ones may be empty."""
        length = self.size[axis]
        each = -(-length // parts)
        begin, end = min(number * each, length), min((number + 1) * each, length)
        start = (*self.start[:axis], self.start[axis] + begin, *self.start[axis + 1 :])
        return Box(start, (*self.size[:axis], end - begin, *self.size[axis + 1 :]))

    def common(self, other: Box) -> Box:
        """What both have; empty if they have nothing in common."""
        start = tuple(map(max, self.start, other.start))
        ends = (min(a + m, b + n) for a, m, b, n in zip(self.start, self.size, other.start, other.size, strict=True))
        return Box(start, tuple(max(0, end - begin) for begin, end in zip(start, ends, strict=True)))

    def inside(self, outer: Box) -> tuple[slice, ...]:
        """Where this part lies in a tensor that has the outer one."""
        places = (begin - first for begin, first in zip(self.start, outer.start, strict=True))
        return tuple(slice(place, place + length) for place, length in zip(places, self.size, strict=True))


@dataclass(frozen=True)
class Places:
    """Places of numbers in a long vector: rows of one length, equally far apart.

    Attributes:
        start: Of the first.
        length: Of each row.
        rows: How many.
        stride: From where a row begins to where the next one does; 0 for a single row.
    """

    start: int
    length: int
    rows: int = 1
    stride: int = 0

    @cached_property
    def count(self) -> int:
        """How many they are."""
        return self.rows * self.length

    def behind(self, base: int) -> Places:
        """The same places in a vector in which so many come before."""
        return replace(self, start=self.start + base)


@dataclass(frozen=True)
class Held:
    """How one parameter's sum is formed on a rank, and what the rank keeps of it once all ranks' sums are added.

    Attributes:
        shape: Of the whole parameter.
        formed: What the rank forms: all, or its share where layers are split (tensor parallel).
        kept: What it keeps of that.
        axis: Along which ``kept`` is cut from ``formed``, where ranks keep parts.
    """

    shape: Shape
    formed: Box
    kept: Box
    axis: int = 0

    @classmethod
    def whole(cls, shape: Sequence[int]) -> Held:
        """A parameter that a rank holds as a whole."""
        box = Box.whole(shape)
        return cls(tuple(shape), box, box)

    @property
    def numel(self) -> int:
        """Numbers in the whole parameter."""
        return math.prod(self.shape)

    @property
    def places(self) -> list[Places]:
        """Where ``kept`` lies in the flat parameter, in the order in which it lies in memory."""
        cut = [axis for axis, size in enumerate(self.kept.size) if size != self.shape[axis]]
        if not cut or not self.kept.numel:
            return [Places(0, self.kept.numel)] if self.kept.numel else []
        strides = [math.prod(self.shape[axis + 1 :]) for axis in range(len(self.shape))]
        inner, outer = cut[-1], cut[-2] if len(cut) > 1 else 0  # from outer to inner, rows are equally far apart
        length, rows = self.kept.size[inner] * strides[inner], math.prod(self.kept.size[outer:inner])
        stride = strides[inner - 1] if rows > 1 else 0
        first = _product(self.kept.start, strides)
        indices = itertools.product(*map(range, self.kept.size[: min(outer, inner)]))
        return [Places(first + _product(index, strides), length, rows, stride) for index in indices]


def _product(index: Sequence[int], strides: Sequence[int]) -> int:
    """Where an element lies; leading axes are enough."""
    return sum(i * stride for i, stride in zip(index, strides, strict=False))


def _whole(parameter: nn.Parameter) -> Held:
    return Held.whole(parameter.shape)


def _itself(tensor: Tensor) -> Tensor:
    return tensor


@dataclass(frozen=True, eq=False)
class ParameterLayout:
    """How parameters are distributed over the ranks. The default is that of ordinary tensors, whole on each rank.

    Attributes:
        held: Returns how the sum of a parameter is formed and kept on this rank.
        gradient: Returns the gradient of a parameter, given the part of it that is kept; None if that is all of it.
        local: Returns the part of a tensor that is on this rank.
        data_axes: Number of axes of a DTensor's mesh that belong to replicas and shards.
    """

    held: Callable[[nn.Parameter], Held] = _whole
    gradient: Callable[[nn.Parameter, Tensor], Tensor] | None = None
    local: Callable[[Tensor], Tensor] = _itself
    data_axes: int = 0


WHOLE = ParameterLayout()


def dtensor_layout(data_axes: int) -> ParameterLayout:
    """Returns the layout of parameters all or some of which are DTensors."""
    return ParameterLayout(partial(_held, data_axes), _gradient, local_part, data_axes)


def is_dtensor(tensor: object) -> bool:
    """Whether a tensor is a DTensor. There are none before their module was imported, which takes a second."""
    known = sys.modules.get("torch.distributed.tensor")
    return known is not None and isinstance(tensor, known.DTensor)


def local_part(tensor: Any) -> Any:
    """The part of a DTensor that is here, when it has arrived; anything else as it is."""
    if is_dtensor(tensor):
        tensor = tensor._local_tensor
    return tensor.wait() if _is_arriving(tensor) else tensor


def is_first_copy(tensor: Any) -> bool:
    """Whether this rank is the first of those of a DTensor's mesh that hold the same part of it."""
    mesh = tensor.device_mesh
    copied = [at for at, placement in enumerate(tensor.placements) if placement.is_replicate()]
    return all(mesh.get_local_rank(at) == 0 for at in copied)


def _is_arriving(tensor: object) -> bool:
    known = sys.modules.get("torch.distributed._functional_collectives")
    return known is not None and isinstance(tensor, known.AsyncCollectiveTensor)


def _held(data_axes: int, parameter: Any) -> Held:
    if not is_dtensor(parameter):
        return Held.whole(parameter.shape)
    whole = Box.whole(parameter.shape)
    mesh = parameter.device_mesh
    cuts = [
        (at, placement.dim, mesh.get_local_rank(at), mesh.size(at))
        for at, placement in enumerate(parameter.placements)
        if not placement.is_replicate()
    ]
    formed, axis = whole, 0
    for at, dim, number, parts in cuts:
        formed = formed.part(dim, number, parts) if at >= data_axes else formed
    kept = formed
    for at, dim, number, parts in cuts:
        kept, axis = (kept.part(dim, number, parts), dim) if at < data_axes else (kept, axis)
    return Held(tuple(parameter.shape), formed, kept, axis)


def _gradient(parameter: Any, kept: Tensor) -> Tensor:
    if not is_dtensor(parameter):
        return kept
    from torch.distributed.tensor import DTensor

    return DTensor.from_local(
        kept, parameter.device_mesh, parameter.placements, run_check=False, shape=parameter.shape,
        stride=parameter.stride(),
    )  # fmt: skip
