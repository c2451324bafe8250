"""The strategy matrix of correlated noise, computed from the weights of its rows, and its privacy analysis."""

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

LONGEST = 4096
"""Maximum number of steps of noise whose strategy is computed as a matrix."""
_TOLERANCE = 1e-6
_MOST_GROWTH = 4096
_STEADY = "Use weights whose noise does not grow over the run, or fewer steps."


def recurrence_of(noise: CorrelatedRows, steps: int) -> Recurrence:
    """Returns noise of your own for a run of ``steps`` steps, with its column norm, bands and sensitivity.

    Raises InvalidBudgetError if the weights are not those of a run of this length, or cannot be computed accurately.
    """
    name = type(noise).__name__
    if noise.size is not None and steps > noise.size:
        raise InvalidBudgetError(
            f"noise={name}(...) has {noise.size:,} steps, and {steps:,} are planned.",
            fix=f"Pass steps={noise.size}, or noise of {steps:,} steps.",
        )
    if steps > LONGEST:
        raise InvalidBudgetError(
            f"noise={name}(...) is analyzed as a matrix, for at most {LONGEST:,} steps; {steps:,} are planned.",
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
        lambda step: rows[step][:2],  # those that were analyzed, whatever the object returns later
        lambda step: rows[step][2:],
        steps,
        norm,
        Correlation(bands if bands < steps else None, functools.partial(_squares, strategy)),
        {"noise": name, **description, "bands": bands, "iterations": steps},
    )


def strategy_of(noise: Recurrence, steps: int) -> np.ndarray:
    """Returns the strategy S ``(steps, steps)`` of noise, divided by its largest column norm."""
    return _strategy(_checked_rows(noise, steps)[0]) / noise.column_norm


_Row = tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]


def _checked_rows(noise: CorrelatedRows, steps: int) -> tuple[list[_Row], str]:
    """Returns fresh, weights, factors and gains of each step, and a digest of them."""
    found: list[_Row] = []
    digest = hashlib.blake2b(digest_size=8)
    for step in range(steps):
        row = tuple(np.array(values, dtype=np.float64) for values in (*noise.row(step), *noise.kept(step)))
        num_kept = (found[0] if found else row)[1].size
        shapes = [values.shape for values in row[1:]]
        right = row[0].ndim == 1 and len(row[0]) and row[0][0] > 0 and all(np.isfinite(values).all() for values in row)
        if not right or shapes != [(num_kept,)] * 3:
            raise InvalidBudgetError(
                f"noise={type(noise).__name__}(...): row({step}) and kept({step}) are {noise.row(step)!r} and "
                f"{noise.kept(step)!r}.",
                fix="Return finite numbers, of which the first of row() is positive, and as many weights, factors and "
                "gains as there are kept rows, the same number at each step.",
            )
        for values in row:
            digest.update(len(values).to_bytes(8, "little") + values.tobytes())
        found.append(row)  # type: ignore[arg-type]
    return found, digest.hexdigest()


def _strategy(rows: list[_Row]) -> np.ndarray:
    """Returns S, whose column j is the fresh noise that gives noise of 1 at step j, and checks it.

    The noise of a run is ``S^-1 Z``. Both S and its inverse are computed from the weights, for all columns at once.
    """
    size, num_kept = len(rows), len(rows[0][1])
    noise, strategy = np.zeros((size, size)), np.zeros((size, size))
    kept, kept_of_strategy = np.zeros((num_kept, size)), np.zeros((num_kept, size))
    one = np.eye(size)
    for step, (fresh, weights, factors, gains) in enumerate(rows):
        lags = np.arange(min(len(fresh), step + 1))
        noise[step] = weights @ kept
        noise[step, step - lags] += fresh[lags]
        strategy[step] = (one[step] - weights @ kept_of_strategy - fresh[lags[1:]] @ strategy[step - lags[1:]]) / fresh[
            0
        ]
        kept = factors[:, None] * kept + np.outer(gains, noise[step])
        kept_of_strategy = factors[:, None] * kept_of_strategy + np.outer(gains, one[step])
    error = np.abs(noise @ strategy - one).max()
    if not error < _TOLERANCE:
        raise InvalidBudgetError(
            f"The sensitivity of this noise cannot be computed accurately: its matrix times its inverse differs from "
            f"the identity by {error:.2g}.",
            fix=_STEADY,
        )
    growth = np.linalg.norm(noise, axis=1) / np.array([row[0][0] for row in rows])
    if growth.max() > _MOST_GROWTH:  # float32 would round the fresh row away, and with it the guarantee
        raise InvalidBudgetError(
            f"The noise of step {growth.argmax()} is {growth.max():.2g} times its fresh row, at most {_MOST_GROWTH} is "
            "supported.",
            fix=_STEADY,
        )
    return strategy


def _squares(strategy: np.ndarray, cycle_length: int) -> tuple[float, ...]:
    return cycle_sq_sensitivities_of(strategy, cycle_length)
