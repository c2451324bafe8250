"""Adds noise to the clipped sums. Each rank adds noise to its own shard, so that each element gets noise once."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise

from torch import Tensor

from dpengine.distributed.local_shards import StridedPositions
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
        fingerprint: Values that must be equal on all replicas; otherwise MechanismMismatchError is raised.
    """
    if replicas.size > 1:
        for memory in sums.memory.values():
            RankFingerprint.write(memory[-RankFingerprint.WORDS :], fingerprint)
    waits, noised = [], 0
    buckets = list(_buckets(sums)) if replicas.size > 1 else []
    for span, is_local in _split_spans(sums.spans, replicas, sums.message_sizes, sums.total_numel):
        part, positions = sums.sums(span), span.positions
        if is_local:
            slice_of = {"start": positions.start, "rows": positions.rows, "stride": positions.stride}
            mechanism.add(part, std=std, step=step, scale=scale, **slice_of)
        else:
            part.mul_(scale)
        noised += span.count
        while buckets and buckets[0][0] <= noised:
            waits.append(replicas.all_reduce(buckets.pop(0)[1]))
    for _, bucket in buckets:  # buckets without sums, which contain only the fingerprint
        waits.append(replicas.all_reduce(bucket))
    for wait in waits:
        wait()
    if replicas.size > 1:
        for memory in sums.memory.values():
            RankFingerprint.check(memory[-RankFingerprint.WORDS :], replicas.size)


def noised_positions(buffer: FlatBuffer, replicas: Ranks) -> list[StridedPositions]:
    """Returns the positions in the vector of all parameters to which this rank adds noise."""
    return [
        span.positions
        for span, is_local in _split_spans(buffer.spans, replicas, buffer.message_sizes, buffer.total_numel)
        if is_local
    ]


def _buckets(sums: DrainedBuffer) -> Iterator[tuple[int, Tensor]]:
    """Yields each bucket, after the number of elements that must have noise before the bucket is sent."""
    before = 0
    for key, memory in sums.memory.items():
        size, bucket_size = len(sums.flats[key]), sums.message_sizes[key]
        for start, bucket in zip(range(0, len(memory), bucket_size), memory.split(bucket_size), strict=True):
            yield before + min(start + bucket_size, size), bucket
        before += size


def _split_spans(
    spans: Sequence[BufferSpan], replicas: Ranks, bucket_sizes: Mapping[Key, int], total_numel: int
) -> Iterator[tuple[BufferSpan, bool]]:
    """Splits the spans into parts that are in one bucket and get noise from one rank.

    Yields each part, and True if this rank adds its noise.
    """
    if replicas.size == 1:
        for span in spans:
            yield span, True
        return
    total = total_numel or sum(span.count for span in spans)
    first, end = (total * rank // replicas.size for rank in (replicas.rank, replicas.rank + 1))
    count = 0
    for span in spans:
        start = span.positions.start if total_numel else count  # position that determines the rank
        if span.positions.rows > 1:  # spans of several rows are not split
            yield span, first <= start < end
        else:
            low, high = (min(max(edge - start, 0), span.count) for edge in (first, end))
            size = bucket_sizes[span.key]
            bucket_ends = range(size - span.offset % size, span.count, size)
            edges = sorted({0, low, high, span.count, *bucket_ends})
            for begin, stop in pairwise(edges):
                yield span.part(begin, stop), low <= begin < high
        count += span.count
