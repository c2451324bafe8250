"""Logical batches of a run: drawn in order, split into physical batches, and returned once."""

from __future__ import annotations

import collections
import dataclasses
import threading
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, NoReturn

import numpy as np
import numpy.typing as npt
from torch.utils.data import Sampler

from .scheme import Draws, WordStream


@dataclasses.dataclass(frozen=True, eq=False)
class LogicalBatch:
    """One sampled batch, which may span several physical batches. Compared by identity.

    Cannot be copied or pickled, because releasing the same batch twice would break accounting.

    Attributes:
        step: Number of the step.
        sizes: Number of samples of each physical batch.
        units: Privacy unit of each sample of each physical batch, from 0; empty if each sample is a unit.
        placeholder: True if the loader returns a placeholder sample for an empty physical batch.
    """

    step: int
    sizes: tuple[int, ...] = dataclasses.field(repr=False)  # private: sampled sizes must not appear in logs
    units: tuple[npt.NDArray[np.int64], ...] = dataclasses.field(default=(), repr=False)
    placeholder: bool = False

    @property
    def size(self) -> int:
        """Number of samples in the logical batch."""
        return sum(self.sizes)

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise TypeError(f"{self!r} represents one logical batch of this process and cannot be copied or pickled.")


class DrawnBatch(NamedTuple):
    """Logical batch, and the indices of the examples in each of its physical batches."""

    batch: LogicalBatch
    chunks: list[list[int]]


class LogicalBatches:
    """Draws, splits and returns the logical batches of a run. Shared by the loader, its sampler and their copies."""

    def __init__(
        self,
        sampling: Draws,
        words: WordStream,
        *,
        physical_batch_size: int | None,
        accumulation_steps: int,
        # Called before each physical batch is returned, with the logical batch, the index and the data (or None).
        on_return: Callable[[LogicalBatch, int, Any], None],
        on_end: Callable[[], None] = lambda: None,  # called when a pass ends
        may_draw: Callable[[int], bool],  # called before each logical batch; False ends the pass
        shard: tuple[int, int] = (0, 1),  # rank, and number of ranks; each rank returns its shard of a batch
        placeholder: bool = False,  # True if an empty physical batch contains a placeholder sample
    ):
        self._placeholder = placeholder
        self.sampling = sampling
        self.may_draw = may_draw
        self.position = 0  # number of logical batches returned in the run, which is the step of the next one
        self.open_pass: LoaderPass | None = None
        self.shard = shard
        self._words = words
        self.physical_batch_size = physical_batch_size
        self._accumulation_steps = accumulation_steps
        self.on_return = on_return
        self._on_end = on_end

    def draw(self, step: int) -> DrawnBatch:
        """Returns the logical batch of a step. Has no side effects: the same step always gives the same batch."""
        indices = self.sampling.draw(step, self._words)
        rank, ranks = self.shard
        sampling: Any = self.sampling
        parts, size, units = self._accumulation_steps, self.physical_batch_size, ()
        if sampling.samples_units:
            chunks = sampling.split_over_ranks(indices, parts, size, ranks)[rank]
            units = tuple(map(sampling.chunk_units, chunks))
        else:
            parts = parts if size is None else max(1, -(-len(indices) // (size * ranks)))
            chunks = np.array_split(indices, parts * ranks)[rank::ranks]
        batch = LogicalBatch(step, tuple(map(len, chunks)), units, self._placeholder)
        return DrawnBatch(batch, [chunk.tolist() for chunk in chunks])

    def mark_returned(self, batch: LogicalBatch, chunk: int, data: Any = None) -> None:
        """Records that a physical batch is about to be returned to the user."""
        if chunk == 0:
            self.position = batch.step + 1  # before the callback, so that an error does not repeat the step
        self.on_return(batch, chunk, data)

    def start_pass(self, *, fetch_empty: bool) -> LoaderPass:
        """Starts a new pass at the current position and ends an open one."""
        self.end_pass()
        self.open_pass = LoaderPass(self, fetch_empty=fetch_empty)
        return self.open_pass

    def end_pass(self) -> None:
        """Ends the open pass, if there is one. Batches that were drawn but not returned have no effect."""
        if self.open_pass is not None:
            self.open_pass.source = None
            self.open_pass = None
            self._on_end()

    def __deepcopy__(self, memo: dict[int, Any]) -> LogicalBatches:
        return self  # copies of a loader continue the same run, so that no step is returned twice

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise TypeError(
            "A private loader cannot be pickled: another process would return the same batches again. "
            "Pickle your own loader, and call make_private in each process."
        )


class LoaderPass:
    """One pass over the loader. Matches fetched data with logical batches in order.

    The number of batches that DataLoader workers prefetch depends on timing. So each logical batch is drawn when it is
    first needed, either for fetching or for the user.
    """

    def __init__(self, batches: LogicalBatches, *, fetch_empty: bool):
        self.source: Iterator[Any] | None = None  # iterator of the user's loader; deleting it stops its workers
        self.claimed = False  # True if an iterator of the batch sampler reads the index lists of this pass
        self.sent, self.received = 0, 0  # numbers of index lists that the source read, and of batches that it returned
        self.fetch_empty = fetch_empty  # True if the source also loads empty physical batches
        self._batches = batches
        self._start = batches.position
        self._drawn = 0  # number of logical batches
        self._for_user: collections.deque[LogicalBatch] = collections.deque()
        self._to_fetch: collections.deque[list[list[int]]] = collections.deque()
        self._lock = threading.Lock()  # some loader classes iterate in a separate thread

    def next_for_user(self) -> LogicalBatch:
        """Returns the next logical batch."""
        with self._lock:
            if not self._for_user:
                self._draw()
            return self._for_user.popleft()

    def index_lists(self) -> Iterator[list[int]]:
        """Yields the index lists to fetch, until the end of the pass."""
        while (chunks := self._next_to_fetch()) is not None:
            for chunk in chunks:
                if chunk or self.fetch_empty:
                    self.sent += 1
                    yield chunk

    def _next_to_fetch(self) -> list[list[int]] | None:
        with self._lock:
            if not self._to_fetch:
                if self._drawn == self._batches.sampling.steps_per_epoch:
                    return None
                self._draw()
            return self._to_fetch.popleft()

    def _draw(self) -> None:
        batch, chunks = self._batches.draw(self._start + self._drawn)
        self._drawn += 1
        self._for_user.append(batch)
        self._to_fetch.append(chunks)


class PrivateBatchSampler(Sampler[list[int]]):
    """Batch sampler of a private loader.

    Another loader with this batch sampler, for example of a training framework, also reads index lists. It cannot
    report when the user receives a batch, so a physical batch then counts as returned when its indices are read.

    Args:
        batches: Logical batches of the run.

    Attributes:
        batch_size: Expected batch size of this process, rounded, for frameworks.
        drop_last: Always False.
    """

    def __init__(self, batches: LogicalBatches):
        self.batch_size = max(1, round(batches.sampling.expected_batch_size / batches.shard[1]))
        self.drop_last = False
        self._batches = batches

    def __len__(self) -> int:
        return self._batches.sampling.steps_per_epoch

    def __iter__(self) -> Iterator[list[int]]:
        # A worker pool creates two iterators and reads one. So the first iterator that is read claims the pass.
        current = self._batches.open_pass
        if current is not None and not current.claimed:
            current.claimed = True
            yield from current.index_lists()
        else:
            yield from self._indices_without_pass()

    def _indices_without_pass(self) -> Iterator[list[int]]:
        for _ in range(len(self)):
            step = self._batches.position
            if not self._batches.may_draw(step):
                return
            batch, chunks = self._batches.draw(step)
            for number, chunk in enumerate(chunks):
                self._batches.mark_returned(batch, number)
                yield chunk
