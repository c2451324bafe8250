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

from .scheme import AbstractBatchStrategy, IndexBatch, WordStream
from .units import UnitStrategy


@dataclasses.dataclass(frozen=True, eq=False)
class LogicalBatch:
    """One sampled batch, which may span several physical batches. Compared by identity.

    ``rows`` and ``units`` have one entry for each chunk; without ``units``, each sample is a privacy unit.
    ``placeholder`` is True if the loader returns a placeholder sample for an empty chunk.
    It cannot be copied or pickled, because two steps with the same batch would break the accounting.
    """

    step: int
    rows: tuple[int, ...] = dataclasses.field(repr=False)  # sizes that were drawn are private: not in messages or logs
    units: tuple[npt.NDArray[np.int64], ...] = dataclasses.field(default=(), repr=False)
    placeholder: bool = False

    @property
    def size(self) -> int:
        """Number of samples in the whole logical batch."""
        return sum(self.rows)

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise TypeError(f"{self!r} stands for one logical batch of this process and cannot be copied or pickled.")


class DrawnBatch(NamedTuple):
    """A logical batch, and the example indices of each of its physical batches."""

    batch: LogicalBatch
    chunks: list[list[int]]


class LogicalBatches:
    """Draws, splits and returns the logical batches of a run. The loader, its sampler and their copies share it."""

    def __init__(
        self,
        strategy: AbstractBatchStrategy,
        words: WordStream,
        *,
        physical_batch_size: int | None,
        accumulation_steps: int,
        on_return: Callable[[LogicalBatch, int], None],  # called with the index of a chunk before it is returned
        may_draw: Callable[[int], bool],  # called before each logical batch; False ends the pass
        share: tuple[int, int] = (0, 1),  # rank and number of ranks, each of which returns its part of every chunk
        placeholder: bool = False,  # whether an empty chunk comes with a placeholder sample
    ):
        self._placeholder = placeholder
        self.strategy = strategy
        self.may_draw = may_draw
        self.position = 0  # returned logical batches of the run, which is the step of the next one
        self.open_pass: Pass | None = None
        self.share = share
        self._words = words
        self.physical_batch_size = physical_batch_size
        self._accumulation_steps = accumulation_steps
        self.on_return = on_return

    def draw(self, step: int) -> DrawnBatch:
        """Returns the logical batch of a step. Drawing has no effect: the same step gives the same batch again."""
        indices = self.strategy.draw(step, self._words)
        parts, size, (rank, ranks) = self._accumulation_steps, self.physical_batch_size, self.share
        units: tuple[IndexBatch, ...] = ()
        if isinstance(self.strategy, UnitStrategy):
            cut = self._units_of(self.strategy, indices)
            units = tuple(map(self.strategy.places, cut))
        else:
            parts = parts if size is None else max(1, -(-len(indices) // (size * ranks)))
            cut = np.array_split(indices, parts * ranks)[rank::ranks]
        return DrawnBatch(
            LogicalBatch(step, tuple(map(len, cut)), units, self._placeholder), [part.tolist() for part in cut]
        )

    def _units_of(self, strategy: UnitStrategy, indices: IndexBatch) -> list[IndexBatch]:
        """Returns this process's chunks of whole units. All processes have equally many, and some may be empty."""
        rank, ranks = self.share
        chunks = [
            strategy.chunks(part, size=self.physical_batch_size, parts=self._accumulation_steps)
            for part in strategy.chunks(indices, size=None, parts=ranks)
        ]
        most = max(map(len, chunks))
        return [*chunks[rank], *[indices[:0]] * (most - len(chunks[rank]))]

    def mark_returned(self, batch: LogicalBatch, chunk: int) -> None:
        """Records that a chunk is about to be returned."""
        if chunk == 0:
            self.position = batch.step + 1  # first: a callback that raises must not repeat the step
        self.on_return(batch, chunk)

    def start_pass(self, *, fetch_empty: bool) -> Pass:
        """Returns a new pass from the current position. Ends an open pass."""
        self.end_pass()
        self.open_pass = Pass(self, fetch_empty=fetch_empty)
        return self.open_pass

    def end_pass(self) -> None:
        """Ends the open pass, if there is one, and forgets its batches that were not returned."""
        if self.open_pass is not None:
            self.open_pass.source = None
            self.open_pass = None

    def __deepcopy__(self, memo: dict[int, Any]) -> LogicalBatches:
        return self  # copies of a loader continue the same run, so no step is returned twice

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise TypeError(
            "A private loader cannot be pickled: another process would hand out the same batches again. "
            "Pickle your own loader, and call make_private in each process."
        )


class Pass:
    """One pass over the loader. Fetched and returned batches are matched first in, first out.

    DataLoader workers fetch ahead of the user by an amount that depends on timing. The side that first needs the next
    logical batch draws it for both.
    """

    def __init__(self, batches: LogicalBatches, *, fetch_empty: bool):
        self.source: Iterator[Any] | None = None  # the user's iterator; deleting it stops its workers
        self.taken = False
        self.sent, self.received = 0, 0  # index lists read by the source, and batches that it returned
        self.fetch_empty = fetch_empty  # whether empty chunks go through the user's loader
        self._batches = batches
        self._start = batches.position
        self._drawn = 0
        self._for_user: collections.deque[LogicalBatch] = collections.deque()
        self._to_fetch: collections.deque[list[list[int]]] = collections.deque()
        self._lock = threading.Lock()  # some loader classes iterate in another thread

    def next_for_user(self) -> LogicalBatch:
        """Returns the next logical batch."""
        with self._lock:
            if not self._for_user:
                self._draw()
            return self._for_user.popleft()

    def index_lists(self) -> Iterator[list[int]]:
        """Yields the chunks to fetch until the end of the pass."""
        while (chunks := self._next_to_fetch()) is not None:
            for chunk in chunks:
                if chunk or self.fetch_empty:
                    self.sent += 1
                    yield chunk

    def _next_to_fetch(self) -> list[list[int]] | None:
        with self._lock:
            if not self._to_fetch:
                if self._drawn == self._batches.strategy.steps_per_epoch:
                    return None
                self._draw()
            return self._to_fetch.popleft()

    def _draw(self) -> None:
        batch, chunks = self._batches.draw(self._start + self._drawn)
        self._drawn += 1
        self._for_user.append(batch)
        self._to_fetch.append(chunks)


class PrivateBatchSampler(Sampler[list[int]]):
    """The batch sampler of a private loader.

    A loader that a training framework builds around it gets index lists, too. Such a loader does not report which batch
    it returns, so a chunk counts as returned when its indices are read.

    Args:
        batches: The logical batches of the run.

    Attributes:
        batch_size: The expected batch size of this process, rounded, for training frameworks.
        drop_last: Always False.
    """

    def __init__(self, batches: LogicalBatches):
        self.batch_size = max(1, round(batches.strategy.expected_batch_size / batches.share[1]))
        self.drop_last = False
        self._batches = batches

    def __len__(self) -> int:
        return self._batches.strategy.steps_per_epoch

    def __iter__(self) -> Iterator[list[int]]:
        # A worker pool creates two iterators and reads one, so the first one that is read takes the pass.
        current = self._batches.open_pass
        if current is not None and not current.taken:
            current.taken = True
            yield from current.index_lists()
        else:
            yield from self._return_indices()

    def _return_indices(self) -> Iterator[list[int]]:
        for _ in range(len(self)):
            step = self._batches.position
            if not self._batches.may_draw(step):
                return
            batch, chunks = self._batches.draw(step)
            for number, chunk in enumerate(chunks):
                self._batches.mark_returned(batch, number)
                yield chunk
