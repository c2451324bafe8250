"""Privacy analysis of custom correlated noise, from the strategy matrix that the weights of its rows define."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Mapping
from typing import Any

import numpy as np

from dpengine.accounting.run_events import Correlation
from dpengine.errors import InvalidBudgetError

from .correlated import CorrelatedRows, Recurrence
from .sensitivity import cycle_sq_sensitivities_of

MAX_STEPS = 4096
"""Maximum number of steps of noise whose strategy is computed as a matrix."""
_TOLERANCE = 1e-6  # maximum difference between the identity and the product of the matrix and its inverse
_MAX_GROWTH = 4096
_GROWTH_FIX = "Use weights whose noise does not grow over the run, or fewer steps."


def recurrence_of(noise: CorrelatedRows, steps: int) -> Recurrence:
    """Returns custom noise for a run of ``steps`` steps, with its column norm, number of bands and sensitivity.

    Raises InvalidBudgetError if the weights are invalid, or the sensitivity cannot be computed accurately.
    """
    name = type(noise).__name__
    if noise.size is not None and steps > noise.size:
        raise InvalidBudgetError(
            f"noise={name}(...) has {noise.size:,} steps, but {steps:,} steps are planned.",
            fix=f"Pass steps={noise.size}, or noise of {steps:,} steps.",
        )
    if steps > MAX_STEPS:
        raise InvalidBudgetError(
            f"noise={name}(...) is analyzed as a matrix, for at most {MAX_STEPS:,} steps; {steps:,} are planned.",
            fix="Pass noise=BandMF(...) or BLT(), or train in several runs.",
        )
    rows, digest = _checked_rows(noise, steps)
    strategy = _strategy(rows)
    lags = [lag for lag in range(steps) if np.diagonal(strategy, -lag).any()]
    bands = lags[-1] + 1
    norm = float(np.linalg.norm(strategy, axis=0).max())
    description: Mapping[str, Any] = getattr(noise, "description", {})
    return Recurrence(
        f"{getattr(noise, 'name', name)}-{digest}",
        lambda step: rows[step][:2],  # the analyzed weights; the object might return others later
        lambda step: rows[step][2:],
        steps,
        norm,
        Correlation(bands if bands < steps else None, functools.partial(_sq_sensitivities, strategy)),
        {"noise": name, **description, "bands": bands, "iterations": steps},
    )


def strategy_of(noise: Recurrence, steps: int) -> np.ndarray:
    """Returns the strategy S ``(steps, steps)`` of the noise, divided by its largest column norm."""
    return _strategy(_checked_rows(noise, steps)[0]) / noise.column_norm


_Row = tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]


def _checked_rows(noise: CorrelatedRows, steps: int) -> tuple[list[_Row], str]:
    """Returns the fresh weights, weights, factors and gains of each step, and a digest of them."""
    rows: list[_Row] = []
    digest = hashlib.blake2b(digest_size=8)
    for step in range(steps):
        row = tuple(np.array(values, dtype=np.float64) for values in (*noise.row(step), *noise.kept(step)))
        num_kept = (rows[0] if rows else row)[1].size
        shapes = [values.shape for values in row[1:]]
        valid = row[0].ndim == 1 and len(row[0]) and row[0][0] > 0 and all(np.isfinite(values).all() for values in row)
        if not valid or shapes != [(num_kept,)] * 3:
            raise InvalidBudgetError(
                f"noise={type(noise).__name__}(...): row({step}) and kept({step}) are {noise.row(step)!r} and "
                f"{noise.kept(step)!r}.",
                fix="Return finite numbers, where the first number of row() is positive, and one weight, factor and "
                "gain for each kept row. The number of kept rows must be the same at each step.",
            )
        for values in row:
            digest.update(len(values).to_bytes(8, "little") + values.tobytes())
        rows.append(row)  # type: ignore[arg-type]
    return rows, digest.hexdigest()


def _strategy(rows: list[_Row]) -> np.ndarray:
    """Computes S and its inverse from the weights, checks that both are accurate, and returns S.

    The noise of a run is ``S^-1 Z``, so column j of S is the fresh noise that gives the noise 1 at step j and 0 at all
    other steps.
    """
    size, num_kept = len(rows), len(rows[0][1])
    noise, strategy = np.zeros((size, size)), np.zeros((size, size))
    kept, kept_of_strategy = np.zeros((num_kept, size)), np.zeros((num_kept, size))
    identity = np.eye(size)
    for step, (fresh, weights, factors, gains) in enumerate(rows):
        lags = np.arange(min(len(fresh), step + 1))
        noise[step] = weights @ kept
        noise[step, step - lags] += fresh[lags]
        new = identity[step] - weights @ kept_of_strategy - fresh[lags[1:]] @ strategy[step - lags[1:]]
        strategy[step] = new / fresh[0]
        kept = factors[:, None] * kept + np.outer(gains, noise[step])
        kept_of_strategy = factors[:, None] * kept_of_strategy + np.outer(gains, identity[step])
    error = np.abs(noise @ strategy - identity).max()
    if not error < _TOLERANCE:
        raise InvalidBudgetError(
            f"The sensitivity of this noise cannot be computed accurately: its matrix times its inverse differs from "
            f"the identity by {error:.2g}.",
            fix=_GROWTH_FIX,
        )
    growth = np.linalg.norm(noise, axis=1) / np.array([row[0][0] for row in rows])
    if growth.max() > _MAX_GROWTH:  # rounding to float32 would remove the fresh row, on which the guarantee depends
        raise InvalidBudgetError(
            f"The noise of step {growth.argmax()} is {growth.max():.2g} times its fresh row; at most {_MAX_GROWTH} "
            "times is supported.",
            fix=_GROWTH_FIX,
        )
    return strategy


def _sq_sensitivities(strategy: np.ndarray, cycle_length: int) -> tuple[float, ...]:
    return cycle_sq_sensitivities_of(strategy, cycle_length)
