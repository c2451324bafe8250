"""Canonical form of a charge history, for accountants.

Two histories that differ only in the order or grouping of charges have equal compositions.
"""

from __future__ import annotations

import functools
import math
from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any, get_args

import numpy as np

from dpengine.errors import AccountingRefusedError

from .batch_events import FixedSizeGaussianEvent, MixtureGaussianEvent, TruncatedGaussianEvent
from .events import CyclicGaussianEvent, GaussianEvent, MatrixGaussianEvent, PoissonGaussianEvent, Relation
from .ledger import Charge
from .merging import ReleaseKinds, mean_release, split_into_cells
from .sampled_matrix import SampledMatrixEvent
from .tuning import RepeatAndSelectEvent

BatchEvent = TruncatedGaussianEvent | FixedSizeGaussianEvent | MixtureGaussianEvent

MAX_DISTINCT = 128


@dataclass(frozen=True)
class SampledGaussian:
    """``count`` Poisson-sampled Gaussian mechanisms with equal parameters; ``sample_rate`` is below 1."""

    sample_rate: float
    noise_multiplier: float
    count: int


@dataclass(frozen=True)
class Composition:
    """Canonical form of a charge history, for accountants.

    Two histories that differ only in the order or grouping of charges have equal compositions.
    """

    precision: float  # sum of 1 / noise_multiplier**2 over the unsampled Gaussians, which compose to one Gaussian
    sampled: tuple[SampledGaussian, ...]
    non_private: bool
    runs: tuple[tuple[SampledMatrixEvent, int], ...] = ()
    batches: tuple[tuple[BatchEvent, int], ...] = ()  # with the maximum number of participations of an example
    selections: tuple[tuple[RepeatAndSelectEvent, int], ...] = ()

    @property
    def empty(self) -> bool:
        """True if there are no releases."""
        return not (self.precision or self.sampled or self.non_private or self.runs or self.batches or self.selections)

    @property
    def unsampled(self) -> bool:
        """True if all releases together are one Gaussian mechanism."""
        return not (self.sampled or self.runs or self.batches or self.selections)

    def check_no_sampled_runs(self) -> None:
        """Raises AccountingRefusedError if the history contains a run whose epsilon has no closed form."""
        if self.runs:
            raise AccountingRefusedError(
                f"This history contains a {self.runs[0][0].scheme} run, whose epsilon has no closed form.",
                fix="Use accountant='monte_carlo'.",
            )

    def check_no_batch_events(self, accountant: str) -> None:
        """Raises AccountingRefusedError if the history contains truncated, fixed-size or mixture batches."""
        if self.batches:
            raise AccountingRefusedError(
                f"accountant {accountant!r} has no bound for a {type(self.batches[0][0]).__name__}.",
                fix="Use accountant='pld'.",
            )

    def check_no_selections(self) -> None:
        """Raises AccountingRefusedError if the history contains a hyperparameter selection."""
        if self.selections:
            raise AccountingRefusedError(
                "This history contains a hyperparameter selection, which only the RDP accountant can bound.",
                fix="Use accountant='rdp'.",
            )

    def mu(self, relation: Relation) -> float:
        """Returns mu of Gaussian DP for the composed unsampled Gaussians (the mu**2 add up); replace-one doubles it."""
        return math.sqrt(self.precision) * (2.0 if relation is Relation.REPLACE_ONE else 1.0)

    def limited(self, *, above: bool = True) -> Composition:
        """Returns the composition with at most `MAX_DISTINCT` distinct sampled releases, by merging similar ones.

        The cost is an upper bound with ``above``, otherwise a lower bound.
        """
        return self if len(self.sampled) <= MAX_DISTINCT else _limited(self, MAX_DISTINCT, above)

    def limited_estimate(self) -> Composition:
        """Returns the composition like `limited`, but with the mean cost of merged releases: an estimate, no bound."""
        return self if len(self.sampled) <= MAX_DISTINCT else _limited(self, MAX_DISTINCT, None)


@dataclass(frozen=True)
class Bounds:
    """Bounds on epsilon.

    Attributes:
        lower: Lower bound of epsilon.
        estimate: Point estimate of epsilon.
        upper: Upper bound of epsilon, which is the reported value.
    """

    lower: float
    estimate: float
    upper: float


def compose(history: Iterable[Charge]) -> Composition:
    """Returns the composition of a history."""
    counts: defaultdict[type, Counter[Any]] = defaultdict(Counter)  # by class, and by event
    non_private = False
    for charge in history:
        event = charge.event
        if not event.claimed:
            raise AccountingRefusedError(
                f"Epsilon cannot be computed for this history: {event.refusal}",
                fix="Use Poisson sampling for a guarantee.",
            )
        if event.noiseless:
            non_private = True
        else:
            counts[type(event)][event] += charge.count  # per run, also if the history interleaves runs
    unsampled: Counter[float] = Counter()
    sampled: Counter[tuple[float, float]] = Counter()
    for kind in (GaussianEvent, PoissonGaussianEvent, CyclicGaussianEvent):
        for event, steps in counts[kind].items():
            if event.inclusion_rate == 1:
                unsampled[event.noise_multiplier] += event.cycles(steps)
            else:
                sampled[event.inclusion_rate, event.noise_multiplier] += event.cycles(steps)
    batches = [(event, event.cycles(steps)) for kind in get_args(BatchEvent) for event, steps in counts[kind].items()]
    # Counts are integers, and fsum rounds once, so the result does not depend on order and splits.
    groups = tuple(SampledGaussian(rate, sigma, count) for (rate, sigma), count in sorted(sampled.items()))
    parts = [count / sigma / sigma for sigma, count in unsampled.items()]
    precision = math.fsum([*parts, *(event.precision(steps) for event, steps in counts[MatrixGaussianEvent].items())])
    return Composition(
        precision,
        groups,
        non_private,
        tuple(sorted(counts[SampledMatrixEvent].items(), key=repr)),
        tuple(sorted(batches, key=repr)),
        tuple(sorted(counts[RepeatAndSelectEvent].items(), key=repr)),
    )


@functools.lru_cache(maxsize=8)
def _limited(composition: Composition, max_distinct: int, above: bool | None) -> Composition:
    """Merges releases to an upper or lower bound, or to an estimate if ``above`` is None."""
    kinds = ReleaseKinds(*np.array([(g.sample_rate, g.noise_multiplier, g.count) for g in composition.sampled]).T)
    counts: Counter[tuple[float, float]] = Counter()
    for cell in split_into_cells(kinds, max_distinct, above=above is not False):
        merged = mean_release(kinds, cell) if above is None else kinds.corner(cell, above=above)
        counts[merged] += sum(composition.sampled[index].count for index in cell.tolist())
    groups = tuple(SampledGaussian(rate, sigma, count) for (rate, sigma), count in sorted(counts.items()))
    return replace(composition, sampled=groups)
