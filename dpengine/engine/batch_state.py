"""State machine of the current logical batch. Transitions return effects, which the owner executes."""

from __future__ import annotations

import enum
from collections import deque
from collections.abc import Collection
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from dpengine.sampling.batches import LogicalBatch


class Stage(enum.Enum):
    """Stage of the current logical batch."""

    IDLE = "idle"  # no batch was returned yet, or zero_grad followed the last step
    OPEN = "open"  # returned by the loader; at least one physical batch had no backward pass yet
    CLIPPED = "clipped"  # the clipped gradients of all physical batches are in the sums
    CHARGED = "charged"  # accounted; the parameters are not updated yet
    RELEASED = "released"  # the parameters are updated; zero_grad comes next
    DISCARDED = "discarded"  # ended before its step; the loader has not returned the next batch yet
    CLOSED = "closed"  # the model is no longer private


class Effect(NamedTuple):
    """Actions that the owner of a `BatchState` must execute after a transition, in this order."""

    discarded: int = 0  # discarded logical batches to charge: the reason for discarding them may depend on the data
    zero_sums: bool = False


NO_EFFECT = Effect()
NOT_RETURNED = frozenset({Stage.IDLE, Stage.RELEASED})
"""Stages in which the loader has returned no batch for the next step."""

_UNCHARGED = frozenset({Stage.OPEN, Stage.CLIPPED})


@dataclass(eq=False)
class BatchState:
    """Follows logical batches from the loader to the parameter update.

    Several logical batches are merged into one step if the optimizer did not step after each of them.

    Attributes:
        external: True if no private loader returns the batches. Each backward pass is then a physical batch.
        continues: True if the next backward pass belongs to the current logical batch. Used only if ``external``.
        look_ahead: Number of physical batches that a trainer fetches before it uses the first one. If positive, the
            trainer must run one backward pass for each physical batch, in the order of the loader.
        logical_batches: Logical batches whose gradients are in the sums. The last one is the current batch.
        fetched: Physical batches that were fetched ahead of their backward pass.
        chunk: Index of the current physical batch within its logical batch.
        done: True if the current physical batch had its backward pass, even if its logical batch is discarded.
        passed_over: True if no backward pass ran over the previous logical batch before the current one began.
        last_step: Step number of the newest logical batch.
        merged: Number of logical batches in the last step, as a prediction for the next step.
        released: Number of steps taken.
        discarded: Number of logical batches that were discarded. They are also charged.
    """

    external: bool = False
    continues: bool = False
    look_ahead: int = 0
    stage: Stage = field(default=Stage.IDLE, init=False)
    logical_batches: list[LogicalBatch] = field(default_factory=list, init=False)
    fetched: deque[tuple[LogicalBatch, int]] = field(default_factory=deque, init=False)
    chunk: int = field(default=0, init=False)
    done: bool = field(default=False, init=False)
    passed_over: bool = field(default=False, init=False)
    last_step: int = field(default=-1, init=False)
    merged: int = field(default=1, init=False)
    released: int = field(default=0, init=False)
    discarded: int = field(default=0, init=False)

    @property
    def samples(self) -> int:
        """Number of samples of the current physical batch."""
        return self.logical_batches[-1].sizes[self.chunk]

    @property
    def steps(self) -> list[int]:
        """Step numbers of the merged logical batches."""
        return [batch.step for batch in self.logical_batches]

    @property
    def first_uncharged(self) -> int:
        """The first step that is not accounted yet."""
        return self.logical_batches[0].step if self.stage in _UNCHARGED else self.last_step + 1

    @property
    def awaits_backward(self) -> bool:
        """True if a backward pass may run over the current physical batch."""
        return self.stage is Stage.OPEN and not self.done

    @property
    def waits_for_step(self) -> bool:
        """True if the current physical batch had its backward pass, and its step has not begun."""
        return self.stage is Stage.CLIPPED or (self.stage is Stage.OPEN and self.done)

    @property
    def is_ready(self) -> bool:
        """True if a step may follow: the current physical batch had its backward pass, or is empty."""
        return self.stage is Stage.CLIPPED or (self.stage is Stage.OPEN and (self.done or self.samples == 0))

    @property
    def is_placeholder(self) -> bool:
        """True if the current physical batch is empty, and the loader returned a placeholder sample for it."""
        return self.awaits_backward and self.samples == 0 and self.logical_batches[-1].placeholder

    # The loader

    def fetch(self, batch: LogicalBatch, chunk: int) -> tuple[LogicalBatch, int] | None:
        """Queues a physical batch that the loader returns. Returns the one that becomes current, or None."""
        if not self.fetched and not (self.look_ahead and self.awaits_backward):
            return batch, chunk
        self.fetched.append((batch, chunk))
        return self.fetched.popleft() if len(self.fetched) > self.look_ahead else None

    def skipped_before(self, step: int) -> int:
        """Returns the number of steps between the last logical batch and ``step``."""
        return step - self.last_step - 1 if self.last_step >= 0 else 0

    def begin(self, batch: LogicalBatch, chunk: int) -> Effect:
        """Makes a physical batch the current one. Each logical batch must have a later step than the previous one."""
        if chunk > 0:
            if self.stage is Stage.DISCARDED or (not self.done and self.samples > 0):
                effect = self.discard()  # this or an earlier physical batch had no backward pass
                self.done = False  # for the new physical batch
                return effect
            self.chunk, self.done = chunk, False
            return NO_EFFECT
        if batch.step <= self.last_step:
            raise ValueError(f"Step {batch.step} does not come after step {self.last_step}.")
        self.last_step = batch.step
        self.passed_over = self.awaits_backward and self.chunk == 0
        effect = NO_EFFECT
        if self.passed_over and len(self.logical_batches) > 1:
            self.logical_batches.pop()  # the batches before it stay in the sums
            effect = Effect(discarded=1)
        elif self.stage is Stage.OPEN:
            effect = self.discard()
        if self.stage not in _UNCHARGED:
            self.logical_batches = []
        self.logical_batches.append(batch)
        self.stage, self.chunk, self.done = Stage.OPEN, 0, False
        return effect

    def revoke(self, last_step: int) -> None:
        """Reverts `begin` of a logical batch that the loader does not return. ``last_step`` is its value before.

        Its step counts as skipped. Batches whose gradients are in the sums stay complete.
        """
        self.logical_batches.pop()
        self.last_step, self.done = last_step, True
        self.stage = Stage.CLIPPED if self.logical_batches else Stage.DISCARDED
        self.chunk = len(self.logical_batches[-1].sizes) - 1 if self.logical_batches else 0

    def extend(self, samples: int) -> None:
        """Adds a physical batch to the current logical batch, and makes it the current one."""
        batch = replace(self.logical_batches[-1], sizes=(*self.logical_batches[-1].sizes, samples))
        self.logical_batches[-1] = batch
        self.stage, self.chunk, self.done = Stage.OPEN, len(batch.sizes) - 1, False

    # The backward pass

    def next_for_backward(self, samples: Collection[int]) -> tuple[LogicalBatch, int] | None:
        """Removes and returns the next fetched batch if a backward pass cannot belong to the current one.

        ``samples`` are the batch sizes that the layers saw.
        """
        if self.stage is Stage.DISCARDED and not self.done:
            return None  # the pass runs over a later physical batch of the discarded logical batch
        if not self.fetched or self.is_placeholder or (self.awaits_backward and self.samples in samples):
            return None
        return self.fetched.popleft()

    def clipped(self) -> None:
        """Records that the gradients of the current physical batch are in the sums."""
        self.done = True
        if self.chunk == len(self.logical_batches[-1].sizes) - 1:
            self.stage = Stage.CLIPPED

    # The optimizer

    def next_for_step(self) -> tuple[LogicalBatch, int] | None:
        """Removes and returns the next fetched batch if it is due and empty, because it may have no backward pass."""
        is_current_in_use = not self.done if self.stage is Stage.OPEN else self.stage is Stage.CLIPPED
        if not self.fetched or is_current_in_use:
            return None
        batch, chunk = self.fetched[0]
        return self.fetched.popleft() if batch.sizes[chunk] == 0 else None

    def charged(self) -> None:
        """Records that the merged logical batches are accounted."""
        self.merged = len(self.logical_batches)
        self.stage = Stage.CHARGED

    def finished(self) -> None:
        """Records that the parameters are updated. A batch returned during the update stays the current one."""
        if self.stage is Stage.CHARGED:
            self.stage = Stage.RELEASED
        self.released += 1

    def cleared(self) -> Effect:
        """Records a call of ``zero_grad``: discards complete logical batches that were not stepped."""
        if self.stage is Stage.RELEASED:
            self.logical_batches, self.stage = [], Stage.IDLE
        elif self.stage is Stage.CLIPPED:
            return self.discard()
        elif self.awaits_backward and self.chunk == 0 and len(self.logical_batches) > 1:
            current = self.logical_batches.pop()
            effect = self.discard()
            self.logical_batches, self.stage, self.done = [current], Stage.OPEN, False
            return effect
        return NO_EFFECT

    # Budget, and the end of a batch or run

    def upcoming(self) -> tuple[int, int]:
        """Returns how many batches will be charged separately from, and together with, the next logical batch."""
        if self.stage is Stage.CLIPPED:
            return 0, max(len(self.logical_batches) + 1, self.merged)
        return (len(self.logical_batches) if self.stage is Stage.OPEN else 0) + self._fetched_batches, self.merged

    @property
    def _fetched_batches(self) -> int:
        return sum(chunk == 0 for _, chunk in self.fetched)

    def discard(self) -> Effect:
        """Ends the merged logical batches early."""
        uncharged = len(self.logical_batches) if self.stage in _UNCHARGED else 0
        self.logical_batches, self.done = [], True
        self.stage = Stage.CLOSED if self.stage is Stage.CLOSED else Stage.DISCARDED
        return Effect(uncharged, zero_sums=True)

    def drop_uncharged(self) -> None:
        """Drops a complete logical batch that exceeds the budget. It is not charged, because no result is released."""
        self.logical_batches, self.stage = [], Stage.DISCARDED

    def close(self) -> Effect:
        """Ends the run."""
        uncharged = self._fetched_batches + self.discard().discarded
        self.fetched.clear()
        self.stage = Stage.CLOSED
        return Effect(uncharged, zero_sums=True)
