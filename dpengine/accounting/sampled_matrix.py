"""The event of a run whose noise hangs together over steps, and in which each example's steps are random."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from dpengine.errors import InvalidBudgetError

from . import arguments

SCHEMES = ("balls-in-bins", "cyclic-poisson", "b-min-sep")
"""Laws by which an example's steps are drawn, by the names that batch selections have for them."""


@dataclass(frozen=True)
class SampledMatrixEvent:
    """One whole run that releases ``G + S^-1 Z`` step by step, with credit for the chance in who takes part when.

    A charge of it pays for all ``steps``. There is no closed form: `monte_carlo_epsilon` verifies an epsilon. A part of
    the run is another event, with fewer steps, whose number was fixed in advance.

    Each example's steps are drawn independently of all other examples, and batches are not cut. So groups of one size
    (``Partition.EQUAL_SPLIT``) are not covered, as an example's group hangs on those of the others there.

    Source: Choquette-Choo et al. 2024 (arXiv:2410.06266).

    Attributes:
        noise_multiplier: Standard deviation of the noise over the sensitivity to one participation: the bound of a
            contribution times the largest column norm of the strategy. A multiple of the strategy is the same run.
        scheme: One of `SCHEMES`. "balls-in-bins": each example picks one of ``cycle_length`` bins, and takes part in
            every step of it. "cyclic-poisson": the same with ``sample_rate`` at each step of the bin. "b-min-sep": with
            ``sample_rate`` at each step, except that it rests for ``cycle_length - 1`` steps after each participation.
        cycle_length: Bins, groups, or steps from one participation to the next at least.
        steps: Of the whole run.
        coefficients: First column of a Toeplitz strategy S, none negative, the first one positive.
        columns: Instead: all columns of a lower-triangular S, of ``steps`` numbers each, none negative.
        sample_rate: As above; 1 for balls in bins.
        warm_start: For b-min-sep: whether examples rest at the start as they would in the middle of a long run.

    Except for balls in bins, columns ``cycle_length`` apart must not overlap: no more bands than that.
    """

    noise_multiplier: float
    scheme: str
    cycle_length: int
    steps: int
    coefficients: tuple[float, ...] = ()
    columns: tuple[tuple[float, ...], ...] = ()
    sample_rate: float = 1.0
    warm_start: bool = False

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
                f"sample_rate={self.sample_rate} has no place in balls-in-bins: all of a bin take part.",
                fix='Use scheme="cyclic-poisson".',
            )
        if not isinstance(self.warm_start, bool) or (self.warm_start and self.scheme != "b-min-sep"):
            raise InvalidBudgetError(f"warm_start={self.warm_start!r} is True or False, and for b-min-sep alone.")
        self._check_strategy()

    def _check_strategy(self) -> None:
        if bool(self.coefficients) == bool(self.columns):
            raise InvalidBudgetError("SampledMatrixEvent takes either coefficients or columns.")
        if len(self.coefficients) > self.steps:
            raise InvalidBudgetError(f"coefficients holds {len(self.coefficients)} numbers for {self.steps} steps.")
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
        """Diagonals of the strategy down to the last one that is not zero."""
        columns = [self.coefficients] if self.coefficients else [c[i:] for i, c in enumerate(self.columns)]
        return max(k + 1 for column in columns for k, entry in enumerate(column) if entry)


def _entries(name: str, values: Iterable[float]) -> tuple[float, ...]:
    entries = tuple(arguments.real(name, value) for value in values)
    if any(not math.isfinite(entry) or entry < 0 for entry in entries):
        raise InvalidBudgetError(
            f"{name} holds a number that is negative or not finite; amplification needs a strategy without negative "
            "entries.",
            fix="Use MatrixGaussianEvent, which takes no credit for chance.",
        )
    return entries
