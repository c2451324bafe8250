"""Noise on the sums of a run: each rank draws that of its own share, and each number gets its noise once."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise

from torch import Tensor

from dpengine.distributed.local_shards import Places
from dpengine.distributed.ranks import Ranks, Seal
from dpengine.grad_modes.flat_buffer import FlatBuffer, Key, Stretch, Taken

from .mechanism import AbstractNoise


def add_noise(
    taken: Taken,
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
            Seal.write(memory[-Seal.WORDS :], facts)
    waits, done = [], 0
    unsent = list(_messages(taken)) if replicas.size > 1 else []
    for stretch, mine in _cut(taken.stretches, replicas, taken.messages, taken.whole):
        sums, places = taken.sums(stretch), stretch.places
        if mine:
            cut = {"start": places.start, "rows": places.rows, "stride": places.stride}
            mechanism.add(sums, std=std, step=step, scale=scale, **cut)
        else:
            sums.mul_(scale)
        done += stretch.count
        while unsent and unsent[0][0] <= done:
            waits.append(replicas.add_up(unsent.pop(0)[1]))
    for _, part in unsent:  # where there is nothing but the words
        waits.append(replicas.add_up(part))
    for wait in waits:
        wait()
    if replicas.size > 1:
        for memory in taken.memory.values():
            Seal.refuse_other(memory[-Seal.WORDS :], replicas.size)


def noised_places(buffer: FlatBuffer, replicas: Ranks) -> list[Places]:
    """Which places of the vector of all parameters this rank draws noise for."""
    return [stretch.places for stretch, mine in _cut(buffer.stretches, replicas, buffer.messages, buffer.whole) if mine]


def _messages(taken: Taken) -> Iterator[tuple[int, Tensor]]:
    """Yields each message to the other replicas, and how many of all sums must have their noise before it leaves."""
    before = 0
    for key, memory in taken.memory.items():
        size, each = len(taken.flats[key]), taken.messages[key]
        for at, part in zip(range(0, len(memory), each), memory.split(each), strict=True):
            yield before + min(at + each, size), part
        before += size


def _cut(
    stretches: Sequence[Stretch], replicas: Ranks, messages: Mapping[Key, int], whole: int
) -> Iterator[tuple[Stretch, bool]]:
    """The stretches, cut so that each part is this rank's or another's to draw noise for, and lies in one message."""
    if replicas.size == 1:
        for stretch in stretches:
            yield stretch, True
        return
    total = whole or sum(stretch.count for stretch in stretches)
    first, end = (total * rank // replicas.size for rank in (replicas.rank, replicas.rank + 1))
    done = 0
    for stretch in stretches:
        begin_at = stretch.places.start if whole else done  # what the shares are cut by
        if stretch.places.rows > 1:  # one of several rows stays whole
            yield stretch, first <= begin_at < end
        else:
            low, high = (min(max(edge - begin_at, 0), stretch.count) for edge in (first, end))
            each = messages[stretch.key]
            ends = range(each - stretch.at % each, stretch.count, each)  # of the messages, where one begins at 0
            edges = sorted({0, low, high, stretch.count, *ends})
            for begin, stop in pairwise(edges):
                yield stretch.part(begin, stop), low <= begin < high
        done += stretch.count
