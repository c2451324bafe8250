"""Sampling of users: the examples of a user in a batch are sampled, clipped and protected together."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from .scheme import Batches, IndexBatch, SamplingScheme, checked_integer, checked_scheme, words_from


@dataclasses.dataclass(frozen=True, kw_only=True)
class UserSelectionStrategy:
    """Sampling scheme over users. A sampled user contributes their next ``examples_per_user`` examples.

    Args:
        base: Sampling scheme of users.
        examples_per_user: Number of examples that a user contributes to a batch, in cyclic order.
        shuffle: Whether the examples of each user are shuffled once.

    Raises:
        TypeError: If ``base`` is not a sampling scheme, or the count is not an integer.
        ValueError: If the count is below 1.
    """

    base: SamplingScheme
    examples_per_user: int = 1
    shuffle: bool = False

    name: ClassVar[str] = "users"
    accounting: ClassVar[str] = "as for the base scheme, with the user as privacy unit"

    def __post_init__(self) -> None:
        checked_scheme("UserSelectionStrategy: base", self.base)
        checked_integer("UserSelectionStrategy", "examples_per_user", self.examples_per_user, at_least=1)

    @property
    def iterations(self) -> int | None:
        """Number of batches in the run."""
        return self.base.iterations

    def batch_iterator(self, user_ids: npt.ArrayLike, rng: Any = None) -> UserBatches:
        """Returns the batches of one run.

        Args:
            user_ids: User of each example, ``(N,)``. Any values that can be sorted.
            rng: Source of randomness; see `words_from`.

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
            # Sorts by user, then by a random word.
            order = np.lexsort((words(len(ids), step=(1 << 63) + 1, block=0), users))
        sizes = np.bincount(users) if len(users) else np.empty(0, dtype=np.int64)
        user_batches = Batches(self.base.over(len(sizes)), self.base.iterations, words)
        return UserBatches(user_batches, order, sizes, self.examples_per_user)


class UserBatches(Iterator[IndexBatch]):
    """Iterator over the batches of one run, each with the examples of the sampled users."""

    def __init__(self, user_batches: Batches, order: IndexBatch, sizes: npt.NDArray[np.int64], examples_per_user: int):
        self._user_batches = user_batches
        self._order = order  # examples, sorted by user
        self._sizes = sizes
        self._starts = np.cumsum(sizes) - sizes
        self._examples_per_user = examples_per_user
        self._positions = np.zeros(len(sizes), dtype=np.int64)  # position of the next example of each user

    def __next__(self) -> IndexBatch:
        users = next(self._user_batches)
        sizes = self._sizes[users].reshape(-1, 1)
        offsets = (self._positions[users].reshape(-1, 1) + np.arange(self._examples_per_user)) % np.maximum(sizes, 1)
        self._positions[users] = (self._positions[users] + self._examples_per_user) % self._sizes[users]
        return self._order[self._starts[users].reshape(-1, 1) + offsets]

    def __len__(self) -> int:
        return len(self._user_batches)

    def state_dict(self) -> dict[str, Any]:
        """Returns the position of the run and of each user. Private, like the batches."""
        return {**self._user_batches.state_dict(), "brought": self._positions.tolist()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continues from a stored position.

        Raises:
            ValueError: If the state is of another number of users, or `Batches.load_state_dict` rejects it.
        """
        positions = np.asarray(state["brought"], dtype=np.int64)
        if positions.shape != self._sizes.shape:
            raise ValueError(f"load_state_dict: the state has {len(positions)} users, not {len(self._sizes)}.")
        self._user_batches.load_state_dict(state)
        self._positions = positions
