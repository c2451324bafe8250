"""Recurrences of strategies, which define the weights of correlated noise. K is the number of kept rows."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
from typing import Any

import numpy as np

from dpengine.accounting.run_events import Correlation

from .buffered import blt_column
from .correlated import Recurrence, Weights
from .sensitivity import cycle_sq_sensitivities
from .toeplitz import Coefficients, column_norms, toeplitz_inverse


def banded_toeplitz(strategy: Coefficients, *, column_normalized_steps: int | None = None) -> Recurrence:
    """Returns banded Toeplitz noise (BandMF), ``x_t = (z_t - sum_{0<j<b} c_j x_{t-j}) / c_0``. Keeps b - 1 rows.

    Source: Choquette-Choo et al. 2023 (arXiv:2306.08153).

    Args:
        strategy: First column c of S, ``(b,)``, finite, with a positive first element.
        column_normalized_steps: Number of steps of the run, if each column of S is divided by its norm. The largest
            column norm is then 1. None for no normalization; the largest column norm is then the norm of c.

    Returns:
        The recurrence.

    Raises:
        ValueError: If the strategy is not a valid column.
    """  # noqa: DOC502 - the checks raise
    c = checked_column("strategy", strategy)
    size = column_normalized_steps
    if size is not None:
        c = c / np.linalg.norm(c)
        scales = column_norms(c, size)
    weights = _ring_weights(c)
    num_kept = len(c) - 1

    def row(t: int) -> tuple[Weights, Weights]:
        scale = 1.0 if size is None else float(scales[t])
        return (scale / float(c[0]),), scale * weights[t % num_kept] if num_kept else ()

    def kept(t: int) -> tuple[Weights, Weights]:
        is_oldest = np.arange(num_kept) == t % max(num_kept, 1)  # the oldest row is replaced
        return 1.0 - is_oldest, is_oldest / (1.0 if size is None else float(scales[t]))

    description = {"strategy": [float(value) for value in c], "bands": len(c), "column_normalized": size is not None}
    name = f"banded-toeplitz-{_digest(c)}-{size}"
    return Recurrence(name, row, kept, size, correlation=Correlation(len(c)), description=description)


def _ring_weights(c: np.ndarray) -> list[np.ndarray]:
    """Returns the weights of the kept rows in a ring buffer, for each position that the next row may be written to."""
    # Row s is stored at position s mod K, so x_{t-j} is at (t - j) mod K, and x_t replaces x_{t-K}.
    num_kept = len(c) - 1
    weights = [np.zeros(num_kept) for _ in range(num_kept)]
    for position in range(num_kept):
        for j in range(1, num_kept + 1):
            weights[position][(position - j) % num_kept] = -c[j] / c[0]
    return weights


def banded_inverse(coefficients: Coefficients) -> Recurrence:
    """Returns banded inverse noise, ``x_t = sum_{j<b} d_j z_{t-j}``. Keeps no rows, because fresh rows are regenerated.

    Source: Kalinin and Lampert 2025 (arXiv:2505.12128); with ``(1, -lambda)`` it is DP-lambda-CGD (arXiv:2601.22334).

    Args:
        coefficients: First column d of ``S^-1``, ``(b,)``, finite, with a positive first element.

    Returns:
        The recurrence.

    Raises:
        ValueError: If the coefficients are not a valid column.
    """  # noqa: DOC502 - the checks raise
    d = checked_column("coefficients", coefficients)

    description = {"inverse_coefficients": [float(value) for value in d]}
    return Recurrence(f"banded-inverse-{_digest(d)}", lambda t: (d, ()), description=description)


def blt(decays: Coefficients, scales: Coefficients) -> Recurrence:
    """Returns buffered linear Toeplitz noise: ``x_t = z_t - sum_i omega_i B_i``, then ``B_i <- theta_i B_i + x_t``.

    Source: Dvijotham et al. 2024 (arXiv:2404.16706), McMahan et al. 2024 (arXiv:2408.08868).

    Args:
        decays: Decays theta of S ``(K,)``, in [0, 1]. Empty for independent noise.
        scales: Scales omega of S ``(K,)``.

    Returns:
        The recurrence.

    Raises:
        ValueError: If the shapes differ, or a decay is out of range.
    """
    theta, omega = (np.asarray(values, dtype=np.float64).reshape(-1) for values in (decays, scales))
    if theta.shape != omega.shape or not ((theta >= 0) & (theta <= 1)).all() or not np.isfinite(omega).all():
        raise ValueError(
            f"noise.blt: decays must be in [0, 1], with one finite scale each; got {decays!r}, {scales!r}."
        )

    ones = np.ones(len(theta))
    description = {"decays": theta.tolist(), "scales": omega.tolist()}
    name = f"blt-{_digest(np.concatenate([theta, omega]))}"
    return Recurrence(name, lambda t: ((1.0,), -omega), lambda t: (theta, ones), description=description)


def dense(strategy: np.ndarray) -> Recurrence:
    """Returns the noise of any lower-triangular strategy, for short runs. Keeps no rows; fresh rows are regenerated.

    Args:
        strategy: The strategy S ``(n, n)``.

    Returns:
        The recurrence, with n steps.

    Raises:
        ValueError: If S is not square and lower-triangular with a positive diagonal.
    """
    matrix = np.asarray(strategy, dtype=np.float64)
    square = matrix.ndim == 2 and matrix.shape[0] == matrix.shape[1]
    if not square or not np.isfinite(matrix).all() or np.triu(matrix, 1).any() or (np.diag(matrix) <= 0).any():
        raise ValueError(
            f"noise.dense: a strategy must be a square, lower-triangular matrix of finite numbers with a positive "
            f"diagonal; got shape {matrix.shape}."
        )
    from scipy.linalg import solve_triangular

    rows = solve_triangular(matrix, np.eye(len(matrix)), lower=True)

    def row(t: int) -> tuple[Weights, Weights]:
        return rows[t, t::-1], ()

    size = len(matrix)
    return Recurrence(f"dense-{_digest(matrix.reshape(-1))}", row, size=size, description={"steps": size})


def for_run(recurrence: Recurrence, column: np.ndarray, size: int, bands: int | None, **description: Any) -> Recurrence:
    """Returns the noise of a run of ``size`` steps, with its privacy analysis.

    ``column`` is the first column of the Toeplitz strategy. Its norm must be 1 if the strategy has ``bands``.
    """
    squares = functools.partial(cycle_sq_sensitivities, column.tobytes(), size)
    return dataclasses.replace(
        recurrence,
        size=size,
        column_norm=1.0 if bands else float(np.linalg.norm(column)),  # columns of banded strategies have norm 1
        correlation=Correlation(bands, squares),
        description={**recurrence.description, **description},
    )


def blt_for_run(decays: tuple[float, ...], scales: tuple[float, ...], size: int) -> Recurrence:
    """Returns the noise of `blt` for a run of ``size`` steps."""
    return for_run(blt(decays, scales), blt_column(decays, scales, size), size, None, noise="blt")


def banded_inverse_for_run(coefficients: Coefficients, size: int) -> Recurrence:
    """Returns the noise of `banded_inverse` for a run of ``size`` steps, with the first coefficient scaled to 1."""
    scaled = np.asarray(coefficients, dtype=np.float64) / coefficients[0]
    return for_run(banded_inverse(scaled), toeplitz_inverse(scaled, size), size, None, noise="banded-inverse")


def checked_column(name: str, column: Coefficients) -> np.ndarray:
    """Returns the column as float64. Raises ValueError if it is not 1-D and finite with a positive first number."""
    c = np.asarray(column, dtype=np.float64)
    if c.ndim != 1 or not len(c) or not np.isfinite(c).all() or not c[0] > 0:
        raise ValueError(f"noise: {name} must be a list of finite numbers whose first one is positive; got {column!r}.")
    return c


def lambda_cgd(lam: float) -> Recurrence:
    """Returns the noise of DP-lambda-CGD, ``x_t = z_t - lam * z_{t-1}``: a fraction of the previous row is subtracted.

    Args:
        lam: The fraction, in [0, 1).

    Returns:
        The recurrence, which keeps no rows.

    Raises:
        ValueError: If ``lam`` is not in [0, 1).
    """
    if not 0 <= lam < 1:
        raise ValueError(f"noise.lambda_cgd: lambda must be in [0, 1), got {lam!r}.")
    return banded_inverse((1.0, -lam))


def _digest(numbers: np.ndarray) -> str:
    """Returns a short digest of the numbers, for names."""
    return hashlib.blake2b(np.ascontiguousarray(numbers, dtype="<f8").tobytes(), digest_size=8).hexdigest()
