"""Process groups of the engine, and the seal by which ranks check that all of them sum the same values."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from dpengine.errors import MechanismMismatchError

T = TypeVar("T")


@dataclass(frozen=True, eq=False)
class Ranks:
    """The ranks of one process group.

    Attributes:
        group: The group of ``torch.distributed``; None for a process that is alone.
        rank: This process among them, from 0.
        size: How many there are.
    """

    group: Any = None
    rank: int = 0
    size: int = 1

    @classmethod
    def of(cls, group: Any) -> Ranks:
        """The ranks of a group, which are alone if there is one of them."""
        size = dist.get_world_size(group)
        return cls(group, dist.get_rank(group), size) if size > 1 else ALONE

    @property
    def timeout(self) -> Any:
        """How long they wait for each other, as was said when their group was made; None where it is not known."""
        try:
            return self.group._get_backend(self.group._device_types[0]).options._timeout
        except AttributeError:  # alone, or in a torch that keeps it elsewhere
            return None

    def add_up(self, tensor: Tensor) -> Callable[[], None]:
        """Begins to replace a tensor by its sum over the ranks; what is returned waits for that."""
        if self.size == 1:
            return _nothing
        return _waiting(dist.all_reduce(tensor, group=self.group, async_op=True), tensor)

    def scatter_sum(self, whole: Tensor, part: Tensor) -> Callable[[], None]:
        """Begins to sum ``whole`` ``(size * n,)`` over the ranks, of which each gets its ``part`` ``(n,)``."""
        exchange = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor  # as it was called before
        return _waiting(exchange(part, whole, group=self.group, async_op=True), whole, part)

    def all_of(self, value: Any) -> list[Any]:
        """What each rank has: any object that can be pickled. Waits for all."""
        if self.size == 1:
            return [value]
        found: list[Any] = [None] * self.size
        dist.all_gather_object(found, value, group=self.group)
        return found

    def each(self, action: Callable[[], T]) -> list[T]:
        """Returns the results of an action on all ranks; it must not wait for other ranks.

        If it fails on one rank, that rank raises its exception and the others raise RuntimeError.
        """
        answer, error = None, None
        try:
            answer = action()
        except Exception as caught:
            error = caught
        found = self.all_of((answer, None if error is None else f"{type(error).__name__}: {error}"))
        if error is not None:
            raise error
        for rank, (_, text) in enumerate(found):
            if text is not None:
                raise RuntimeError(f"Rank {rank} failed, and so all end here: {text}")
        return [one for one, _ in found]

    def from_first(self, value: Any) -> Any:
        """What the first of the ranks has. Nothing else of the others is sent."""
        if self.size == 1:
            return value
        shared = [value if self.rank == 0 else None]
        first = 0 if self.group is None else dist.get_global_rank(self.group, 0)
        dist.broadcast_object_list(shared, src=first, group=self.group)
        return shared[0]


def world() -> Ranks:
    """All processes; this one alone where ``torch.distributed`` does not run."""
    if not (dist.is_available() and dist.is_initialized()):
        return ALONE
    return Ranks.of(dist.group.WORLD)


def _waiting(work: Any, *held: Tensor) -> Callable[[], None]:
    """Waits for what was begun; the tensors live until then."""

    def wait() -> None:
        if work is not None:
            work.wait()
        assert all(isinstance(one, torch.Tensor) for one in held)

    return wait


def _nothing() -> None:
    """Nothing was begun."""


ALONE = Ranks()


class Seal:
    """Words that travel with a sum, by which every rank sees whether all of them summed the same thing.

    A fact is hashed to 32 bits, in eight words ``h`` below 16, and beside them their squares. Sums of both over R ranks
    are exact in float32, and the words are the same everywhere exactly if ``R * sum(h**2) == sum(h)**2``.
    """

    WORDS = 16

    @staticmethod
    def write(into: Tensor, facts: Sequence[object]) -> None:
        """Writes the words of a fact into ``(16,)``, or into each of several such."""
        digest = hashlib.blake2b(repr(tuple(facts)).encode(), digest_size=4).digest()
        words = [half for byte in digest for half in (byte >> 4, byte & 15)]
        into.copy_(torch.tensor([*words, *(word * word for word in words)], dtype=into.dtype))

    @staticmethod
    def refuse_other(summed: Tensor, ranks: int) -> None:
        """Raises MechanismMismatchError unless all ranks wrote the same words."""
        words = [round(number) for number in summed.tolist()]
        if any(ranks * words[8 + i] != words[i] ** 2 for i in range(8)):
            raise MechanismMismatchError(
                "The ranks are not at the same step, or do not do the same in it: one of them skipped a batch, a "
                "backward pass or a step, or has another noise, threshold or ledger.",
                fix="Let every rank run the same loop over the private loader, empty batches included.",
            )
