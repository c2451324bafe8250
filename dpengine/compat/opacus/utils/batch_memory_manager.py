"""Large logical batches in chunks that fit into memory."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from torch.utils.data import BatchSampler, DataLoader, Sampler

from dpengine.compat.opacus.engine_batches import always
from dpengine.compat.opacus.optimizers import DPOptimizer
from dpengine.names import suggests_names
from dpengine.sampling import PrivateBatchSampler, PrivateIteration, Ticket, whole_number


class BatchSplittingSampler(Sampler[list[int]]):
    """Cuts each batch of a sampler into nearly equal parts, and tells the optimizer which is the last.

    Loaders that ``make_private`` returned need none: see ``BatchMemoryManager``. When a pass is left early, what was
    clipped of its last batch is destroyed as the iterator goes, and at the latest when the next pass starts. Parts that
    were fetched ahead of an iterator that goes, as by ``list(islice(loader, 6))``, are then a step each. In a loader
    with workers, the sampler is some parts ahead of the loop: ``wrap_data_loader`` and ``BatchMemoryManager`` keep what
    it says until then.

    Args:
        sampler: Of batches.
        max_batch_size: Most rows of a part, at least 1.
        optimizer: Where the parts add up.
    """

    @suggests_names
    def __init__(self, *, sampler: Sampler[list[int]], max_batch_size: int, optimizer: DPOptimizer):
        if isinstance(sampler, PrivateBatchSampler):
            raise TypeError(
                "BatchSplittingSampler: the sampler of a private loader is cut by its loader. Use BatchMemoryManager."
            )
        self.sampler = sampler
        self.max_batch_size = whole_number("BatchSplittingSampler", "max_batch_size", max_batch_size, at_least=1)
        self.optimizer = optimizer

    def __iter__(self) -> Iterator[list[int]]:
        return self._parts(self.optimizer.begin_pass_of_parts())

    def _parts(self, this_pass: int) -> Iterator[list[int]]:
        try:
            yield from self._signalled_parts()
        except GeneratorExit:
            # Another sampler over the optimizer may have begun by now, and its loader have fetched ahead.
            if this_pass == self.optimizer.passes_of_parts:
                self.optimizer.forget_skips()
            raise

    def _signalled_parts(self) -> Iterator[list[int]]:
        for batch in self.sampler:
            parts = np.array_split(list(batch), max(1, math.ceil(len(batch) / self.max_batch_size)))
            for number, part in enumerate(parts):
                self.optimizer.signal_skip_step(do_skip=number < len(parts) - 1)
                yield [int(index) for index in part]

    def __len__(self) -> int:
        """About how many parts there are in a pass."""
        expected = getattr(self.sampler, "batch_size", None)
        if expected is None and hasattr(self.sampler, "sample_rate"):
            sampler: Any = self.sampler
            expected = sampler.sample_rate * sampler.num_samples
        batches = len(self.sampler)  # type: ignore[arg-type]
        return batches if expected is None else math.ceil(batches * max(1.0, expected / self.max_batch_size))


class _Signals:
    """In the optimizer's place where parts are fetched, keeps what is said of them until they are handed out."""

    def __init__(self, optimizer: DPOptimizer):
        self.optimizer = optimizer
        self.passes_of_parts = 0
        self.waiting = deque[bool]()

    def begin_pass_of_parts(self) -> int:
        self.waiting = deque()
        self.passes_of_parts = self.optimizer.begin_pass_of_parts()
        return self.passes_of_parts

    def signal_skip_step(self, *, do_skip: bool) -> None:
        self.waiting.append(do_skip)

    def forget_skips(self) -> None:
        """Nothing: what was fetched ahead and is not handed out was said to nobody."""


class _PartsLoader(DataLoader[Any]):
    """A loader of parts that tells the optimizer of each as it is handed out, also where workers fetch ahead."""

    def __iter__(self) -> Any:
        parts = super().__iter__()
        sampler: Any = self.batch_sampler
        return self._handed_out(parts, sampler.optimizer)

    @staticmethod
    def _handed_out(parts: Iterator[Any], signals: _Signals) -> Iterator[Any]:
        this_pass, waiting = signals.passes_of_parts, signals.waiting
        try:
            for part in parts:
                signals.optimizer.signal_skip_step(do_skip=waiting.popleft())
                yield part
        except GeneratorExit:  # left early
            if this_pass == signals.optimizer.passes_of_parts:
                signals.optimizer.forget_skips()
            raise


@suggests_names
def wrap_data_loader(*, data_loader: DataLoader[Any], max_batch_size: int, optimizer: DPOptimizer) -> DataLoader[Any]:
    """The same loader, with batches in parts.

    Args:
        data_loader: The loader.
        max_batch_size: Most rows of a part.
        optimizer: Where the parts add up.

    Returns:
        A loader. One that ``make_private`` returned is cut by the engine, which knows where a batch ends.
    """
    if isinstance(data_loader, PrivateIteration):
        if optimizer.is_hand_fed:
            data_loader.bind(_telling(optimizer), always)
        return data_loader.in_chunks(max_batch_size, counts_chunks=True)  # type: ignore[no-any-return]
    batches: Any = data_loader.batch_sampler
    if batches is None:
        batches = BatchSampler(data_loader.sampler, 1, drop_last=False)
    signals: Any = _Signals(optimizer)
    return _PartsLoader(
        data_loader.dataset,
        batch_sampler=BatchSplittingSampler(sampler=batches, max_batch_size=max_batch_size, optimizer=signals),
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


def _telling(optimizer: DPOptimizer) -> Callable[[Ticket, int], None]:
    """Tells an optimizer that was built by hand which chunk is the last of its batch, right before each is used."""

    def handed_out(ticket: Ticket, chunk: int) -> None:
        if chunk == 0:
            optimizer.forget_skips()
        optimizer.signal_skip_step(do_skip=chunk < len(ticket.rows) - 1)

    return handed_out


class BatchMemoryManager:
    """A context in which a loader gives logical batches in chunks; ``optimizer.step()`` updates at the last of each.

    Args:
        data_loader: What ``make_private`` returned, or any loader of batches.
        max_physical_batch_size: Most rows of a chunk, at least 1.
        optimizer: The private optimizer.

    Raises:
        ValueError: If the size is below 1.
    """

    @suggests_names
    def __init__(self, *, data_loader: DataLoader[Any], max_physical_batch_size: int, optimizer: DPOptimizer):
        whole_number("BatchMemoryManager", "max_physical_batch_size", max_physical_batch_size, at_least=1)
        self.data_loader = data_loader
        self.max_physical_batch_size = max_physical_batch_size
        self.optimizer = optimizer

    def __enter__(self) -> DataLoader[Any]:
        """The loader of chunks."""
        return wrap_data_loader(
            data_loader=self.data_loader, max_batch_size=self.max_physical_batch_size, optimizer=self.optimizer
        )

    def __exit__(self, type: Any, value: Any, traceback: Any) -> None:
        """A batch that was cut off is given up: here, or when the loader of ``make_private`` gives the next one."""
        self.optimizer.forget_skips()
