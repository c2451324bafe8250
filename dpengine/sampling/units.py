"""Sampling of privacy units: a sampled unit is included with all of its examples."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from dpengine.accounting.run_events import Participation
from dpengine.errors import SamplingError

from .scheme import Draws, IndexBatch, WordStream

UnitIds = npt.NDArray[np.int64]
_MAX_CHECKED = 17  # maximum number of examples in the check of the collation order


@dataclasses.dataclass(frozen=True, eq=False)
class UnitDraws(Draws):
    """Samples privacy units by another sampling scheme, and includes all examples of each sampled unit.

    Args:
        drawn: Samples the units, which are numbered from 0.
        unit_N: Unit of each example, ``(N,)``.

    Raises:
        ValueError: If ``drawn`` is for another number of units.
    """

    drawn: Draws
    unit_N: UnitIds = dataclasses.field(repr=False)  # private: the owners of examples must not appear in logs

    name: ClassVar[str] = "units"
    samples_units: ClassVar[bool] = True
    may_repeat: ClassVar[bool] = True  # copies of an example in one unit are clipped together

    def __post_init__(self) -> None:
        sizes = np.bincount(self.unit_N, minlength=1)
        if len(sizes) != max(1, self.drawn.num_examples):
            raise ValueError(f"UnitDraws: got {len(sizes)} units, but a scheme for {self.drawn.num_examples}.")
        object.__setattr__(self, "_order", np.argsort(self.unit_N, kind="stable"))
        object.__setattr__(self, "_ends", np.cumsum(sizes))

    @property
    def num_examples(self) -> int:  # type: ignore[override]
        """Number of examples."""
        return len(self.unit_N)

    @property
    def sample_rate(self) -> float:  # type: ignore[override]
        """Probability that a unit is in a batch."""
        return self.drawn.sample_rate

    @property
    def expected_batch_size(self) -> float:  # type: ignore[override]
        """Expected number of units in a batch."""
        return self.drawn.expected_batch_size

    @property
    def steps_per_epoch(self) -> int:  # type: ignore[override]
        """Number of logical batches in one pass over the loader."""
        return self.drawn.steps_per_epoch

    @property
    def participation(self) -> Participation:
        """Participation of units."""
        return self.drawn.participation

    def draw(self, step: int, words: WordStream) -> IndexBatch:
        """Returns the examples of one logical batch, unit by unit."""
        order, ends = self._order, self._ends  # type: ignore[attr-defined]
        units = self.drawn.draw(step, words)
        starts = np.concatenate([[0], ends])
        parts = [order[starts[unit] : ends[unit]] for unit in units.tolist()]
        return np.concatenate(parts) if parts else np.empty(0, dtype=np.int64)

    def split_over_ranks(self, indices: IndexBatch, parts: int, size: int | None, ranks: int) -> list[list[IndexBatch]]:
        """Splits a batch over ranks, and the part of each rank into physical batches.

        All ranks get the same number of physical batches, of which the last ones may be empty. Units are not split.
        """
        by_rank = [self.chunks(part, size=size, parts=parts) for part in self.chunks(indices, size=None, parts=ranks)]
        count = max(map(len, by_rank))
        return [[*chunks, *[indices[:0]] * (count - len(chunks))] for chunks in by_rank]

    def chunks(self, indices: IndexBatch, *, size: int | None, parts: int) -> list[IndexBatch]:
        """Splits a batch at unit boundaries into chunks of at most ``size`` examples, or into ``parts`` chunks.

        A unit with more than ``size`` examples is a separate, larger chunk, because a unit is clipped as a whole.

        Args:
            indices: Result of ``draw``.
            size: Maximum number of examples in a chunk; None for no limit.
            parts: Number of chunks if ``size`` is None.

        Returns:
            The chunks, in order.
        """
        if not len(indices):
            return [indices] * (parts if size is None else 1)
        firsts = np.flatnonzero(np.diff(self.unit_N[indices], prepend=-1))
        if size is None:
            cuts = [int(part[0]) for part in np.array_split(firsts, parts) if len(part)]
            chunks = np.split(indices, cuts[1:])
            return [*chunks, *[indices[:0]] * (parts - len(chunks))]
        cuts, start = [], 0
        for first, end in zip(firsts.tolist(), [*firsts[1:].tolist(), len(indices)], strict=True):
            if end - start > size and first > start:
                cuts.append(first)
                start = first
        return np.split(indices, cuts)

    def chunk_units(self, indices: IndexBatch) -> UnitIds:
        """Returns the unit of each example of a chunk, ``(B,)``. Units are numbered from 0 within the chunk."""
        return np.cumsum(np.diff(self.unit_N[indices], prepend=-1) != 0) - 1


def unit_numbers(privacy_unit: Any, dataset: Any) -> UnitIds:
    """Returns the unit of each example, ``(N,)``. Units are numbered from 0.

    ``privacy_unit`` is an array with one id per example, or the name of a column of the data set.
    """
    ids = privacy_unit
    if isinstance(privacy_unit, str):
        try:
            ids = dataset[privacy_unit]
        except Exception as error:
            raise ValueError(
                f"privacy_unit={privacy_unit!r}: {type(dataset).__name__} has no such column. Pass an array with one "
                "id for each example."
            ) from error
    values = np.asarray(ids)
    if values.ndim != 1 or len(values) != len(dataset):
        raise ValueError(
            f"privacy_unit has shape {values.shape} for {len(dataset):,} examples. Pass one id for each example."
        )
    # An id is missing if it is None or NaN, which differs from itself.
    missing = np.array([value is None or value != value for value in values.tolist()], dtype=bool)
    if np.any(missing):
        raise ValueError(
            f"privacy_unit: {int(np.sum(missing))} examples have no id, the first is example "
            f"{int(np.flatnonzero(missing)[0])}. Give each one an id, or remove it from the data set."
        )
    if values.dtype != object:
        return np.unique(values, return_inverse=True)[1].reshape(-1).astype(np.int64)
    numbers: dict[Any, int] = {}  # in order of first occurrence, because ids of several types cannot be sorted
    return np.array([numbers.setdefault(value, len(numbers)) for value in values.tolist()], dtype=np.int64)


def check_collate_order(collate: Any, dataset: Any) -> None:
    """Raises SamplingError if ``collate_fn`` reorders examples, because their units would then be unknown."""
    for i in range(1, min(len(dataset), _MAX_CHECKED)):
        pair = [dataset[0], dataset[i]]
        forward, reversed_ = (pytree.tree_leaves(collate(list(order))) for order in (pair, pair[::-1]))
        for leaf, other in zip(forward, reversed_, strict=True):
            if not isinstance(leaf, Tensor) or leaf.dim() == 0 or leaf.shape != other.shape or len(leaf) != len(pair):
                continue
            if not torch.equal(torch.nan_to_num(leaf), torch.nan_to_num(other.flip(0))):
                raise SamplingError(
                    "collate_fn reorders the examples of a batch, or changes an example depending on the others. With "
                    "privacy_unit= the unit of each sample must be known.",
                    fix="Keep the order of examples in collate_fn; sort inside the model.",
                )
