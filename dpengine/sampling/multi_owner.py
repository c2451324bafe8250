"""Sampling of examples that several users own, with one example per user or a minimum separation."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from .scheme import Batches, IndexBatch, SamplingScheme, checked_integer, checked_scheme, words_from


@dataclasses.dataclass(frozen=True, eq=False)
class MultiOwnerGraph:
    """Ownership of examples, as a graph with an edge between each example and each of its owners. Public.

    Args:
        examples: Index of the example of each edge ``(E,)``, from 0. Every example has an owner.
        users: Index of the user of each edge ``(E,)``, from 0.

    Raises:
        ValueError: If the shapes differ, an edge is repeated, or an example has no owner.
    """

    examples: npt.NDArray[np.int64]
    users: npt.NDArray[np.int64]

    def __post_init__(self) -> None:
        examples, users = (np.asarray(indices) for indices in (self.examples, self.users))
        owner = "MultiOwnerGraph"
        if examples.ndim != 1 or examples.shape != users.shape:
            raise ValueError(
                f"{owner}: examples and users must be 1-D arrays of equal length, got shapes {examples.shape} and "
                f"{users.shape}."
            )
        integers = all(side.dtype.kind in "iu" and (side >= 0).all() for side in (examples, users) if side.size)
        if not integers:
            raise ValueError(f"{owner}: examples and users must be whole numbers from 0.")
        edges = np.unique(np.stack([examples, users]), axis=1)
        if edges.shape[1] < len(examples):
            duplicates = len(examples) - edges.shape[1]
            raise ValueError(f"{owner}: {duplicates} (example, user) pairs are duplicates. Remove them.")
        missing = np.setdiff1d(np.arange(examples.max(initial=-1) + 1), examples)
        if len(missing):
            raise ValueError(f"{owner}: {len(missing)} examples have no owner, the first is {missing[0]}.")
        object.__setattr__(self, "examples", edges[0].astype(np.int64))  # sorted by example, then user
        object.__setattr__(self, "users", edges[1].astype(np.int64))

    @property
    def num_examples(self) -> int:
        """Number of examples."""
        return int(self.examples.max(initial=-1)) + 1

    @functools.cached_property
    def degree(self) -> IndexBatch:
        """Number of owners of each example ``(num_examples,)``."""
        return np.bincount(self.examples, minlength=self.num_examples)

    @functools.cached_property
    def rank(self) -> IndexBatch:
        """Rank of each example ``(num_examples,)`` in the order of (number of owners, index)."""
        rank = np.empty(self.num_examples, dtype=np.int64)
        rank[np.lexsort((np.arange(self.num_examples), self.degree))] = np.arange(self.num_examples)
        return rank

    @property
    def num_users(self) -> int:
        """Number of users, derived from the largest index."""
        return int(self.users.max(initial=-1)) + 1


def greedy_contribution_bound(graph: MultiOwnerGraph, max_degree: int = 8) -> IndexBatch:
    """Selects examples so that each user owns at most one of them.

    Selects greedily in the order of (number of owners, index).

    Source: Ganesh et al. 2025 (arXiv:2503.03622).

    Args:
        graph: Ownership of the examples.
        max_degree: Examples with more owners are excluded.

    Returns:
        The indices of the selected examples, sorted.
    """
    max_degree = checked_integer("greedy_contribution_bound", "max_degree", max_degree, at_least=1)
    candidate_E = graph.degree[graph.examples] <= max_degree
    return np.sort(independent_examples(graph, graph.examples[candidate_E], graph.users[candidate_E]))


def independent_examples(graph: MultiOwnerGraph, example: IndexBatch, user: IndexBatch) -> IndexBatch:
    """Selects, in the order of rank, each example that shares no owner with an example selected before.

    ``example`` and ``user`` are the endpoints of the candidate edges, ``(E,)``.
    """
    rank, degree = graph.rank, graph.degree
    is_used = np.zeros(graph.num_users, dtype=bool)
    selected: list[IndexBatch] = []
    # In each round, every user without a selected example votes for their first remaining example. An example with the
    # votes of all its owners is the first one of each owner, so selection in sequence would also select it.
    while len(example):
        best = np.full(graph.num_users, graph.num_examples, dtype=np.int64)
        np.minimum.at(best, user, rank[example])
        votes = np.bincount(example[best[user] == rank[example]], minlength=graph.num_examples)
        chosen = np.flatnonzero((votes == degree) & (degree > 0))
        selected.append(chosen)
        is_used[user[np.isin(example, chosen)]] = True
        is_excluded = np.zeros(graph.num_examples, dtype=bool)
        is_excluded[example[is_used[user]]] = True
        example, user = example[~is_excluded[example]], user[~is_excluded[example]]
    return np.concatenate(selected) if selected else np.empty(0, dtype=np.int64)


@dataclasses.dataclass(frozen=True, kw_only=True)
class MultiOwnerSelection:
    """Sampling scheme over the examples that `greedy_contribution_bound` selects. Each user owns at most one of them.

    Args:
        base: Sampling scheme of the selected examples.
        max_degree: Examples with more owners are excluded.

    Raises:
        TypeError: If ``base`` is not a sampling scheme.
    """

    base: SamplingScheme
    max_degree: int = 8

    name: ClassVar[str] = "multi-owner"
    accounting: ClassVar[str] = "as for the base scheme, with the user as privacy unit"

    def __post_init__(self) -> None:
        checked_scheme("MultiOwnerSelection: base", self.base)
        checked_integer("MultiOwnerSelection", "max_degree", self.max_degree, at_least=1)

    def batch_iterator(self, graph: MultiOwnerGraph, rng: Any = None) -> Iterator[IndexBatch]:
        """Returns the batches of one run; see `SamplingScheme.batch_iterator`.

        Args:
            graph: Ownership of the examples.
            rng: Source of randomness.

        Returns:
            An iterator over arrays of indices of examples, int64.
        """
        examples = greedy_contribution_bound(graph, self.max_degree)
        drawn = Batches(self.base.over(len(examples)), self.base.iterations, words_from(rng))
        return (examples[batch] for batch in drawn)


_NEVER = -(1 << 62)


@dataclasses.dataclass(frozen=True, eq=False)
class MultiOwnerSchedule:
    """Batches of a run, and maximum numbers of participations.

    Attributes:
        batches: Sorted indices of examples, one array for each step.
        user_participations: Maximum number of batches that contain examples of one user.
        example_participations: Maximum number of batches that contain one example.
    """

    batches: tuple[IndexBatch, ...]
    user_participations: int
    example_participations: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class MultiOwnerMinSepSampling:
    """Deterministic batches in which two examples of one user are at least ``min_separation`` batches apart.

    Each batch selects examples in the order of (number of owners, index), and skips examples with an owner in the
    previous ``min_separation - 1`` batches. Limits on the number of participations of a user and of an example start at
    1, and increase only if a batch cannot be filled otherwise.

    Privacy: there is no randomness, and so no amplification. The sensitivity is that of the strategy matrix for
    ``user_participations`` participations at this separation (`dpengine.noise.toeplitz_sq_sensitivity`).

    Source: Ganesh et al. 2025 (arXiv:2503.03622).

    Args:
        batch_size: Number of examples in a batch. A batch has fewer if too few users are available.
        iterations: Number of batches in the run.
        min_separation: Minimum number of batches between two participations of a user, at least 1.
        max_degree: Examples with more owners are excluded.

    Raises:
        TypeError: If a number is not an integer.
        ValueError: If a number is out of range.
    """

    batch_size: int
    iterations: int
    min_separation: int
    max_degree: int = 8

    name: ClassVar[str] = "multi-owner-min-sep"
    accounting: ClassVar[str] = (
        "deterministic; per-user sensitivity from the separation and the number of participations"
    )

    def __post_init__(self) -> None:
        for name, minimum in {"batch_size": 1, "iterations": 0, "min_separation": 1, "max_degree": 1}.items():
            checked_integer(type(self).__name__, name, getattr(self, name), at_least=minimum)

    def batch_iterator(self, graph: MultiOwnerGraph, rng: Any = None) -> Iterator[IndexBatch]:
        """Returns the batches of the schedule. ``rng`` is ignored, because the schedule is deterministic."""
        return iter(self.schedule(graph).batches)

    def schedule(self, graph: MultiOwnerGraph) -> MultiOwnerSchedule:
        """Returns all batches of a run. They depend on the graph only.

        Args:
            graph: Ownership of the examples.

        Returns:
            The schedule.
        """
        builder = _ScheduleBuilder(graph, self)
        batches = tuple(builder.next_batch(step) for step in range(self.iterations))
        users, examples = builder.user_counts.max(initial=0), builder.example_counts.max(initial=0)
        return MultiOwnerSchedule(batches, int(users), int(examples))


class _ScheduleBuilder:
    """Builds a schedule batch by batch. Tracks the number of participations, and the last step of each user."""

    def __init__(self, graph: MultiOwnerGraph, scheme: MultiOwnerMinSepSampling):
        self.graph, self.scheme = graph, scheme
        edges = graph.degree[graph.examples] <= scheme.max_degree
        self.example, self.user = graph.examples[edges], graph.users[edges]
        self.user_counts = np.zeros(graph.num_users, dtype=np.int64)
        self.last = np.full(graph.num_users, _NEVER, dtype=np.int64)
        self.example_counts = np.zeros(graph.num_examples, dtype=np.int64)
        self.max_per_user, self.max_per_example = 1, 1

    def next_batch(self, step: int) -> IndexBatch:
        """Returns the batch of a step. Increases a limit only if the batch cannot be filled otherwise."""
        free = self.last[self.user] + self.scheme.min_separation <= step
        chosen = np.empty(0, dtype=np.int64)
        while len(chosen) < self.scheme.batch_size:
            available = self._with_all_edges(free)
            allowed = self._with_all_edges(free & (self.user_counts[self.user] < self.max_per_user))
            missing = self.scheme.batch_size - len(chosen)
            new = self._choose(allowed & (self.example_counts < self.max_per_example))[:missing]
            if len(new):
                chosen = np.concatenate([chosen, new])
                free &= ~np.isin(self.user, self.user[np.isin(self.example, new)])
            elif allowed.any():
                self.max_per_example += 1
            elif available.any():
                self.max_per_user += 1
            else:
                break
        users = self.user[np.isin(self.example, chosen)]
        self.user_counts[users] += 1
        self.last[users] = step
        self.example_counts[chosen] += 1
        return np.sort(chosen)

    def _with_all_edges(self, mask_E: np.ndarray) -> np.ndarray:
        """Returns a mask ``(num_examples,)`` of the examples all of whose edges are in ``mask_E``."""
        counts = np.bincount(self.example[mask_E], minlength=self.graph.num_examples)
        return (counts == self.graph.degree) & (counts > 0)

    def _choose(self, examples: np.ndarray) -> IndexBatch:
        """Returns masked examples of which no two share an owner, in the order of rank."""
        edges = examples[self.example]
        independent = independent_examples(self.graph, self.example[edges], self.user[edges])
        return independent[np.argsort(self.graph.rank[independent])]
