"""Flat buffer for the clipped sums of all parameters, so that noise is added in one pass over memory."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from dpengine.distributed.local_shards import LocalShard, StridedPositions
from dpengine.distributed.ranks import RankFingerprint
from dpengine.distributed.topology import SINGLE, Topology

from .reduce_scatter import BUCKET_BYTES, ReduceScatterBuckets
from .rows import wide

_MAX_INDICES = 2**25  # indices of all cached scatters; stacks of layers depend on the shapes of the batch
_MAX_RUNS = 8  # contiguous runs that are copied one by one
_device, _dtype = operator.attrgetter("device"), operator.attrgetter("dtype")

Key = tuple[torch.device, torch.dtype]


@dataclass(frozen=True, eq=False)
class Columns:
    """Slices of several parameters in a vector, or in the columns of a matrix.

    Attributes:
        slices: Slice of each parameter, in order.
    """

    slices: Mapping[nn.Parameter, slice]

    @cached_property
    def parameters(self) -> frozenset[nn.Parameter]:
        """The parameters."""
        return frozenset(self.slices)

    @cached_property
    def count(self) -> int:
        """Number of elements."""
        return max((part.stop for part in self.slices.values()), default=0)


class Sums(Protocol):
    """Destination of gradient sums."""

    def add(self, parameter: nn.Parameter, total: Tensor, scale: float = 1.0) -> None:
        """Adds ``scale * total`` to the sum of one parameter."""

    def fill(self, parameter: nn.Parameter, write: Callable[[Tensor, float], None]) -> None:
        """Calls ``write`` to update the sum of one parameter in place. See ``FlatBuffer.fill``."""

    def add_flat(self, columns: Columns, total_P: Tensor, scale: float) -> None:
        """Adds ``scale`` times the sums of several parameters, stored in one vector, and completes them."""
        for parameter, part in columns.slices.items():
            self.add(parameter, total_P[part].view(parameter.shape), scale)
            self.complete(parameter)

    def complete(self, parameter: nn.Parameter) -> None:
        """Marks the sum of a parameter as complete for this pass. The call is optional."""


@dataclass(frozen=True)
class BufferSpan:
    """Contiguous part of a buffer, and its positions in the vector of all parameters, which address the noise.

    Attributes:
        key: Device and dtype of the memory.
        offset: Index of the first number in the memory.
        positions: Positions in the vector of all parameters.
    """

    key: Key
    offset: int
    positions: StridedPositions

    @cached_property
    def count(self) -> int:
        """Number of elements."""
        return self.positions.count

    def part(self, begin: int, stop: int) -> BufferSpan:
        """Returns a part of a span whose positions are contiguous."""
        return replace(
            self, offset=self.offset + begin, positions=StridedPositions(self.positions.start + begin, stop - begin)
        )

    def followed_by(self, other: BufferSpan) -> bool:
        """Returns True if the other span starts at the end of this one, in the memory and in the vector."""
        contiguous = self.key == other.key and self.positions.rows == other.positions.rows == 1
        distances = (other.offset - self.offset, other.positions.start - self.positions.start)
        return contiguous and distances == (self.count, self.count)


@dataclass(frozen=True, eq=False)
class DrainedBuffer:
    """Sums that were moved out of a `FlatBuffer`.

    Attributes:
        memory: Memory of the sums, by device and dtype, followed by the words of the rank fingerprint.
        flats: The same memory without these words.
        views: Sum of each parameter, as a view of the memory.
        spans: Spans that cover the flats, in the order of the vector of all parameters.
        message_sizes: Number of elements of a memory that ranks sum in one message.
        total_numel: See ``FlatBuffer``.
    """

    memory: dict[Key, Tensor]
    flats: dict[Key, Tensor]
    views: dict[nn.Parameter, Tensor]
    spans: list[BufferSpan]
    message_sizes: dict[Key, int]
    total_numel: int

    def sums(self, span: BufferSpan) -> Tensor:
        """Returns the sums of a span, ``(n,)``."""
        return self.flats[span.key][span.offset : span.offset + span.count]

    def add_noise(self, mechanism: Any, *, std: float, step: int, scale: float) -> None:
        """Adds the noise of a step to all sums and multiplies them by ``scale``. For topologies without replicas."""
        for span in self.spans:
            positions = span.positions
            fields = {"start": positions.start, "rows": positions.rows, "stride": positions.stride}
            mechanism.add(self.sums(span), std=std, step=step, scale=scale, **fields)


@dataclass(frozen=True, eq=False)
class _Scatter:
    """Scatter of a vector into a memory.

    Attributes:
        key: Device and dtype of the memory.
        index: Index in the memory for each element of the vector.
        runs: Start, end and elements of each contiguous run of the memory. Empty if there are many runs.
    """

    key: Key
    index: Tensor
    runs: Sequence[tuple[int, int, Tensor]]

    @classmethod
    def of(cls, key: Key, index: Tensor) -> _Scatter:
        """Finds the contiguous runs of an index that is on the CPU."""
        targets, order = index.sort()
        ends = [*(targets.diff() != 1).nonzero().flatten().add(1).tolist(), len(targets)]
        bounds = [] if len(ends) > _MAX_RUNS else list(zip([0, *ends], ends, strict=False))
        starts = [int(targets[begin]) for begin, _ in bounds]
        runs = [(start, start + e - b, order[b:e].to(key[0])) for start, (b, e) in zip(starts, bounds, strict=True)]
        return cls(key, index.to(key[0]), runs)

    def copy(self, total_P: Tensor, memory: Tensor) -> None:
        """Writes the vector to the memory."""
        for start, end, indices in self.runs:  # five times as fast as index_copy_
            torch.index_select(total_P, 0, indices, out=memory[start:end])
        if not self.runs:
            memory.index_copy_(0, self.index, total_P)


class FlatBuffer(Sums):
    """Clipped sums of many parameters, contiguous for each device and dtype.

    Sums are float64 for float64 parameters and float32 for all others. Memory is allocated for the first sum and is not
    cleared: the first sum of a parameter overwrites it, which saves two passes. If parameters are sharded, full sums
    go through reduce-scatter buckets, and ``settle`` adds the local shards to the buffer.

    Attributes:
        spans: Spans that cover the buffer, in the order of the vector of all parameters.
        message_sizes: Number of elements of a memory that ranks sum in one message. There are at most as many messages
            as in PyTorch, where whole parameters fill buckets of ``BUCKET_BYTES``.
        total_numel: Length of the vector of all parameters if replicas divide the noise by positions in this vector.
            Tensor parallelism requires this, because every rank holds some full parameters, whose copies must all get
            their noise from the same replica. 0 if replicas divide the local sums, which are equal on all replicas.
    """

    def __init__(self, parameters: Iterable[nn.Parameter], topology: Topology = SINGLE):
        self._sizes: dict[Key, int] = {}
        self._locations: dict[nn.Parameter, tuple[Key, int]] = {}  # memory, and offset in the memory
        self._shards: dict[nn.Parameter, LocalShard] = {}
        for parameter in parameters:  # their order addresses the noise
            key = (parameter.device, wide(parameter.dtype))
            shard = self._shards[parameter] = topology.layout.local_shard(parameter)
            self._locations[parameter] = (key, self._sizes.get(key, 0))
            self._sizes[key] = self._sizes.get(key, 0) + shard.kept.numel
        self._shapes: dict[Key, dict[nn.Parameter, torch.Size]] = {key: {} for key in self._sizes}
        for parameter, (key, _) in self._locations.items():
            self._shapes[key][parameter] = torch.Size(self._shards[parameter].kept.size)
        self._numels = {key: [s.numel() for s in shapes.values()] for key, shapes in self._shapes.items()}
        self._devices_and_dtypes = list(map(_device, self._locations)), list(map(_dtype, self._locations))
        self.spans = _spans(self._locations, self._shards, list(self._sizes))
        self.total_numel = sum(shard.numel for shard in self._shards.values()) if topology.splits.size > 1 else 0
        largest = dict.fromkeys(self._sizes, 0)
        for parameter, (key, _) in self._locations.items():
            largest[key] = max(largest[key], self._shards[parameter].kept.numel)
        self.message_sizes = {key: size + BUCKET_BYTES // key[1].itemsize for key, size in largest.items()}
        self._fingerprint_words = RankFingerprint.WORDS if topology.ranks > 1 else 0
        self._memory: dict[Key, Tensor] = {}
        self._views: dict[nn.Parameter, Tensor] = {}
        self._unwritten = set(self._locations)
        self._scatters: dict[Columns, _Scatter | None] = {}
        self.buckets: ReduceScatterBuckets | None = None
        if topology.shards.size > 1:
            dtypes = [(parameter, key[1]) for parameter, (key, _) in self._locations.items()]
            self.buckets = ReduceScatterBuckets(dtypes, topology, self._shards)

    def __iter__(self) -> Iterator[tuple[nn.Parameter, Tensor]]:
        self._finish()
        return iter(self._views.items())

    @property
    def parameters(self) -> Mapping[nn.Parameter, object]:
        """Parameters of the buffer, in order."""
        return self._locations

    def add(self, parameter: nn.Parameter, total: Tensor, scale: float = 1.0) -> None:
        """Adds ``scale * total`` to the sum of one parameter."""
        self.fill(parameter, lambda view, keep: _add(view, total, scale, keep))

    def fill(self, parameter: nn.Parameter, write: Callable[[Tensor, float], None]) -> None:
        """Calls ``write(view, keep)``, which must store ``view * keep`` plus the addend in ``view``.

        For the first sum ``keep`` is 0 and ``view`` is uninitialized, possibly not finite; later ``keep`` is 1.
        """
        if self.buckets is not None:
            self.buckets.fill(parameter, write, dtype=self._locations[parameter][0][1])
            return
        self._write(parameter, write)

    def add_flat(self, columns: Columns, total_P: Tensor, scale: float) -> None:
        """Adds ``scale`` times the sums of several parameters, stored in one vector."""
        if columns not in self._scatters:
            if sum(len(cached.index) for cached in self._scatters.values() if cached) >= _MAX_INDICES:
                self._scatters.clear()
            self._scatters[columns] = self._scatter_of(columns)
        scatter = self._scatters[columns]
        if scatter is None:
            super().add_flat(columns, total_P, scale)
            return
        if not self._memory:
            self._allocate()
        memory = self._memory[scatter.key]
        total_P = total_P if scale == 1.0 else total_P * scale
        unwritten = self._unwritten.intersection(columns.parameters)
        if len(unwritten) == len(columns.parameters):
            scatter.copy(total_P, memory)
        else:
            for parameter in unwritten:
                self._views[parameter].zero_()
            memory.index_add_(0, scatter.index, total_P)
        self._unwritten -= unwritten

    def add_all(self, totals: Sequence[Tensor], scale: float) -> None:
        """Adds ``scale`` times the sums of all parameters: one vector for each memory, in the order of the buffer."""
        if [len(total) for total in totals] != list(self._sizes.values()):
            raise ValueError("FlatBuffer.add_all: the sums are not those of the parameters of the buffer.")
        is_first = self.clean
        if not self._memory:
            self._allocate()
        if not is_first:
            self._finish()
        for (key, size), total in zip(self._sizes.items(), totals, strict=True):
            memory = self._memory[key][:size]
            if is_first:
                torch.mul(total, scale, out=memory)
            else:
                memory.add_(total, alpha=scale)
        self._unwritten = set()

    def _scatter_of(self, columns: Columns) -> _Scatter | None:
        """Returns the scatter of a vector; None if its elements go to several memories."""
        locations = [self._locations[parameter] for parameter in columns.slices]
        if self.buckets is not None or len({key for key, _ in locations}) > 1:
            return None
        starts = zip(columns.slices, locations, strict=True)
        indices = [torch.arange(start, start + p.numel()) for p, (_, start) in starts]
        return _Scatter.of(locations[0][0], torch.cat(indices))

    def _write(self, parameter: nn.Parameter, write: Callable[[Tensor, float], None]) -> None:
        if not self._memory:
            self._allocate()
        write(self._views[parameter], 0.0 if parameter in self._unwritten else 1.0)
        self._unwritten.discard(parameter)

    def begin(self, fingerprint: tuple[object, ...], *, defer: bool = False) -> None:
        """Begins the sums of a pass, on all ranks. ``defer`` postpones the reduce-scatter until ``settle``."""
        if self.buckets is not None:
            self.buckets.begin(fingerprint, defer=defer)

    def complete(self, parameter: nn.Parameter) -> None:
        """Marks the sum of a parameter as complete for this pass."""
        if self.buckets is not None:
            self.buckets.complete(parameter)

    def settle(self) -> None:
        """Completes the reduce-scatter and adds the local shards. All ranks must call it after the same passes."""
        if self.buckets is None:
            return
        for parameter, kept in self.buckets.deliver():
            self._write(parameter, lambda view, keep, kept=kept: _add(view, kept, 1.0, keep))  # type: ignore[misc]

    @property
    def deferred(self) -> bool:
        """True if the reduce-scatter was postponed until ``settle``, on all ranks."""
        return self.buckets is not None and self.buckets.deferred

    @property
    def flats(self) -> dict[Key, Tensor]:
        """Current sums, flat, by device and dtype."""
        self._finish()
        return {key: memory[: self._sizes[key]] for key, memory in self._memory.items()}

    def _allocate(self) -> None:
        for key, size in self._sizes.items():
            self._memory[key] = torch.empty(size + self._fingerprint_words, device=key[0], dtype=key[1])
        for key, shapes in self._shapes.items():
            sums = self._memory[key][: self._sizes[key]]
            # Views share a version counter: a write to one gradient shows in all of them.
            parts = zip(sums.split_with_sizes(self._numels[key]), shapes.values(), strict=True)
            # view(*shape) is faster than view(shape), and rejects an empty shape.
            views = [part if len(s) == 1 else part.view(*s) if s else part.view(()) for part, s in parts]
            self._views.update(zip(shapes, views, strict=True))

    def _finish(self) -> None:
        if not self._memory:
            self._allocate()
        for parameter in self._unwritten:
            self._views[parameter].zero_()

    @property
    def clean(self) -> bool:
        """True if nothing was added since the sums were zeroed or drained."""
        return len(self._unwritten) == len(self._locations) and (self.buckets is None or self.buckets.empty)

    def is_finite(self) -> bool:
        """Returns True if every sum is finite."""
        return all(bool(self._views[p].isfinite().all()) for p in self._locations.keys() - self._unwritten)

    def drain(self) -> DrainedBuffer:
        """Moves the sums out of the buffer. The next sums get new memory."""
        flats = self.flats  # allocates the memory if there was no sum
        drained = DrainedBuffer(self._memory, flats, self._views, self.spans, self.message_sizes, self.total_numel)
        self._memory, self._views, self._unwritten = {}, {}, set(self._locations)
        return drained

    def zero(self) -> None:
        """Zeroes the sums."""
        for parameter in self._locations.keys() - self._unwritten:
            self._views[parameter].zero_()
        self._unwritten = set(self._locations)
        if self.buckets is not None:
            self.buckets.clear()

    def fits(self, parameters: Iterable[nn.Parameter]) -> bool:
        """Returns True if the buffer is for exactly these parameters, with their current devices and dtypes."""
        listed = list(parameters)
        if len(listed) != len(self._locations) or not all(map(operator.is_, listed, self._locations)):
            return False
        devices, dtypes = self._devices_and_dtypes
        if list(map(_device, listed)) != devices:
            return False
        current = list(map(_dtype, listed))
        return current == dtypes or [wide(dtype) for dtype in current] == [wide(dtype) for dtype in dtypes]


def _spans(
    locations: Mapping[nn.Parameter, tuple[Key, int]], shards: Mapping[nn.Parameter, LocalShard], keys: list[Key]
) -> list[BufferSpan]:
    """Returns the spans of all sums. The vector of all parameters is ordered by device and dtype, then by parameter."""
    spans: list[BufferSpan] = []
    base = 0
    for parameter in sorted(locations, key=lambda p: keys.index(locations[p][0])):  # a stable sort
        key, offset = locations[parameter]
        for shard_positions in shards[parameter].positions:
            span = BufferSpan(key, offset, shard_positions.shifted(base))
            offset += span.count
            if spans and spans[-1].followed_by(span):
                merged = StridedPositions(spans[-1].positions.start, spans[-1].count + span.count)
                spans[-1] = replace(spans[-1], positions=merged)
            else:
                spans.append(span)
        base += shards[parameter].numel
    return spans


def _add(view: Tensor, total: Tensor, scale: float, keep: float) -> None:
    total = total.view(view.shape)
    if keep:
        view.add_(total, alpha=scale)
    elif scale == 1.0:
        view.copy_(total)
    else:
        torch.mul(total.to(view.dtype), scale, out=view)
