"""Where the part of a parameter that a rank holds lies in the whole.

Noise is addressed by places in the whole, so that it is the same however a parameter is cut.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

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
    def span(self) -> tuple[int, int]:
        """First place in the flat parameter that the smallest run of whole rows around ``kept`` has, and its length."""
        if not self.shape or not self.kept.numel:
            return 0, self.kept.numel
        row = math.prod(self.shape[1:])
        return self.kept.start[0] * row, self.kept.size[0] * row

    @property
    def cut(self) -> tuple[slice, ...] | None:
        """Where ``kept`` lies in its span, viewed as rows; None where it is all of it."""
        if self.kept.size[1:] == self.shape[1:] or not self.kept.numel:
            return None
        inside = zip(self.kept.start[1:], self.kept.size[1:], strict=True)
        return (slice(None), *(slice(start, start + size) for start, size in inside))
