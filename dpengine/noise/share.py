"""Noise on the sums of a run: each rank draws that of its own share, and each number gets its noise once."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise

from torch import Tensor

from dpengine.distributed.local_shards import Places
from dpengine.distributed.ranks import RankFingerprint, Ranks
from dpengine.grad_modes.flat_buffer import BufferSpan, DrainedBuffer, FlatBuffer, Key

from .mechanism import AbstractNoise


def add_noise(
    taken: DrainedBuffer,
    mechanism: AbstractNoise,
    *,
    std: float,
    step: int,
    scale: float,
    replicas: Ranks,
    facts: tuple[object, ...],
) -> None:
    """Adds a step's noise to sums, multiplies them by a public constant, and adds them up over replicas, in place.

    ``std`` is in units of the sums, before ``scale``. Other ``facts`` on another replica raise MechanismMismatchError.
    Noise comes before the exchange, with full standard deviation on each rank's share and nowhere else; so it costs no
    message of its own, and a rank draws and keeps what it needs for its share only. Each message leaves as soon as
    its noise is in it, while that of the next is drawn.
    """
    if replicas.size > 1:
        for memory in taken.memory.values():
            RankFingerprint.write(memory[-RankFingerprint.WORDS :], facts)
    waits, done = [], 0
    unsent = list(_messages(taken)) if replicas.size > 1 else []
    for span, mine in _cut(taken.spans, replicas, taken.message_sizes, taken.total_numel):
        sums, places = taken.sums(span), span.places
        if mine:
            cut = {"start": places.start, "rows": places.rows, "stride": places.stride}
            mechanism.add(sums, std=std, step=step, scale=scale, **cut)
        else:
            sums.mul_(scale)
        done += span.count
        while unsent and unsent[0][0] <= done:
            waits.append(replicas.all_reduce(unsent.pop(0)[1]))
    for _, part in unsent:  # where there is nothing but the words
        waits.append(replicas.all_reduce(part))
    for wait in waits:
        wait()
    if replicas.size > 1:
        for memory in taken.memory.values():
            RankFingerprint.check(memory[-RankFingerprint.WORDS :], replicas.size)


def drawn_places(buffer: FlatBuffer, replicas: Ranks) -> list[Places]:
    """Which places of the vector of all parameters this rank draws noise for."""
    cut = _cut(buffer.spans, replicas, buffer.message_sizes, buffer.total_numel)
    return [span.places for span, mine in cut if mine]


def _messages(taken: DrainedBuffer) -> Iterator[tuple[int, Tensor]]:
    """Yields each message to the other replicas, and how many of all sums must have their noise before it leaves."""
    before = 0
    for key, memory in taken.memory.items():
        size, each = len(taken.flats[key]), taken.message_sizes[key]
        for at, part in zip(range(0, len(memory), each), memory.split(each), strict=True):
            yield before + min(at + each, size), part
        before += size


def _cut(
    spans: Sequence[BufferSpan], replicas: Ranks, messages: Mapping[Key, int], whole: int
) -> Iterator[tuple[BufferSpan, bool]]:
    """The spans, cut so that each part is this rank's or another's to draw noise for, and lies in one message."""
    if replicas.size == 1:
        for span in spans:
            yield span, True
        return
    total = whole or sum(span.count for span in spans)
    first, end = (total * rank // replicas.size for rank in (replicas.rank, replicas.rank + 1))
    done = 0
    for span in spans:
        begin_at = span.places.start if whole else done  # what the shares are cut by
        if span.places.rows > 1:  # one of several rows stays whole
            yield span, first <= begin_at < end
        else:
            low, high = (min(max(edge - begin_at, 0), span.count) for edge in (first, end))
            each = messages[span.key]
            ends = range(each - span.offset % each, span.count, each)  # of the messages, where one begins at 0
            edges = sorted({0, low, high, span.count, *ends})
            for begin, stop in pairwise(edges):
                yield span.part(begin, stop), low <= begin < high
        done += span.count
