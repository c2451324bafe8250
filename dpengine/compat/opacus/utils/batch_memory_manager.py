"""Logical batches in physical batches that fit into memory."""

from __future__ import annotations

import copy
import functools
import math
from collections import deque
from collections.abc import Iterator
from typing import Any

import numpy as np
from torch.utils.data import BatchSampler, DataLoader, Sampler

from dpengine.compat.opacus.engine_batches import report_to
from dpengine.compat.opacus.optimizers import DPOptimizer
from dpengine.errors import keyword_hints
from dpengine.sampling.batches import PrivateBatchSampler
from dpengine.sampling.loader import PrivateIteration
from dpengine.sampling.scheme import checked_integer


class BatchSplittingSampler(Sampler[list[int]]):
    """Splits each batch of a sampler into nearly equal parts, and signals the last one to the optimizer.

    Loaders of ``make_private`` do not need it: see ``BatchMemoryManager``. If a pass ends early, the clipped sums of
    its last batch are discarded with the iterator, and at the latest when the next pass starts. Parts that were fetched
    before that, as by ``list(islice(loader, 6))``, are then one step each.

    It signals when a part is fetched, so every fetched part must be stepped, in order. ``wrap_data_loader`` and
    ``BatchMemoryManager`` signal when a part is returned, and the optimizer raises for a step that may be for parts of
    several batches, because one was skipped or all were fetched ahead.

    Args:
        sampler: Batch sampler.
        max_batch_size: Maximum size of a part, at least 1.
        optimizer: The private optimizer.
    """

    @keyword_hints
    def __init__(self, *, sampler: Sampler[list[int]], max_batch_size: int, optimizer: DPOptimizer):
        if isinstance(sampler, PrivateBatchSampler):
            raise TypeError(
                "BatchSplittingSampler: the sampler of a private loader is cut by its loader. Use BatchMemoryManager."
            )
        self.sampler = sampler
        self.max_batch_size = checked_integer("BatchSplittingSampler", "max_batch_size", max_batch_size, at_least=1)
        self.optimizer = optimizer

    def __iter__(self) -> Iterator[list[int]]:
        self.optimizer.forget_skips()
        return self._signalled_parts()

    def _signalled_parts(self) -> Iterator[list[int]]:
        this_pass = object()
        try:
            for _, is_last, part in self._parts():
                self.optimizer.current_pass = this_pass
                self.optimizer.signal_skip_step(do_skip=not is_last)
                yield part
        except BaseException:  # left early, or the sampler failed
            # Another sampler over the optimizer may have signalled since, for a loader that fetches ahead.
            if self.optimizer.current_pass is this_pass:
                self.optimizer.forget_skips()
            raise

    def _parts(self) -> Iterator[tuple[int, bool, list[int]]]:
        """Yields the number of the batch, whether the part is its last, and the part."""
        for number, batch in enumerate(self.sampler):
            parts = np.array_split(list(batch), max(1, math.ceil(len(batch) / self.max_batch_size)))
            for place, part in enumerate(parts, 1):
                yield number, place == len(parts), [int(index) for index in part]

    def __len__(self) -> int:
        """Returns the expected number of parts in a pass."""
        expected = getattr(self.sampler, "batch_size", None)
        if expected is None and hasattr(self.sampler, "sample_rate"):
            sampler: Any = self.sampler
            expected = sampler.sample_rate * sampler.num_samples
        batches = len(self.sampler)  # type: ignore[arg-type]
        return batches if expected is None else math.ceil(batches * max(1.0, expected / self.max_batch_size))


class _PartsToHandOut(BatchSplittingSampler):
    """Splitting sampler for a loader that itself signals which part it returns."""

    def __iter__(self) -> Iterator[list[int]]:
        self.optimizer.forget_skips()
        self.told = deque[tuple[int, bool]]()  # of each fetched part: its batch, and whether it is the last
        return self._telling(self.told)

    def _telling(self, told: deque[tuple[int, bool]]) -> Iterator[list[int]]:
        for number, is_last, part in self._parts():
            told.append((number, is_last))
            yield part


class _PartsLoader(DataLoader[Any]):
    """Loader of parts that signals each to the optimizer as it is returned, even if workers fetch ahead."""

    def __iter__(self) -> Any:
        parts, sampler = super().__iter__(), self.batch_sampler
        assert isinstance(sampler, _PartsToHandOut)
        return _handed_out(parts, sampler.told, sampler.optimizer)


def _handed_out(parts: Iterator[Any], told: deque[tuple[int, bool]], optimizer: DPOptimizer) -> Iterator[Any]:
    this_pass = object()
    try:
        for part in parts:
            number, is_last = told.popleft()
            optimizer.signal_part(this_pass, number, do_skip=not is_last)
            yield part
    finally:  # at its end, left early, or a row could not be read
        if optimizer.current_pass is this_pass:
            optimizer.forget_skips()


class _InChunks:
    """Loader of a run that splits its logical batches. Its length is about the number of physical batches."""

    def __len__(self) -> int:
        this: Any = self
        parts = this._batches.sampling.expected_batch_size / this._physical_batch_size
        return math.ceil(len(this.batch_sampler) * max(1.0, parts))


@functools.cache
def _in_chunks(kind: type[Any]) -> type[Any]:
    """Returns the class of a loader of this class that splits logical batches."""
    names = {"__module__": kind.__module__, "__doc__": kind.__doc__}
    return kind if issubclass(kind, _InChunks) else type(kind.__name__, (_InChunks, kind), names)


@keyword_hints
def wrap_data_loader(*, data_loader: DataLoader[Any], max_batch_size: int, optimizer: DPOptimizer) -> DataLoader[Any]:
    """Returns a loader of parts of at most ``max_batch_size`` samples. The engine splits its own loaders."""
    if isinstance(data_loader, PrivateIteration):
        if optimizer.has_external_batches:
            report_to(data_loader, optimizer)
        chunks: Any = copy.copy(data_loader)
        size = checked_integer("wrap_data_loader", "max_batch_size", max_batch_size, at_least=1)
        chunks.__dict__["_physical_batch_size"] = size
        chunks.__class__ = _in_chunks(type(data_loader))
        return chunks  # type: ignore[no-any-return]
    batches: Any = data_loader.batch_sampler
    if batches is None:
        batches = BatchSampler(data_loader.sampler, 1, drop_last=False)
    if isinstance(batches, BatchSplittingSampler):  # wrapped before
        max_batch_size, batches = min(max_batch_size, batches.max_batch_size), batches.sampler
    return _PartsLoader(
        data_loader.dataset,
        batch_sampler=_PartsToHandOut(sampler=batches, max_batch_size=max_batch_size, optimizer=optimizer),
        num_workers=data_loader.num_workers,
        collate_fn=data_loader.collate_fn,
        pin_memory=data_loader.pin_memory,
        timeout=data_loader.timeout,
        worker_init_fn=data_loader.worker_init_fn,
        multiprocessing_context=data_loader.multiprocessing_context,
        generator=data_loader.generator,
        prefetch_factor=data_loader.prefetch_factor,
        persistent_workers=data_loader.persistent_workers,
    )


class BatchMemoryManager:
    """Context of a loader that splits logical batches; ``optimizer.step()`` updates after the last part of each.

    Args:
        data_loader: Loader of ``make_private``, or any loader of batches.
        max_physical_batch_size: Maximum size of a part, at least 1.
        optimizer: The private optimizer.
    """

    @keyword_hints
    def __init__(self, *, data_loader: DataLoader[Any], max_physical_batch_size: int, optimizer: DPOptimizer):
        checked_integer("BatchMemoryManager", "max_physical_batch_size", max_physical_batch_size, at_least=1)
        self.data_loader = data_loader
        self.max_physical_batch_size = max_physical_batch_size
        self.optimizer = optimizer

    def __enter__(self) -> DataLoader[Any]:
        """Returns the loader of parts."""
        return wrap_data_loader(
            data_loader=self.data_loader, max_batch_size=self.max_physical_batch_size, optimizer=self.optimizer
        )

    def __exit__(self, type: Any, value: Any, traceback: Any) -> None:
        """Discards an incomplete batch, unless the loader of ``make_private`` does at its next batch."""
        self.optimizer.forget_skips()
