"""Noise on the clipped sums: each rank adds noise to its own shard, and each element gets noise once."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise

from torch import Tensor

from dpengine.distributed.local_shards import Places
from dpengine.distributed.ranks import RankFingerprint, Ranks
from dpengine.grad_modes.flat_buffer import BufferSpan, DrainedBuffer, FlatBuffer, Key

from .mechanism import AbstractNoise


def add_noise(
    sums: DrainedBuffer,
    mechanism: AbstractNoise,
    *,
    std: float,
    step: int,
    scale: float,
    replicas: Ranks,
    fingerprint: tuple[object, ...],
) -> None:
    """Adds noise to the local shard of the clipped sums, scales them, and all-reduces them over replicas, in place.

    Each rank adds noise with the full standard deviation to its own shard only, so noise needs no communication, and a
    rank generates and stores noise for its shard only. Every bucket is sent as soon as its noise is added, which
    overlaps communication with noise generation.

    Args:
        sums: The clipped sums.
        mechanism: The noise mechanism.
        std: Standard deviation, in units of the sums before ``scale``.
        step: Step of the noise.
        scale: Public factor of the noisy sums.
        replicas: The ranks over which sums are all-reduced.
        fingerprint: Values that must agree; MechanismMismatchError is raised if those of another replica differ.
    """
    if replicas.size > 1:
        for memory in sums.memory.values():
            RankFingerprint.write(memory[-RankFingerprint.WORDS :], fingerprint)
    waits, done = [], 0
    buckets = list(_buckets(sums)) if replicas.size > 1 else []
    for span, mine in _cut_spans(sums.spans, replicas, sums.message_sizes, sums.total_numel):
        part, places = sums.sums(span), span.places
        if mine:
            cut = {"start": places.start, "rows": places.rows, "stride": places.stride}
            mechanism.add(part, std=std, step=step, scale=scale, **cut)
        else:
            part.mul_(scale)
        done += span.count
        while buckets and buckets[0][0] <= done:
            waits.append(replicas.all_reduce(buckets.pop(0)[1]))
    for _, bucket in buckets:  # if there is nothing but the fingerprint
        waits.append(replicas.all_reduce(bucket))
    for wait in waits:
        wait()
    if replicas.size > 1:
        for memory in sums.memory.values():
            RankFingerprint.check(memory[-RankFingerprint.WORDS :], replicas.size)


def noised_places(buffer: FlatBuffer, replicas: Ranks) -> list[Places]:
    """Returns the places of the vector of all parameters to which this rank adds noise."""
    return [
        span.places
        for span, mine in _cut_spans(buffer.spans, replicas, buffer.message_sizes, buffer.total_numel)
        if mine
    ]


def _buckets(sums: DrainedBuffer) -> Iterator[tuple[int, Tensor]]:
    """Yields each bucket to send, and the number of sums that must have their noise before it is sent."""
    before = 0
    for key, memory in sums.memory.items():
        size, each = len(sums.flats[key]), sums.message_sizes[key]
        for at, part in zip(range(0, len(memory), each), memory.split(each), strict=True):
            yield before + min(at + each, size), part
        before += size


def _cut_spans(
    spans: Sequence[BufferSpan], replicas: Ranks, messages: Mapping[Key, int], whole: int
) -> Iterator[tuple[BufferSpan, bool]]:
    """Cuts the spans so that each part lies in one bucket and gets noise from one rank; yields True for this rank."""
    if replicas.size == 1:
        for span in spans:
            yield span, True
        return
    total = whole or sum(span.count for span in spans)
    first, end = (total * rank // replicas.size for rank in (replicas.rank, replicas.rank + 1))
    done = 0
    for span in spans:
        begin_at = span.places.start if whole else done  # position by which shards are cut
        if span.places.rows > 1:  # spans of several rows are not cut
            yield span, first <= begin_at < end
        else:
            low, high = (min(max(edge - begin_at, 0), span.count) for edge in (first, end))
            each = messages[span.key]
            ends = range(each - span.offset % each, span.count, each)  # ends of buckets, the first of which begins at 0
            edges = sorted({0, low, high, span.count, *ends})
            for begin, stop in pairwise(edges):
                yield span.part(begin, stop), low <= begin < high
        done += span.count
