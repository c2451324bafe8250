"""Event of a run with correlated noise and random participation of each example."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar

from dpengine.errors import InvalidBudgetError

from . import arguments
from .base_event import BaseEvent

SCHEMES = ("balls-in-bins", "cyclic-poisson", "b-min-sep")
"""Sampling schemes, by their names in ``dpengine.batch_selection``."""


@dataclass(frozen=True)
class SampledMatrixEvent(BaseEvent):
    """One complete run that releases ``G + S^-1 Z`` step by step, with amplification by random participation.

    One charge accounts for all ``steps``. There is no closed form: `monte_carlo_epsilon` verifies an epsilon. A
    shorter run is an event with fewer steps, if their number was fixed before the run.

    The steps of each example are drawn independently of all other examples, and batches are not truncated. Groups of
    equal size (``Partition.EQUAL_SPLIT``) are not covered, because an example's group then depends on those of others.

    Source: Choquette-Choo et al. 2024 (arXiv:2410.06266).

    Attributes:
        noise_multiplier: Standard deviation of the noise over the sensitivity to one participation: the clipping norm
            times the largest column norm of the strategy. Scaling the strategy does not change the run.
        scheme: One of `SCHEMES`. "balls-in-bins": each example selects one of ``cycle_length`` bins, and participates
            in every step of the bin. "cyclic-poisson": it participates with probability ``sample_rate`` in each step
            of the bin. "b-min-sep": it participates with probability ``sample_rate`` in each step, except in the
            ``cycle_length - 1`` steps after each participation.
        cycle_length: Number of bins or groups, or minimum number of steps between two participations.
        steps: Number of steps in the run.
        coefficients: First column of a Toeplitz strategy S, nonnegative, with a positive first element.
        columns: Alternatively all columns of a lower-triangular S, of ``steps`` nonnegative numbers each.
        sample_rate: Probability of participation, see ``scheme``; 1 for balls-in-bins.
        warm_start: For b-min-sep: True if the first step is distributed like a step in the middle of a long run.

    Except for balls-in-bins, the strategy has at most ``cycle_length`` bands, so columns that are
    at least ``cycle_length`` apart do not overlap.
    """

    noise_multiplier: float
    scheme: str
    cycle_length: int
    steps: int
    coefficients: tuple[float, ...] = ()
    columns: tuple[tuple[float, ...], ...] = ()
    sample_rate: float = 1.0
    warm_start: bool = False

    is_whole_run: ClassVar[bool] = True

    @property
    def num_steps(self) -> int:  # type: ignore[override]
        """See `BaseEvent.num_steps`."""
        return self.steps

    def __post_init__(self) -> None:
        object.__setattr__(self, "noise_multiplier", arguments.noise_multiplier(self.noise_multiplier))
        object.__setattr__(self, "cycle_length", arguments.count("cycle_length", self.cycle_length))
        object.__setattr__(self, "steps", arguments.count("steps", self.steps))
        object.__setattr__(self, "sample_rate", arguments.sample_rate(self.sample_rate))
        object.__setattr__(self, "coefficients", _entries("coefficients", self.coefficients))
        object.__setattr__(self, "columns", tuple(_entries("columns", column) for column in self.columns))
        if self.scheme not in SCHEMES:
            raise InvalidBudgetError(
                f"scheme={self.scheme!r} is not known.", fix=f"Choose one of {', '.join(SCHEMES)}."
            )
        if self.scheme == "balls-in-bins" and self.sample_rate != 1:
            raise InvalidBudgetError(
                f"sample_rate={self.sample_rate} is not supported by balls-in-bins: all examples of a bin participate.",
                fix='Use scheme="cyclic-poisson".',
            )
        if not isinstance(self.warm_start, bool) or (self.warm_start and self.scheme != "b-min-sep"):
            raise InvalidBudgetError(f"warm_start={self.warm_start!r} must be False, or True for b-min-sep.")
        self._check_strategy()

    def _check_strategy(self) -> None:
        if bool(self.coefficients) == bool(self.columns):
            raise InvalidBudgetError("SampledMatrixEvent takes either coefficients or columns.")
        if len(self.coefficients) > self.steps:
            raise InvalidBudgetError(f"coefficients has {len(self.coefficients)} numbers for {self.steps} steps.")
        if self.columns and {len(self.columns), *map(len, self.columns)} != {self.steps}:
            raise InvalidBudgetError(f"columns must be {self.steps} columns of {self.steps} numbers.")
        if any(any(column[:i]) or not column[i] > 0 for i, column in enumerate(self.columns)):
            raise InvalidBudgetError("columns must be lower-triangular, with a positive diagonal.")
        if self.coefficients and not self.coefficients[0] > 0:
            raise InvalidBudgetError("coefficients must begin with a positive number.")
        if self.scheme != "balls-in-bins" and self.bands > self.cycle_length:
            raise InvalidBudgetError(
                f"A strategy of {self.bands} bands overlaps between participations {self.cycle_length} steps apart.",
                fix=f"Use at most {self.cycle_length} bands, or balls-in-bins.",
            )

    @property
    def bands(self) -> int:
        """Number of diagonals of the strategy, up to the last nonzero one."""
        columns = [self.coefficients] if self.coefficients else [c[i:] for i, c in enumerate(self.columns)]
        return max(k + 1 for column in columns for k, entry in enumerate(column) if entry)


def _entries(name: str, values: Iterable[float]) -> tuple[float, ...]:
    entries = tuple(arguments.real(name, value) for value in values)
    if any(not math.isfinite(entry) or entry < 0 for entry in entries):
        raise InvalidBudgetError(
            f"{name} contains a number that is negative or not finite; amplification needs a nonnegative strategy.",
            fix="Use MatrixGaussianEvent, which does not use amplification.",
        )
    return entries
