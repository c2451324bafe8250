"""Positions of a rank's shard in a parameter. The parameter may be a DTensor.

The noise of an element depends on its position in the full parameter, so it does not depend on the sharding. A mesh has
the data axes (replicas, shards) first, then optionally an axis that splits layers. A parameter is first split along the
axis that splits layers. The part that the layer uses is then divided into shards.
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
    """Rectangular part of a tensor.

    Attributes:
        start: First index along each axis.
        size: Length along each axis.
    """

    start: Shape
    size: Shape

    @classmethod
    def full(cls, shape: Sequence[int]) -> Box:
        """Returns the box of a full tensor."""
        return cls((0,) * len(shape), tuple(shape))

    @cached_property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.size)

    def part(self, axis: int, number: int, parts: int) -> Box:
        """Returns one of several parts along an axis, split as by ``torch.chunk``. The last parts may be empty."""
        length = self.size[axis]
        part_length = -(-length // parts)
        begin, end = min(number * part_length, length), min((number + 1) * part_length, length)
        start = (*self.start[:axis], self.start[axis] + begin, *self.start[axis + 1 :])
        return Box(start, (*self.size[:axis], end - begin, *self.size[axis + 1 :]))

    def intersection(self, other: Box) -> Box:
        """Returns the intersection of two boxes, which may be empty."""
        start = tuple(map(max, self.start, other.start))
        ends = (min(a + m, b + n) for a, m, b, n in zip(self.start, self.size, other.start, other.size, strict=True))
        return Box(start, tuple(max(0, end - begin) for begin, end in zip(start, ends, strict=True)))

    def slices_in(self, outer: Box) -> tuple[slice, ...]:
        """Returns the slices that select this box from a tensor that stores the outer box."""
        starts = (begin - first for begin, first in zip(self.start, outer.start, strict=True))
        return tuple(slice(start, start + length) for start, length in zip(starts, self.size, strict=True))


@dataclass(frozen=True)
class StridedPositions:
    """Positions in a vector that form rows of equal length at equal distances.

    Attributes:
        start: Position of the first element.
        length: Length of each row.
        rows: Number of rows.
        stride: Distance between the starts of two rows; 0 for a single row.
    """

    start: int
    length: int
    rows: int = 1
    stride: int = 0

    @cached_property
    def count(self) -> int:
        """Number of positions."""
        return self.rows * self.length

    def shifted(self, base: int) -> StridedPositions:
        """Returns the positions shifted by ``base``."""
        return replace(self, start=self.start + base)


@dataclass(frozen=True)
class LocalShard:
    """Part of a parameter's gradient sum that a rank computes, and the part that it keeps after the reduce-scatter.

    Attributes:
        shape: Shape of the full parameter.
        computed: Part that the rank computes: the full parameter, or its part of a split layer (tensor parallelism).
        kept: Part of ``computed`` that the rank keeps.
        axis: Axis along which ``computed`` is sharded, if parameters are sharded.
    """

    shape: Shape
    computed: Box
    kept: Box
    axis: int = 0

    @classmethod
    def full(cls, shape: Sequence[int]) -> LocalShard:
        """Returns the shard of a parameter that is full on every rank."""
        box = Box.full(shape)
        return cls(tuple(shape), box, box)

    @property
    def numel(self) -> int:
        """Number of elements of the full parameter."""
        return math.prod(self.shape)

    @property
    def positions(self) -> list[StridedPositions]:
        """Positions of ``kept`` in the flat parameter, in memory order."""
        partial_axes = [axis for axis, size in enumerate(self.kept.size) if size != self.shape[axis]]
        if not partial_axes or not self.kept.numel:
            return [StridedPositions(0, self.kept.numel)] if self.kept.numel else []
        strides = [math.prod(self.shape[axis + 1 :]) for axis in range(len(self.shape))]
        inner = partial_axes[-1]
        outer = partial_axes[-2] if len(partial_axes) > 1 else 0  # between these axes, rows have equal distances
        length, rows = self.kept.size[inner] * strides[inner], math.prod(self.kept.size[outer:inner])
        stride = strides[inner - 1] if rows > 1 else 0
        first = _product(self.kept.start, strides)
        indices = itertools.product(*map(range, self.kept.size[: min(outer, inner)]))
        return [StridedPositions(first + _product(index, strides), length, rows, stride) for index in indices]


def _product(index: Sequence[int], strides: Sequence[int]) -> int:
    """Returns the position of an element. The index may omit trailing axes."""
    return sum(i * stride for i, stride in zip(index, strides, strict=False))


def _full_shard(parameter: nn.Parameter) -> LocalShard:
    return LocalShard.full(parameter.shape)


def _identity(tensor: Tensor) -> Tensor:
    return tensor


@dataclass(frozen=True, eq=False)
class ParameterLayout:
    """Distribution of parameters over the ranks. By default, parameters are ordinary tensors, full on each rank.

    Attributes:
        local_shard: Returns the parts of a parameter's sum that this rank computes and keeps.
        gradient: Returns the gradient of a parameter for its kept shard; None if the kept shard is the gradient.
        local: Returns the local part of a tensor.
        data_axes: Number of axes of a DTensor's mesh that belong to replicas and shards.
    """

    local_shard: Callable[[nn.Parameter], LocalShard] = _full_shard
    gradient: Callable[[nn.Parameter, Tensor], Tensor] | None = None
    local: Callable[[Tensor], Tensor] = _identity
    data_axes: int = 0


FULL_ON_EACH_RANK = ParameterLayout()


def dtensor_layout(data_axes: int) -> ParameterLayout:
    """Returns the layout for parameters that include DTensors."""
    return ParameterLayout(partial(_local_shard, data_axes), _gradient, local_part, data_axes)


def is_dtensor(tensor: object) -> bool:
    """Returns True for a DTensor. Does not import the DTensor module, which takes a second."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def local_part(tensor: Any) -> Any:
    """Returns the local part of a DTensor, after waiting for it; other objects unchanged."""
    if is_dtensor(tensor):
        tensor = tensor._local_tensor
    return tensor.wait() if _is_asynchronous(tensor) else tensor


def is_first_copy(tensor: Any) -> bool:
    """Returns True if this rank is the first in a DTensor's mesh with this shard."""
    mesh = tensor.device_mesh
    replicated = [axis for axis, placement in enumerate(tensor.placements) if placement.is_replicate()]
    return all(mesh.get_local_rank(axis) == 0 for axis in replicated)


def _is_asynchronous(tensor: object) -> bool:
    module = sys.modules.get("torch.distributed._functional_collectives")
    return module is not None and isinstance(tensor, module.AsyncCollectiveTensor)


def _local_shard(data_axes: int, parameter: Any) -> LocalShard:
    if not is_dtensor(parameter):
        return LocalShard.full(parameter.shape)
    mesh = parameter.device_mesh
    divisions = [
        (mesh_axis, placement.dim, mesh.get_local_rank(mesh_axis), mesh.size(mesh_axis))
        for mesh_axis, placement in enumerate(parameter.placements)
        if not placement.is_replicate()
    ]
    computed, axis = Box.full(parameter.shape), 0
    for mesh_axis, dim, number, parts in divisions:
        computed = computed.part(dim, number, parts) if mesh_axis >= data_axes else computed
    kept = computed
    for mesh_axis, dim, number, parts in divisions:
        kept, axis = (kept.part(dim, number, parts), dim) if mesh_axis < data_axes else (kept, axis)
    return LocalShard(tuple(parameter.shape), computed, kept, axis)


def _gradient(parameter: Any, kept: Tensor) -> Tensor:
    if not is_dtensor(parameter):
        return kept
    from torch.distributed.tensor import DTensor

    return DTensor.from_local(
        kept, parameter.device_mesh, parameter.placements, run_check=False, shape=parameter.shape,
        stride=parameter.stride(),
    )  # fmt: skip
