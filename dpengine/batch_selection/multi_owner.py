"""Sampling of examples that belong to several users: one example for each user, or a minimum separation."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from dpengine.sampling.scheme import IndexBatch, whole_number

from .scheme import AbstractBatchSelection, Batches, words_from


@dataclasses.dataclass(frozen=True, eq=False)
class MultiOwnerGraph:
    """Who owns what: one edge for each pair of an example and a user. Public.

    Args:
        examples: ``(E,)`` indices of examples, from 0; every example has an owner.
        users: ``(E,)`` indices of users, from 0.

    Raises:
        ValueError: If the arrays do not fit, an edge is there twice, or an example has no owner.
    """

    examples: npt.NDArray[np.int64]
    users: npt.NDArray[np.int64]

    def __post_init__(self) -> None:
        examples, users = (np.asarray(given) for given in (self.examples, self.users))
        owner = "MultiOwnerGraph"
        if examples.ndim != 1 or examples.shape != users.shape:
            raise ValueError(f"{owner}: examples and users have shapes {examples.shape} and {users.shape}.")
        whole = all(given.dtype.kind in "iu" and (given >= 0).all() for given in (examples, users) if given.size)
        if not whole:
            raise ValueError(f"{owner}: examples and users must be whole numbers from 0.")
        edges = np.unique(np.stack([examples, users]), axis=1)
        if edges.shape[1] < len(examples):
            raise ValueError(f"{owner}: {len(examples) - edges.shape[1]} edges are there more than once.")
        missing = np.setdiff1d(np.arange(examples.max(initial=-1) + 1), examples)
        if len(missing):
            raise ValueError(f"{owner}: {len(missing)} examples have no owner, the first is {missing[0]}.")
        object.__setattr__(self, "examples", edges[0].astype(np.int64))  # sorted by example, then user
        object.__setattr__(self, "users", edges[1].astype(np.int64))

    @property
    def num_examples(self) -> int:
        """Examples."""
        return int(self.examples.max(initial=-1)) + 1

    @functools.cached_property
    def degree(self) -> IndexBatch:
        """Owners of each example ``(num_examples,)``."""
        return np.bincount(self.examples, minlength=self.num_examples)

    @functools.cached_property
    def rank(self) -> IndexBatch:
        """Place of each example ``(num_examples,)`` in the order of (owners, index)."""
        rank = np.empty(self.num_examples, dtype=np.int64)
        rank[np.lexsort((np.arange(self.num_examples), self.degree))] = np.arange(self.num_examples)
        return rank

    @property
    def num_users(self) -> int:
        """Users, up to the largest index."""
        return int(self.users.max(initial=-1)) + 1


def greedy_contribution_bound(graph: MultiOwnerGraph, max_degree: int = 8) -> IndexBatch:
    """Examples such that no user owns two of them: in the order of (owners, index), each that takes no user twice.

    Source: Ganesh et al. 2025 (arXiv:2503.03622).

    Args:
        graph: Who owns what.
        max_degree: Examples with more owners are left out.

    Returns:
        The indices of what is kept, sorted.
    """
    max_degree = whole_number("greedy_contribution_bound", "max_degree", max_degree, at_least=1)
    open_edge = graph.degree[graph.examples] <= max_degree
    return np.sort(independent_examples(graph, graph.examples[open_edge], graph.users[open_edge]))


def independent_examples(graph: MultiOwnerGraph, example: IndexBatch, user: IndexBatch) -> IndexBatch:
    """Of some examples, in the graph's order, each that takes no user twice."""
    rank, degree = graph.rank, graph.degree
    taken = np.zeros(graph.num_users, dtype=bool)
    kept: list[IndexBatch] = []
    # In each round every user who is free votes for his first example; one that all of its owners vote for is the first
    # for each of them, so the order would have kept it too.
    while len(example):
        best = np.full(graph.num_users, graph.num_examples, dtype=np.int64)
        np.minimum.at(best, user, rank[example])
        agrees = np.bincount(example[best[user] == rank[example]], minlength=graph.num_examples)
        chosen = np.flatnonzero((agrees == degree) & (degree > 0))
        kept.append(chosen)
        taken[user[np.isin(example, chosen)]] = True
        lost = np.zeros(graph.num_examples, dtype=bool)
        lost[example[taken[user]]] = True
        example, user = example[~lost[example]], user[~lost[example]]
    return np.concatenate(kept) if kept else np.empty(0, dtype=np.int64)


@dataclasses.dataclass(frozen=True, kw_only=True)
class MultiOwnerSelection:
    """Another law over the examples that `greedy_contribution_bound` keeps, so that each user is in one at most.

    Args:
        base: The law of those examples.
        max_degree: Examples with more owners are left out.

    Raises:
        TypeError: If ``base`` is no law.
    """

    base: AbstractBatchSelection
    max_degree: int = 8

    law: ClassVar[str] = "multi-owner"
    accounting: ClassVar[str] = "that of the base, for users"

    def __post_init__(self) -> None:
        if not isinstance(self.base, AbstractBatchSelection):
            raise TypeError(f"MultiOwnerSelection: base is a {type(self.base).__name__}; pass a law of batches.")
        whole_number("MultiOwnerSelection", "max_degree", self.max_degree, at_least=1)

    def batch_iterator(self, graph: MultiOwnerGraph, rng: Any = None) -> Iterator[IndexBatch]:
        """The batches of one run: see `AbstractBatchSelection.batch_iterator`.

        Args:
            graph: Who owns what.
            rng: Where randomness comes from.

        Returns:
            An iterator over arrays of indices of examples, int64.
        """
        kept = greedy_contribution_bound(graph, self.max_degree)
        drawn = Batches(self.base.over(len(kept)), self.base.iterations, words_from(rng))
        return (kept[batch] for batch in drawn)


_LONG_AGO = -(1 << 62)


@dataclasses.dataclass(frozen=True, eq=False)
class MultiOwnerSchedule:
    """The batches of a run, and how often anybody is in them.

    Attributes:
        batches: Sorted indices of examples, one array for each step.
        user_participations: Most batches that a user is in.
        example_participations: Most batches that an example is in.
    """

    batches: tuple[IndexBatch, ...]
    user_participations: int
    example_participations: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class MultiOwnerMinSepSampling:
    """Batches in a fixed order, in which two examples of one user are at least ``min_separation`` batches apart.

    Each batch takes examples in the order of (owners, index) whose users have all rested. Nobody is in more batches
    than needed: how often a user, and an example, may take part grows only when a batch cannot be filled otherwise.
    There is no chance in it, so none that could be claimed: the sensitivity is that of the strategy matrix for
    ``user_participations`` at this separation (`dpengine.noise.toeplitz_sq_sensitivity`).

    Source: Ganesh et al. 2025 (arXiv:2503.03622).

    Args:
        batch_size: Examples of a batch; fewer where too many users rest.
        iterations: Batches of the run.
        min_separation: Batches from one of a user to his next, at least 1.
        max_degree: Examples with more owners are left out.

    Raises:
        TypeError: If a number is not whole.
        ValueError: If one is out of range.
    """

    batch_size: int
    iterations: int
    min_separation: int
    max_degree: int = 8

    law: ClassVar[str] = "multi-owner-min-sep"
    accounting: ClassVar[str] = "min_separation with the participations of the schedule, for users; no chance"

    def __post_init__(self) -> None:
        for name, least in {"batch_size": 1, "iterations": 0, "min_separation": 1, "max_degree": 1}.items():
            whole_number(type(self).__name__, name, getattr(self, name), at_least=least)

    def batch_iterator(self, graph: MultiOwnerGraph, rng: Any = None) -> Iterator[IndexBatch]:
        """The batches of the schedule. ``rng`` is not read: there is no chance in it."""
        return iter(self.schedule(graph).batches)

    def schedule(self, graph: MultiOwnerGraph) -> MultiOwnerSchedule:
        """All batches of a run, a function of the graph alone.

        Args:
            graph: Who owns what.

        Returns:
            The schedule.
        """
        state = _Progress(graph, self)
        batches = tuple(state.next_batch(step) for step in range(self.iterations))
        users, examples = state.met.max(initial=0), state.taken.max(initial=0)
        return MultiOwnerSchedule(batches, int(users), int(examples))


class _Progress:
    """How often, and when last, everybody took part."""

    def __init__(self, graph: MultiOwnerGraph, law: MultiOwnerMinSepSampling):
        self.graph, self.law = graph, law
        edges = graph.degree[graph.examples] <= law.max_degree
        self.example, self.user = graph.examples[edges], graph.users[edges]
        self.met = np.zeros(graph.num_users, dtype=np.int64)
        self.last = np.full(graph.num_users, _LONG_AGO, dtype=np.int64)
        self.taken = np.zeros(graph.num_examples, dtype=np.int64)
        self.most_met, self.most_taken = 1, 1

    def next_batch(self, step: int) -> IndexBatch:
        """The batch of this step; a limit grows where nothing else keeps it from being full."""
        free = self.last[self.user] + self.law.min_separation <= step
        chosen = np.empty(0, dtype=np.int64)
        while len(chosen) < self.law.batch_size:
            waiting = self._whole(free)
            unmet = self._whole(free & (self.met[self.user] < self.most_met))
            found = self._choose(unmet & (self.taken < self.most_taken))[: self.law.batch_size - len(chosen)]
            if len(found):
                chosen = np.concatenate([chosen, found])
                free &= ~np.isin(self.user, self.user[np.isin(self.example, found)])
            elif unmet.any():
                self.most_taken += 1
            elif waiting.any():
                self.most_met += 1
            else:
                break
        users = self.user[np.isin(self.example, chosen)]
        self.met[users] += 1
        self.last[users] = step
        self.taken[chosen] += 1
        return np.sort(chosen)

    def _whole(self, fit_E: np.ndarray) -> np.ndarray:
        """Which examples ``(num_examples,)`` have edges of which all fit."""
        fitting = np.bincount(self.example[fit_E], minlength=self.graph.num_examples)
        return (fitting == self.graph.degree) & (fitting > 0)

    def _choose(self, examples: np.ndarray) -> IndexBatch:
        """Of these examples, each that shares no user with one before it, in the graph's order."""
        edges = examples[self.example]
        found = independent_examples(self.graph, self.example[edges], self.user[edges])
        return found[np.argsort(self.graph.rank[found])]
