"""Sums of whole parameters on their way to the ranks that keep parts of them, where parameters are sharded.

They leave in buckets that are the same on all ranks and in one order, whatever took part in a pass: each as soon as it
is complete and those before it have left, so that few whole parameters are held, and what is left is summed meanwhile.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from dpengine.distributed.local_shards import Held
from dpengine.distributed.ranks import Seal
from dpengine.distributed.topology import Topology

BUCKET_BYTES = 25 * 2**20
_ON_THEIR_WAY = 2  # buckets whose memory is held while they are exchanged


@dataclass(eq=False)
class Bucket:
    """Parameters whose sums are added over the ranks together.

    Attributes:
        parameters: In the order in which they lie in the bucket.
        device: Of the sums.
        dtype: Of the sums.
        missing: Parameters that may still get something in this pass.
        waits: Ends the exchange; None if it has not begun or is over.
        part: What this rank gets.
    """

    parameters: list[nn.Parameter]
    device: torch.device
    dtype: torch.dtype
    missing: set[nn.Parameter] = field(default_factory=set)
    waits: Callable[[], None] | None = None
    part: Tensor = field(default_factory=lambda: torch.empty(0))

    def finish(self) -> None:
        """Waits for the exchange, and lets go of what was sent."""
        if self.waits is not None:
            self.waits()
            self.waits = None


class Outbox:
    """Adds up sums of whole parameters over the ranks, of which each keeps its part.

    Attributes:
        waits: Whether what there is waits for more before it leaves.
    """

    def __init__(
        self,
        parameters: Iterable[tuple[nn.Parameter, torch.dtype]],  # in the order in which sums are likely to complete
        topology: Topology,
        held: dict[nn.Parameter, Held],
    ):
        self._ranks, self._held = topology.shards, held
        self._buckets: list[Bucket] = []
        self._sums: dict[nn.Parameter, Tensor] = {}  # of this rank's rows, whole
        self._bucket_of: dict[nn.Parameter, Bucket] = {}
        self._next = 0  # the bucket that leaves next
        self.waits = False
        self._facts: Sequence[object] = ()
        size, last = 0, None
        for parameter, dtype in parameters:
            bucket, group = self._buckets[-1] if self._buckets else None, topology.group(parameter)
            full = size >= BUCKET_BYTES and group != last  # what is gathered together is exchanged together
            if bucket is None or full or (bucket.device, bucket.dtype) != (parameter.device, dtype):
                self._buckets.append(bucket := Bucket([], parameter.device, dtype))
                size = 0
            last = group
            bucket.parameters.append(parameter)
            self._bucket_of[parameter] = bucket
            size += held[parameter].formed.numel * dtype.itemsize

    @property
    def empty(self) -> bool:
        """Whether nothing is on its way."""
        return not self._sums and self._next == 0

    def begin(self, facts: Sequence[object], *, wait: bool) -> None:
        """A pass begins to be summed, in which these facts are the same on all ranks; nothing leaves if it waits."""
        self._facts, self.waits = facts, wait
        for bucket in self._buckets:
            bucket.missing = set(bucket.parameters)

    def fill(self, parameter: nn.Parameter, write: Callable[[Tensor, float], None], *, dtype: torch.dtype) -> None:
        """Has one parameter's sum written, or added to what there is of it. See ``FlatBuffer.fill``."""
        assert parameter in self._bucket_of[parameter].missing, "a sum that has left gets something more"
        keep = 1.0
        if parameter not in self._sums:
            self._sums[parameter] = torch.empty(self._held[parameter].formed.size, device=parameter.device, dtype=dtype)
            keep = 0.0
        write(self._sums[parameter], keep)

    def complete(self, parameter: nn.Parameter) -> None:
        """Nothing more comes for a parameter in this pass: its bucket leaves if it was the last, and is in its turn."""
        self._bucket_of[parameter].missing.discard(parameter)
        while not self.waits and self._next < len(self._buckets) and not self._buckets[self._next].missing:
            self._send()

    def deliver(self) -> Iterable[tuple[nn.Parameter, Tensor]]:
        """Ends the exchange: each parameter with the part of its sum that this rank keeps, flat."""
        self.waits = False
        while self._next < len(self._buckets):
            self._send()
        for bucket in self._buckets:
            bucket.finish()
            Seal.refuse_other(bucket.part[-Seal.WORDS :], self._ranks.size)
            at = 0
            for parameter in bucket.parameters:
                held = self._held[parameter]
                yield parameter, bucket.part[at : at + held.kept.numel]
                at += _each(held, self._ranks.size)
        self.clear()

    def clear(self) -> None:
        """Destroys what is on its way."""
        for bucket in self._buckets[: self._next]:
            bucket.waits, bucket.part = None, torch.empty(0)
        self._sums, self._next, self.waits = {}, 0, False

    def _send(self) -> None:
        bucket, ranks = self._buckets[self._next], self._ranks.size
        if self._next >= _ON_THEIR_WAY:
            self._buckets[self._next - _ON_THEIR_WAY].finish()
        each = sum(_each(self._held[p], ranks) for p in bucket.parameters) + Seal.WORDS
        whole = torch.zeros(ranks, each, device=bucket.device, dtype=bucket.dtype)
        at = 0
        for parameter in bucket.parameters:
            held, formed = self._held[parameter], self._sums.pop(parameter, None)
            size = _each(held, ranks)
            if formed is not None and formed.numel():
                _put(whole[:, at : at + size], formed, held.axis)
            at += size
        Seal.write(whole[:, at:], (self._next, *self._facts))
        bucket.part = torch.empty(each, device=bucket.device, dtype=bucket.dtype)
        bucket.waits = self._ranks.scatter_sum(whole.view(-1), bucket.part)
        self._next += 1


def _put(each: Tensor, formed: Tensor, axis: int) -> None:
    """Lays a sum into ``(ranks, n)``: a row has what one rank keeps, cut along an axis as ``torch.chunk`` does."""
    ranks, size = each.shape
    if axis == 0:
        flat = formed.view(-1)
        whole = flat.numel() // size
        each[:whole].copy_(flat[: whole * size].view(whole, size))
        if rest := flat.numel() - whole * size:
            each[whole, :rest].copy_(flat[-rest:])
        return
    for row, part in zip(each, formed.chunk(ranks, axis), strict=False):
        row[: part.numel()].view(part.shape).copy_(part)


def _each(held: Held, ranks: int) -> int:
    """Numbers that each rank gets of a parameter, the padding of the last ones included."""
    shape = held.formed.size
    return 0 if not held.formed.numel else -(-shape[held.axis] // ranks) * (held.formed.numel // shape[held.axis])
