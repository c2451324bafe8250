"""Where the part of a parameter that a rank holds lies in the whole.

Noise is addressed by places in the whole, so that it is the same however a parameter is cut.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

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

    @property
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

    @property
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
