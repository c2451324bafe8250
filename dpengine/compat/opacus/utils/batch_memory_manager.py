"""Splits logical batches into physical batches that fit into memory."""

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
    """Splits each batch of a sampler into nearly equal parts, and signals to the optimizer which part is the last.

    Loaders of ``make_private`` do not need it: see ``BatchMemoryManager``. If an iteration ends early, the clipped sums
    of its last batch are discarded with the iterator, at the latest when the next iteration starts. Parts that were
    fetched before, as by ``list(islice(loader, 6))``, are then one step each.

    The sampler signals when a part is fetched, so every fetched part must be followed by a step, in order.
    ``wrap_data_loader`` and ``BatchMemoryManager`` signal when a part is returned. There, the optimizer raises an error
    for a step that may be for parts of several batches, because a part was skipped or fetched ahead.

    Args:
        sampler: Batch sampler.
        max_batch_size: Maximum size of a part, at least 1.
        optimizer: The private optimizer.
    """

    @keyword_hints
    def __init__(self, *, sampler: Sampler[list[int]], max_batch_size: int, optimizer: DPOptimizer):
        if isinstance(sampler, PrivateBatchSampler):
            raise TypeError(
                "BatchSplittingSampler: a private loader splits its batches itself. Use BatchMemoryManager."
            )
        self.sampler = sampler
        self.max_batch_size = checked_integer("BatchSplittingSampler", "max_batch_size", max_batch_size, at_least=1)
        self.optimizer = optimizer

    def __iter__(self) -> Iterator[list[int]]:
        self.optimizer.forget_skips()
        return self._signaled_parts()

    def _signaled_parts(self) -> Iterator[list[int]]:
        iteration = object()
        try:
            for _, is_last, part in self._parts():
                self.optimizer.current_pass = iteration
                self.optimizer.signal_skip_step(do_skip=not is_last)
                yield part
        except BaseException:  # the iteration ended early, or the sampler failed
            # If a loader fetches ahead, another sampler of the optimizer may have signaled since.
            if self.optimizer.current_pass is iteration:
                self.optimizer.forget_skips()
            raise

    def _parts(self) -> Iterator[tuple[int, bool, list[int]]]:
        """Yields the number of the batch, whether the part is its last, and the part."""
        for number, batch in enumerate(self.sampler):
            parts = np.array_split(list(batch), max(1, math.ceil(len(batch) / self.max_batch_size)))
            for position, part in enumerate(parts, 1):
                yield number, position == len(parts), [int(index) for index in part]

    def __len__(self) -> int:
        """Returns the expected number of parts in an epoch."""
        expected = getattr(self.sampler, "batch_size", None)
        if expected is None and hasattr(self.sampler, "sample_rate"):
            sampler: Any = self.sampler
            expected = sampler.sample_rate * sampler.num_samples
        batches = len(self.sampler)  # type: ignore[arg-type]
        return batches if expected is None else math.ceil(batches * max(1.0, expected / self.max_batch_size))


class _SignaledSampler(BatchSplittingSampler):
    """Splitting sampler whose loader signals each part when it returns it."""

    def __iter__(self) -> Iterator[list[int]]:
        self.optimizer.forget_skips()
        self.fetched = deque[tuple[int, bool]]()  # batch of each fetched part, and whether it is the last part
        return self._recorded_parts(self.fetched)

    def _recorded_parts(self, fetched: deque[tuple[int, bool]]) -> Iterator[list[int]]:
        for number, is_last, part in self._parts():
            fetched.append((number, is_last))
            yield part


class _SignalingLoader(DataLoader[Any]):
    """Loader that signals each part to the optimizer when it returns it, even if workers fetch ahead."""

    def __iter__(self) -> Any:
        parts, sampler = super().__iter__(), self.batch_sampler
        assert isinstance(sampler, _SignaledSampler)
        return _signal_parts(parts, sampler.fetched, sampler.optimizer)


def _signal_parts(parts: Iterator[Any], fetched: deque[tuple[int, bool]], optimizer: DPOptimizer) -> Iterator[Any]:
    iteration = object()
    try:
        for part in parts:
            number, is_last = fetched.popleft()
            optimizer.signal_part(iteration, number, do_skip=not is_last)
            yield part
    finally:  # at the end, or if the iteration ended early or failed
        if optimizer.current_pass is iteration:
            optimizer.forget_skips()


class _ChunkedLoader:
    """Private loader that splits its logical batches. Its length is the expected number of physical batches."""

    def __len__(self) -> int:
        this: Any = self
        parts = this._batches.sampling.expected_batch_size / this._physical_batch_size
        return math.ceil(len(this.batch_sampler) * max(1.0, parts))


@functools.cache
def _chunked_class(kind: type[Any]) -> type[Any]:
    """Returns a subclass of a loader class that splits logical batches."""
    names = {"__module__": kind.__module__, "__doc__": kind.__doc__}
    return kind if issubclass(kind, _ChunkedLoader) else type(kind.__name__, (_ChunkedLoader, kind), names)


@keyword_hints
def wrap_data_loader(*, data_loader: DataLoader[Any], max_batch_size: int, optimizer: DPOptimizer) -> DataLoader[Any]:
    """Returns a loader of parts of at most ``max_batch_size`` samples. The engine splits its own loaders."""
    if isinstance(data_loader, PrivateIteration):
        if optimizer.has_external_batches:
            report_to(data_loader, optimizer)
        chunks: Any = copy.copy(data_loader)
        size = checked_integer("wrap_data_loader", "max_batch_size", max_batch_size, at_least=1)
        chunks.__dict__["_physical_batch_size"] = size
        chunks.__class__ = _chunked_class(type(data_loader))
        return chunks  # type: ignore[no-any-return]
    batches: Any = data_loader.batch_sampler
    if batches is None:
        batches = BatchSampler(data_loader.sampler, 1, drop_last=False)
    if isinstance(batches, BatchSplittingSampler):  # wrapped before
        max_batch_size, batches = min(max_batch_size, batches.max_batch_size), batches.sampler
    return _SignalingLoader(
        data_loader.dataset,
        batch_sampler=_SignaledSampler(sampler=batches, max_batch_size=max_batch_size, optimizer=optimizer),
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
