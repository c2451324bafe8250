"""Sampling of users: what is drawn, clipped and protected is everything that one user contributes to a batch."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from dpengine.sampling.scheme import IndexBatch, whole_number

from .scheme import AbstractBatchSelection, Batches, words_from


@dataclasses.dataclass(frozen=True, kw_only=True)
class UserSelectionStrategy:
    """Another law, drawn over users; each user drawn brings the next ``examples_per_user`` of his examples in turn.

    Args:
        base: The law of users.
        examples_per_user: Examples that a user brings each time, from his first again after his last.
        shuffle: Whether each user's examples are put into a random order once.

    Raises:
        TypeError: If ``base`` is no law, or the count no whole number.
        ValueError: If the count is below 1.
    """

    base: AbstractBatchSelection
    examples_per_user: int = 1
    shuffle: bool = False

    law: ClassVar[str] = "users"
    accounting: ClassVar[str] = "that of the base, for users"

    def __post_init__(self) -> None:
        if not isinstance(self.base, AbstractBatchSelection):
            raise TypeError(f"UserSelectionStrategy: base is a {type(self.base).__name__}; pass a law of batches.")
        whole_number("UserSelectionStrategy", "examples_per_user", self.examples_per_user, at_least=1)

    @property
    def iterations(self) -> int:
        """Batches of the run."""
        return self.base.iterations

    def batch_iterator(self, user_ids: npt.ArrayLike, rng: Any = None) -> UserBatches:
        """The batches of one run.

        Args:
            user_ids: ``(N,)``: whose each example is. Any values that can be sorted.
            rng: Where randomness comes from: see `words_from`.

        Returns:
            An iterator over arrays ``(users, examples_per_user)`` of indices of examples, int64.

        Raises:
            ValueError: If ``user_ids`` is not one id for each example.
        """
        ids = np.asarray(user_ids)
        if ids.ndim != 1:
            raise ValueError(f"UserSelectionStrategy: user_ids has shape {ids.shape}; pass one id for each example.")
        _, users = np.unique(ids, return_inverse=True)
        order = np.argsort(users, kind="stable")
        words = words_from(rng)
        if self.shuffle:
            # Sorted by user first, then by a random word.
            order = np.lexsort((words(len(ids), step=(1 << 63) + 1, block=0), users))
        sizes = np.bincount(users) if len(users) else np.empty(0, dtype=np.int64)
        drawn = Batches(self.base.over(len(sizes)), self.base.iterations, words)
        return UserBatches(drawn, order, sizes, self.examples_per_user)


class UserBatches(Iterator[IndexBatch]):
    """The batches of one run over users."""

    def __init__(self, drawn: Batches, order: IndexBatch, sizes: npt.NDArray[np.int64], each: int):
        self._drawn = drawn
        self._order = order  # examples, those of the first user first
        self._sizes = sizes
        self._starts = np.cumsum(sizes) - sizes
        self._each = each
        self._brought = np.zeros(len(sizes), dtype=np.int64)  # by each user so far, modulo his size

    def __next__(self) -> IndexBatch:
        users = next(self._drawn)
        sizes = self._sizes[users].reshape(-1, 1)
        places = (self._brought[users].reshape(-1, 1) + np.arange(self._each)) % np.maximum(sizes, 1)
        self._brought[users] = (self._brought[users] + self._each) % self._sizes[users]
        return self._order[self._starts[users].reshape(-1, 1) + places]

    def __len__(self) -> int:
        return len(self._drawn)

    def state_dict(self) -> dict[str, Any]:
        """The position, and how far each user is. Private, as batches are."""
        return {**self._drawn.state_dict(), "brought": self._brought.tolist()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on from a stored position."""
        brought = np.asarray(state["brought"], dtype=np.int64)
        if brought.shape != self._sizes.shape:
            raise ValueError(f"load_state_dict: the state is of {len(brought)} users; there are {len(self._sizes)}.")
        self._drawn.load_state_dict(state)
        self._brought = brought
