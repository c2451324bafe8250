"""Reduce-scatter of full gradient sums to the ranks that keep shards of the parameters.

The buckets and their order are the same on all ranks and do not depend on the parameters of a pass. Each bucket is sent
as soon as it is complete and all buckets before it are sent. This keeps few full sums in memory, and overlaps
communication with the computation of the remaining sums.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from dpengine.distributed.local_shards import LocalShard
from dpengine.distributed.ranks import RankFingerprint
from dpengine.distributed.topology import Topology

BUCKET_BYTES = 25 * 2**20
_MAX_IN_FLIGHT = 2  # buckets in communication at the same time


@dataclass(eq=False)
class Bucket:
    """Parameters whose sums are exchanged together.

    Attributes:
        parameters: Parameters, in the order of their sums in the bucket.
        device: Device of the sums.
        dtype: Dtype of the sums.
        missing: Parameters whose sums are not complete in this pass.
        wait: Waits for the exchange; None if it has not begun or is over.
        shard: Result for this rank.
    """

    parameters: list[nn.Parameter]
    device: torch.device
    dtype: torch.dtype
    missing: set[nn.Parameter] = field(default_factory=set)
    wait: Callable[[], None] | None = None
    shard: Tensor = field(default_factory=lambda: torch.empty(0))

    def finish(self) -> None:
        """Waits for the exchange and frees the memory that was sent."""
        if self.wait is not None:
            self.wait()
            self.wait = None


class ReduceScatterBuckets:
    """Sums full parameter sums over the ranks; each rank keeps its shard.

    Attributes:
        deferred: True if the exchange is postponed until ``deliver``.
    """

    def __init__(
        self,
        parameters: Iterable[tuple[nn.Parameter, torch.dtype]],  # in the order in which sums are likely to complete
        topology: Topology,
        shards: dict[nn.Parameter, LocalShard],
    ):
        self._ranks, self._shards = topology.shards, shards
        self._buckets: list[Bucket] = []
        self._sums: dict[nn.Parameter, Tensor] = {}  # full sums over this rank's samples
        self._bucket_of: dict[nn.Parameter, Bucket] = {}
        self._next = 0  # index of the bucket to send next
        self.deferred = False
        self._fingerprint: Sequence[object] = ()
        size, last_group = 0, None
        for parameter, dtype in parameters:
            bucket, group = self._buckets[-1] if self._buckets else None, topology.group(parameter)
            full = size >= BUCKET_BYTES and group != last_group  # parameters that are gathered together share a bucket
            if bucket is None or full or (bucket.device, bucket.dtype) != (parameter.device, dtype):
                self._buckets.append(bucket := Bucket([], parameter.device, dtype))
                size = 0
            last_group = group
            bucket.parameters.append(parameter)
            self._bucket_of[parameter] = bucket
            size += shards[parameter].computed.numel * dtype.itemsize

    @property
    def empty(self) -> bool:
        """True if the buckets hold no sums."""
        return not self._sums and self._next == 0

    def begin(self, fingerprint: Sequence[object], *, defer: bool) -> None:
        """Begins a pass whose fingerprint must be equal on all ranks. With ``defer``, buckets wait for ``deliver``."""
        self._fingerprint, self.deferred = fingerprint, defer
        for bucket in self._buckets:
            bucket.missing = set(bucket.parameters)

    def fill(self, parameter: nn.Parameter, write: Callable[[Tensor, float], None], *, dtype: torch.dtype) -> None:
        """Calls ``write`` to update the sum of one parameter in place. See ``FlatBuffer.fill``."""
        assert parameter in self._bucket_of[parameter].missing, "an addend for a sum that was sent"
        keep = 1.0
        if parameter not in self._sums:
            shape = self._shards[parameter].computed.size
            self._sums[parameter] = torch.empty(shape, device=parameter.device, dtype=dtype)
            keep = 0.0
        write(self._sums[parameter], keep)

    def complete(self, parameter: nn.Parameter) -> None:
        """Marks the sum of a parameter as complete for this pass, and sends the next buckets that are complete."""
        self._bucket_of[parameter].missing.discard(parameter)
        while not self.deferred and self._next < len(self._buckets) and not self._buckets[self._next].missing:
            self._send()

    def deliver(self) -> Iterable[tuple[nn.Parameter, Tensor]]:
        """Ends the exchange. Yields each parameter with the local shard of its sum, flat."""
        self.deferred = False
        while self._next < len(self._buckets):
            self._send()
        for bucket in self._buckets:
            bucket.finish()
            RankFingerprint.check(bucket.shard[-RankFingerprint.WORDS :], self._ranks.size)
            offset = 0
            for parameter in bucket.parameters:
                shard = self._shards[parameter]
                yield parameter, bucket.shard[offset : offset + shard.kept.numel]
                offset += _padded_numel(shard, self._ranks.size)
        self.clear()

    def clear(self) -> None:
        """Discards all sums, also those in communication."""
        for bucket in self._buckets[: self._next]:
            bucket.wait, bucket.shard = None, torch.empty(0)
        self._sums, self._next, self.deferred = {}, 0, False

    def _send(self) -> None:
        bucket, ranks = self._buckets[self._next], self._ranks.size
        if self._next >= _MAX_IN_FLIGHT:
            self._buckets[self._next - _MAX_IN_FLIGHT].finish()
        shard_size = sum(_padded_numel(self._shards[p], ranks) for p in bucket.parameters) + RankFingerprint.WORDS
        message = torch.zeros(ranks, shard_size, device=bucket.device, dtype=bucket.dtype)
        offset = 0
        for parameter in bucket.parameters:
            shard, total = self._shards[parameter], self._sums.pop(parameter, None)
            size = _padded_numel(shard, ranks)
            if total is not None and total.numel():
                _chunk_into(message[:, offset : offset + size], total, shard.axis)
            offset += size
        RankFingerprint.write(message[:, offset:], (self._next, *self._fingerprint))
        bucket.shard = torch.empty(shard_size, device=bucket.device, dtype=bucket.dtype)
        bucket.wait = self._ranks.reduce_scatter(message.view(-1), bucket.shard)
        self._next += 1


def _chunk_into(message: Tensor, total: Tensor, axis: int) -> None:
    """Copies a sum to ``(ranks, n)``. Each row gets the shard of one rank, cut along an axis by ``torch.chunk``."""
    ranks, size = message.shape
    if axis == 0:
        flat = total.view(-1)
        full_rows = flat.numel() // size
        message[:full_rows].copy_(flat[: full_rows * size].view(full_rows, size))
        if rest := flat.numel() - full_rows * size:
            message[full_rows, :rest].copy_(flat[-rest:])
        return
    for row, part in zip(message, total.chunk(ranks, axis), strict=False):
        row[: part.numel()].view(part.shape).copy_(part)


def _padded_numel(shard: LocalShard, ranks: int) -> int:
    """Returns the number of elements of a parameter that each rank gets, including padding on the last ranks."""
    if not shard.computed.numel:
        return 0
    length = shard.computed.size[shard.axis]
    return -(-length // ranks) * (shard.computed.numel // length)
