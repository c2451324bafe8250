"""One flat float32 buffer for the clipped sums of all parameters, so that noise is one pass over memory."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from dpengine.distributed.local_shards import Held, Places
from dpengine.distributed.ranks import Seal
from dpengine.distributed.topology import SINGLE, Topology

from .outbox import BUCKET_BYTES, Outbox

_MOST_INDICES = 32  # cached: layers are stacked differently in batches of other shapes
_MOST_SPANS = 8  # copied one by one
_device, _dtype = operator.attrgetter("device"), operator.attrgetter("dtype")

Key = tuple[torch.device, torch.dtype]


@dataclass(frozen=True, eq=False)
class Columns:
    """Slices of several parameters in a vector, or in the columns of a matrix.

    Attributes:
        of: The slice of each parameter, in order.
    """

    of: Mapping[nn.Parameter, slice]


class Sums(Protocol):
    """Where sums of gradients go."""

    def add(self, parameter: nn.Parameter, total: Tensor, scale: float = 1.0) -> None:
        """Adds ``scale * total`` to one parameter's sum."""

    def fill(self, parameter: nn.Parameter, write: Callable[[Tensor, float], None]) -> None:
        """Has one parameter's sum written where it lies. See ``FlatBuffer.fill``."""

    def add_flat(self, columns: Columns, total_P: Tensor, scale: float) -> None:
        """Adds ``scale`` times the sums of several parameters that lie in one vector, and are complete with that."""
        for parameter, part in columns.of.items():
            self.add(parameter, total_P[part].view(parameter.shape), scale)
            self.complete(parameter)

    def complete(self, parameter: nn.Parameter) -> None:
        """Nothing more comes for a parameter in this pass. Who cannot know need not say."""


@dataclass(frozen=True)
class Stretch:
    """Sums that lie side by side, here and in the vector of all parameters that noise is addressed by.

    Attributes:
        key: Device and dtype of the memory that they lie in.
        at: Place of the first in that memory.
        places: In the vector of all.
    """

    key: Key
    at: int
    places: Places

    @cached_property
    def count(self) -> int:
        """How many they are."""
        return self.places.count

    def part(self, begin: int, stop: int) -> Stretch:
        """Some of the sums of one that is a single row."""
        return replace(self, at=self.at + begin, places=Places(self.places.start + begin, stop - begin))

    def followed_by(self, other: Stretch) -> bool:
        """Whether the other lies right behind this one, here and in the vector of all."""
        alike = self.key == other.key and self.places.rows == other.places.rows == 1
        apart = (other.at - self.at, other.places.start - self.places.start)
        return alike and apart == (self.count, self.count)


@dataclass(frozen=True, eq=False)
class Taken:
    """Sums that were handed over.

    Attributes:
        memory: Of the sums, by device and dtype, with the words behind it that travel with sums.
        flats: The same without these words.
        views: Each parameter's sum, in the flats.
        stretches: Where the sums lie in the vector of all, in its order: all of the flats.
        messages: How many numbers of a memory ranks add up at a time.
        whole: See ``FlatBuffer``.
    """

    memory: dict[Key, Tensor]
    flats: dict[Key, Tensor]
    views: dict[nn.Parameter, Tensor]
    stretches: list[Stretch]
    messages: dict[Key, int]
    whole: int

    def sums(self, stretch: Stretch) -> Tensor:
        """The sums of a stretch, ``(n,)``."""
        return self.flats[stretch.key][stretch.at : stretch.at + stretch.count]

    def add_noise(self, mechanism: Any, *, std: float, step: int, scale: float) -> None:
        """Adds the noise of a step to all sums and multiplies them by ``scale``, where there are no replicas."""
        for stretch in self.stretches:
            places = stretch.places
            cut = {"start": places.start, "rows": places.rows, "stride": places.stride}
            mechanism.add(self.sums(stretch), std=std, step=step, scale=scale, **cut)


@dataclass(frozen=True, eq=False)
class _Spans:
    """Where the numbers of a vector go in a memory.

    Attributes:
        key: Device and dtype of the memory.
        index: The place of each number.
        pieces: For each span of the memory its start, its end and the indices of its numbers. Empty if there are many.
    """

    key: Key
    index: Tensor
    pieces: Sequence[tuple[int, int, Tensor]]

    @classmethod
    def of(cls, key: Key, index: Tensor) -> _Spans:
        """Finds the spans. Indices are on the CPU."""
        places, order = index.sort()
        ends = [*(places.diff() != 1).nonzero().flatten().add(1).tolist(), len(places)]
        pieces = [] if len(ends) > _MOST_SPANS else list(zip([0, *ends], ends, strict=False))
        starts = [int(places[begin]) for begin, _ in pieces]
        found = [(at, at + e - b, order[b:e].to(key[0])) for at, (b, e) in zip(starts, pieces, strict=True)]
        return cls(key, index.to(key[0]), found)

    def copy(self, total_P: Tensor, memory: Tensor) -> None:
        """Writes the numbers to the memory."""
        for start, end, indices in self.pieces:  # five times as fast as index_copy_
            torch.index_select(total_P, 0, indices, out=memory[start:end])
        if not self.pieces:
            memory.index_copy_(0, self.index, total_P)


class FlatBuffer(Sums):
    """Clipped sums of many parameters, contiguous for each device and dtype.

    Sums are float32, or float64 for float64 parameters, whatever else the model's dtype is. Memory is had when the
    first sum comes, and is not cleared: the first sum of a parameter overwrites it, which saves two passes. Where ranks
    keep parts of parameters, sums of whole ones go through an outbox, and ``settle`` brings what is kept of them.

    Attributes:
        stretches: Where the sums lie in the vector of all parameters, in its order.
        messages: How many numbers of a memory ranks add up at a time: no more messages than where parameters fill
            buckets of ``BUCKET_BYTES`` as a whole, as they do in PyTorch.
        whole: Length of the vector of all parameters, where replicas share out its noise by places: ranks that hold
            parts of layers hold others as a whole, which must get theirs from the same replica. 0 where they share
            out what is held, which is the same on all.
    """

    def __init__(self, parameters: Iterable[nn.Parameter], topology: Topology = SINGLE):
        self._sizes: dict[Key, int] = {}
        self._places: dict[nn.Parameter, tuple[Key, int]] = {}
        self._held: dict[nn.Parameter, Held] = {}
        for parameter in parameters:  # their order addresses the noise
            key = (parameter.device, wide(parameter.dtype))
            held = self._held[parameter] = topology.layout.held(parameter)
            self._places[parameter] = (key, self._sizes.get(key, 0))
            self._sizes[key] = self._sizes.get(key, 0) + held.kept.numel
        self._shapes: dict[Key, dict[nn.Parameter, torch.Size]] = {key: {} for key in self._sizes}
        for parameter, (key, _) in self._places.items():
            self._shapes[key][parameter] = torch.Size(self._held[parameter].kept.size)
        self._where = list(map(_device, self._places)), list(map(_dtype, self._places))
        self.stretches = _stretches(self._places, self._held, list(self._sizes))
        self.whole = sum(held.numel for held in self._held.values()) if topology.splits.size > 1 else 0
        largest = dict.fromkeys(self._sizes, 0)
        for parameter, (key, _) in self._places.items():
            largest[key] = max(largest[key], self._held[parameter].kept.numel)
        self.messages = {key: size + BUCKET_BYTES // key[1].itemsize for key, size in largest.items()}
        self._seals = Seal.WORDS if topology.ranks > 1 else 0
        self._memory: dict[Key, Tensor] = {}
        self._views: dict[nn.Parameter, Tensor] = {}
        self._unwritten = set(self._places)
        self._spans: dict[Columns, _Spans | None] = {}
        self.outbox: Outbox | None = None
        if topology.shards.size > 1:
            dtypes = [(parameter, key[1]) for parameter, (key, _) in self._places.items()]
            self.outbox = Outbox(dtypes, topology, self._held)

    def __iter__(self) -> Iterator[tuple[nn.Parameter, Tensor]]:
        self._finish()
        return iter(self._views.items())

    @property
    def parameters(self) -> Mapping[nn.Parameter, object]:
        """The parameters, in order."""
        return self._places

    def add(self, parameter: nn.Parameter, total: Tensor, scale: float = 1.0) -> None:
        """Adds ``scale * total`` to one parameter's sum."""
        self.fill(parameter, lambda view, keep: _add(view, total, scale, keep))

    def fill(self, parameter: nn.Parameter, write: Callable[[Tensor, float], None]) -> None:
        """Calls ``write(view, keep)``, which must store ``view * keep`` plus the addend in ``view``.

        For the first sum ``keep`` is 0 and ``view`` is uninitialized, possibly not finite; later ``keep`` is 1.
        """
        if self.outbox is not None:
            self.outbox.fill(parameter, write, dtype=self._places[parameter][0][1])
            return
        self._write(parameter, write)

    def add_flat(self, columns: Columns, total_P: Tensor, scale: float) -> None:
        """Adds ``scale`` times the sums of several parameters that lie in one vector."""
        if columns not in self._spans:
            if len(self._spans) >= _MOST_INDICES:
                self._spans.clear()
            self._spans[columns] = self._spans_of(columns)
        spans = self._spans[columns]
        if spans is None:
            super().add_flat(columns, total_P, scale)
            return
        if not self._memory:
            self._allocate()
        memory = self._memory[spans.key]
        total_P = total_P if scale == 1.0 else total_P * scale
        if len(self._unwritten) == len(self._places):
            spans.copy(total_P, memory)
        else:
            for parameter in self._unwritten.intersection(columns.of):
                self._views[parameter].zero_()
            memory.index_add_(0, spans.index, total_P)
        self._unwritten.difference_update(columns.of)

    def _spans_of(self, columns: Columns) -> _Spans | None:
        """Returns the places for the numbers of a vector; None if they go to several memories."""
        places = [self._places[parameter] for parameter in columns.of]
        if self.outbox is not None or len({key for key, _ in places}) > 1:
            return None
        steps = [torch.arange(at, at + p.numel()) for p, (_, at) in zip(columns.of, places, strict=True)]
        return _Spans.of(places[0][0], torch.cat(steps))

    def _write(self, parameter: nn.Parameter, write: Callable[[Tensor, float], None]) -> None:
        if not self._memory:
            self._allocate()
        write(self._views[parameter], 0.0 if parameter in self._unwritten else 1.0)
        self._unwritten.discard(parameter)

    def begin(self, facts: tuple[object, ...], *, wait: bool = False) -> None:
        """Begins the sum of a pass, on all ranks. ``wait`` keeps whole sums for further passes, until ``settle``."""
        if self.outbox is not None:
            self.outbox.begin(facts, wait=wait)

    def complete(self, parameter: nn.Parameter) -> None:
        """Nothing more comes for a parameter in this pass."""
        if self.outbox is not None:
            self.outbox.complete(parameter)

    def settle(self) -> None:
        """Brings what other ranks summed of the parts that are kept here. All ranks call it after the same passes."""
        if self.outbox is None:
            return
        for parameter, kept in self.outbox.deliver():
            self._write(parameter, lambda view, keep, kept=kept: _add(view, kept, 1.0, keep))  # type: ignore[misc]

    @property
    def waits(self) -> bool:
        """Whether ``settle`` is still to come, on all ranks."""
        return self.outbox is not None and self.outbox.waits

    @property
    def flats(self) -> dict[Key, Tensor]:
        """The sums as they are now, flat, by device and dtype."""
        self._finish()
        return {key: memory[: self._sizes[key]] for key, memory in self._memory.items()}

    def _allocate(self) -> None:
        for key, size in self._sizes.items():
            self._memory[key] = torch.empty(size + self._seals, device=key[0], dtype=key[1])
        for key, shapes in self._shapes.items():
            sums = self._memory[key][: self._sizes[key]]
            # Views share a version counter: a write to one gradient shows in all of them.
            parts = sums.split_with_sizes([shape.numel() for shape in shapes.values()])
            for (parameter, shape), part in zip(shapes.items(), parts, strict=True):
                if len(shape) > 1:
                    part = part.view(*shape)  # which is faster than view(shape)
                self._views[parameter] = part if shape else part.view(())

    def _finish(self) -> None:
        if not self._memory:
            self._allocate()
        for parameter in self._unwritten:
            self._views[parameter].zero_()

    @property
    def clean(self) -> bool:
        """Whether nothing was added since the sums were destroyed or taken."""
        return len(self._unwritten) == len(self._places) and (self.outbox is None or self.outbox.empty)

    def is_finite(self) -> bool:
        """Whether every sum is a number."""
        return all(bool(self._views[p].isfinite().all()) for p in self._places.keys() - self._unwritten)

    def take(self) -> Taken:
        """Hands the sums over, and starts again in other memory."""
        flats = self.flats  # has the memory made, if there was no sum
        taken = Taken(self._memory, flats, self._views, self.stretches, self.messages, self.whole)
        self._memory, self._views, self._unwritten = {}, {}, set(self._places)
        return taken

    def zero(self) -> None:
        """Destroys the sums."""
        for parameter in self._places.keys() - self._unwritten:
            self._views[parameter].zero_()
        self._unwritten = set(self._places)
        if self.outbox is not None:
            self.outbox.clear()

    def fits(self, parameters: Iterable[nn.Parameter]) -> bool:
        """Returns True if the buffer is for exactly these parameters, where they are now."""
        listed = list(parameters)
        if len(listed) != len(self._places) or not all(map(operator.is_, listed, self._places)):
            return False
        devices, dtypes = self._where
        if list(map(_device, listed)) != devices:
            return False
        now = list(map(_dtype, listed))
        return now == dtypes or [wide(dtype) for dtype in now] == [wide(dtype) for dtype in dtypes]


def wide(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which norms and sums of such gradients are formed."""
    return torch.float64 if dtype is torch.float64 else torch.float32


def _stretches(
    places: Mapping[nn.Parameter, tuple[Key, int]], held: Mapping[nn.Parameter, Held], keys: list[Key]
) -> list[Stretch]:
    """Where sums lie in the vector of all: devices and dtypes one after the other, and parameters in their order."""
    found: list[Stretch] = []
    base = 0
    for parameter in sorted(places, key=lambda p: keys.index(places[p][0])):  # a stable sort
        key, at = places[parameter]
        for one in held[parameter].places:
            stretch = Stretch(key, at, one.behind(base))
            at += stretch.count
            if found and found[-1].followed_by(stretch):
                joined = Places(found[-1].places.start, found[-1].count + stretch.count)
                found[-1] = replace(found[-1], places=joined)
            else:
                found.append(stretch)
        base += held[parameter].numel
    return found


def _add(view: Tensor, total: Tensor, scale: float, keep: float) -> None:
    total = total.view(view.shape)
    if keep:
        view.add_(total, alpha=scale)
    elif scale == 1.0:
        view.copy_(total)
    else:
        torch.mul(total.to(view.dtype), scale, out=view)
