"""Process groups of the engine, and a fingerprint that detects ranks which sum different values."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from dpengine.errors import MechanismMismatchError

T = TypeVar("T")


@dataclass(frozen=True, eq=False)
class Ranks:
    """Ranks of one process group.

    Attributes:
        group: Process group of ``torch.distributed``; None for a single process.
        rank: Rank of this process in the group.
        size: Number of ranks.
        device: Device of the model, through which NCCL sends Python objects. By default NCCL uses the current CUDA
            device, which is device 0 on all ranks unless the script sets it.
    """

    group: Any = None
    rank: int = 0
    size: int = 1
    device: torch.device | None = None

    @classmethod
    def of(cls, group: Any) -> Ranks:
        """Returns the ranks of a group; `SINGLE_PROCESS` for a group of one."""
        size = dist.get_world_size(group)
        return cls(group, dist.get_rank(group), size) if size > 1 else SINGLE_PROCESS

    @property
    def timeout(self) -> Any:
        """Timeout of the group; None if it is unknown."""
        try:
            return self.group._get_backend(self.group._device_types[0]).options._timeout
        except AttributeError:  # a single process, or a torch version that stores it elsewhere
            return None

    def all_reduce(self, tensor: Tensor) -> Callable[[], None]:
        """Starts an all-reduce that sums a tensor in place. Returns a function that waits for the result."""
        if self.size == 1:
            return _no_wait
        return _waiting(dist.all_reduce(tensor, group=self.group, async_op=True), tensor)

    def reduce_scatter(self, full: Tensor, part: Tensor) -> Callable[[], None]:
        """Starts to sum ``full`` ``(size * n,)`` over the ranks. Each rank receives its ``part`` ``(n,)`` of the sum.

        Returns a function that waits for the result.
        """
        reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor  # the older name
        return _waiting(reduce_scatter(part, full, group=self.group, async_op=True), full, part)

    def all_gather(self, value: Any) -> list[Any]:
        """Returns the values of all ranks, which must be picklable. Waits for all ranks."""
        if self.size == 1:
            return [value]
        values: list[Any] = [None] * self.size
        with device_guard(self.device):
            dist.all_gather_object(values, value, group=self.group)
        return values

    def run_on_all(self, action: Callable[[], T]) -> list[T]:
        """Runs an action on all ranks, and returns all results. The action must not wait for other ranks.

        If the action fails on one rank, that rank raises its exception and the others raise RuntimeError.
        """
        result, error = None, None
        try:
            result = action()
        except Exception as caught:
            error = caught
        gathered = self.all_gather((result, None if error is None else f"{type(error).__name__}: {error}"))
        if error is not None:
            raise error
        for rank, (_, text) in enumerate(gathered):
            if text is not None:
                raise RuntimeError(f"Rank {rank} failed, so all ranks stop: {text}")
        return [of_rank for of_rank, _ in gathered]

    def broadcast(self, value: Any) -> Any:
        """Returns the value of the first rank. Values of other ranks are not sent."""
        if self.size == 1:
            return value
        shared = [value if self.rank == 0 else None]
        first = 0 if self.group is None else dist.get_global_rank(self.group, 0)
        with device_guard(self.device):
            dist.broadcast_object_list(shared, src=first, group=self.group)
        return shared[0]


def world() -> Ranks:
    """Returns the ranks of all processes; `SINGLE_PROCESS` without ``torch.distributed``."""
    if not (dist.is_available() and dist.is_initialized()):
        return SINGLE_PROCESS
    return Ranks.of(dist.group.WORLD)


def device_guard(device: torch.device | None) -> AbstractContextManager[Any]:
    """Returns a context in which ``device`` is the current CUDA device, if it is one."""
    return torch.cuda.device(device) if device is not None and device.type == "cuda" else nullcontext()


def _waiting(work: Any, *tensors: Tensor) -> Callable[[], None]:
    """Returns a function that waits for an operation and keeps its tensors alive until then."""

    def wait() -> None:
        if work is not None:
            work.wait()
        assert all(isinstance(tensor, torch.Tensor) for tensor in tensors)

    return wait


def _no_wait() -> None:
    """Does nothing, because there is no operation to wait for."""


SINGLE_PROCESS = Ranks()


class RankFingerprint:
    """Hash that is summed together with a message, so that every rank detects whether the ranks sum different values.

    The values are hashed to 32 bits: eight words ``h`` below 16, followed by their squares. Sums of both over R ranks
    are exact in float32. The words are equal on all ranks if and only if ``R * sum(h**2) == sum(h)**2``.
    """

    WORDS = 16

    @staticmethod
    def write(into: Tensor, values: Sequence[object]) -> None:
        """Writes the words of the values to a tensor ``(16,)``, or to each row of ``(n, 16)``."""
        digest = hashlib.blake2b(repr(tuple(values)).encode(), digest_size=4).digest()
        words = [half for byte in digest for half in (byte >> 4, byte & 15)]
        into.copy_(torch.tensor([*words, *(word * word for word in words)], dtype=into.dtype))

    @staticmethod
    def check(summed: Tensor, ranks: int) -> None:
        """Raises MechanismMismatchError unless all ranks wrote the same words."""
        words = [round(number) for number in summed.tolist()]
        if any(ranks * words[8 + i] != words[i] ** 2 for i in range(8)):
            raise MechanismMismatchError(
                "The ranks are at different steps, or have different settings. A rank skipped a batch, a backward pass "
                "or a step, or has a different noise multiplier, clipping norm or ledger.",
                fix="Run the same loop over the private loader on every rank, including empty batches.",
            )
