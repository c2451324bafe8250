"""Large logical batches in chunks that fit into memory."""

from __future__ import annotations

import math
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
    clipped of its last batch is destroyed as the iterator goes, and at the latest when the next pass starts.

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
        self._passes = 0

    def __iter__(self) -> Iterator[list[int]]:
        self.optimizer.forget_skips()
        self._passes += 1
        return self._parts(self._passes)

    def _parts(self, number_of_pass: int) -> Iterator[list[int]]:
        try:
            yield from self._signalled_parts()
        except GeneratorExit:
            if number_of_pass == self._passes:  # a pass that was left lately does not cut the one that followed it
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
    splitting = BatchSplittingSampler(sampler=batches, max_batch_size=max_batch_size, optimizer=optimizer)
    return DataLoader(
        data_loader.dataset,
        batch_sampler=splitting,
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
