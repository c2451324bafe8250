"""Batches of users: what is drawn is a unit of privacy, with all of its examples."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from dpengine.errors import SamplingError

from .scheme import AbstractBatchStrategy, IndexBatch, WordStream

UnitIds = npt.NDArray[np.int64]
_PAIRS = 17  # examples of a data set that are put beside its first


@dataclasses.dataclass(frozen=True, eq=False)
class UnitStrategy(AbstractBatchStrategy):
    """A strategy over units, each of which brings all of its examples.

    Args:
        drawn: Draws units, as numbers from 0.
        unit_N: The unit of each example, ``(N,)``.

    Raises:
        ValueError: If there are not as many units as are drawn from.
    """

    drawn: AbstractBatchStrategy
    unit_N: UnitIds

    law: ClassVar[str] = "units"
    claims_epsilon: ClassVar[bool] = True

    def __post_init__(self) -> None:
        sizes = np.bincount(self.unit_N, minlength=1)
        if len(sizes) != max(1, self.drawn.num_examples):
            raise ValueError(f"UnitStrategy: {len(sizes)} units, and {self.drawn.num_examples} are drawn from.")
        object.__setattr__(self, "_order", np.argsort(self.unit_N, kind="stable"))
        object.__setattr__(self, "_ends", np.cumsum(sizes))

    @property
    def num_examples(self) -> int:  # type: ignore[override]
        """Examples."""
        return len(self.unit_N)

    @property
    def sample_rate(self) -> float:  # type: ignore[override]
        """The probability of each unit."""
        return self.drawn.sample_rate

    @property
    def expected_batch_size(self) -> float:  # type: ignore[override]
        """Units in a batch."""
        return self.drawn.expected_batch_size

    @property
    def steps_per_epoch(self) -> int:  # type: ignore[override]
        """Logical batches in one pass over the loader."""
        return self.drawn.steps_per_epoch

    def draw(self, step: int, words: WordStream) -> IndexBatch:
        """Returns the examples of one logical batch, unit by unit."""
        order, ends = self._order, self._ends  # type: ignore[attr-defined]
        units = self.drawn.draw(step, words)
        starts = np.concatenate([[0], ends])
        parts = [order[starts[unit] : ends[unit]] for unit in units.tolist()]
        return np.concatenate(parts) if parts else np.empty(0, dtype=np.int64)

    def chunks(self, indices: IndexBatch, *, size: int | None, parts: int) -> list[IndexBatch]:
        """Cuts a batch where units end: into chunks of at most ``size`` rows, or into so many parts.

        A unit of more rows than that is a chunk of its own, since its gradient is clipped as one.

        Args:
            indices: What ``draw`` returned.
            size: Most rows of a chunk; None for no limit.
            parts: The number of chunks, where there is no limit.

        Returns:
            The chunks, in order.
        """
        if not len(indices):
            return [indices] * (parts if size is None else 1)
        firsts = np.flatnonzero(np.diff(self.unit_N[indices], prepend=-1))
        if size is None:
            cuts = [int(part[0]) for part in np.array_split(firsts, parts) if len(part)]
            found = np.split(indices, cuts[1:])
            return [*found, *[indices[:0]] * (parts - len(found))]
        cuts, start = [], 0
        for first, end in zip(firsts.tolist(), [*firsts[1:].tolist(), len(indices)], strict=True):
            if end - start > size and first > start:
                cuts.append(first)
                start = first
        return np.split(indices, cuts)

    def places(self, indices: IndexBatch) -> UnitIds:
        """The place of each row's unit among those of a chunk, ``(rows,)``, from 0."""
        return np.cumsum(np.diff(self.unit_N[indices], prepend=-1) != 0) - 1


def unit_numbers(given: Any, dataset: Any) -> UnitIds:
    """The unit of each example, as numbers from 0."""
    ids = given
    if isinstance(given, str):
        try:
            ids = dataset[given]
        except Exception as error:
            raise ValueError(
                f"privacy_unit={given!r}: {type(dataset).__name__} has no such column. Pass an array with one id for "
                "each example."
            ) from error
    values = np.asarray(ids)
    if values.ndim != 1 or len(values) != len(dataset):
        raise ValueError(
            f"privacy_unit has shape {values.shape} for {len(dataset):,} examples. Pass one id for each example."
        )
    missing = np.array([value is None or value != value for value in values.tolist()], dtype=bool)  # NaN is not itself
    if np.any(missing):
        raise ValueError(
            f"privacy_unit: {int(np.sum(missing))} examples have no id, the first is example "
            f"{int(np.flatnonzero(missing)[0])}. Give each its unit, or leave it out of the data set."
        )
    if values.dtype != object:
        return np.unique(values, return_inverse=True)[1].reshape(-1).astype(np.int64)
    numbers: dict[Any, int] = {}  # in the order of their first example: ids of several kinds cannot be sorted
    return np.array([numbers.setdefault(value, len(numbers)) for value in values.tolist()], dtype=np.int64)


def check_order_kept(collate: Any, dataset: Any) -> None:
    """Refuses a ``collate_fn`` that puts rows into another order: whose each row is would not be known."""
    for i in range(1, min(len(dataset), _PAIRS)):
        pair = [dataset[0], dataset[i]]
        forth, back = (pytree.tree_leaves(collate(list(order))) for order in (pair, pair[::-1]))
        for one, other in zip(forth, back, strict=True):
            if not isinstance(one, Tensor) or one.dim() == 0 or one.shape != other.shape or len(one) != len(pair):
                continue
            if not torch.equal(torch.nan_to_num(one), torch.nan_to_num(other.flip(0))):
                raise SamplingError(
                    "collate_fn puts rows into another order, or changes a row for what is beside it, and with "
                    "privacy_unit= it must be known whose each row is.",
                    fix="Keep the order of examples in collate_fn; sort inside the model.",
                )
