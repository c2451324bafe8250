"""Examples with several owners in a fixed order, such that no user is met again for some batches."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any, ClassVar

import numpy as np

from dpengine.sampling import IndexBatch, whole_number

from .multi_owner import MultiOwnerGraph, independent_examples

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
