"""Lower-triangular Toeplitz matrices, as their first columns: the basis of correlated noise.

A strategy ``S`` with first column ``c`` determines the correlation of noise: a run adds ``S^-1 Z``, with independent
rows in ``Z``. A workload ``A`` with first column ``a`` determines the target quantities: all ones for prefix sums,
which are those of SGD with a constant learning rate. Their error is ``A S^-1 Z``. All numbers are float64.

Source: Choquette-Choo et al. 2023 (arXiv:2306.08153); Fichtenberger, Henzinger, Upadhyay 2023 for the square root.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

Coefficients = Sequence[float] | np.ndarray


def prefix_sums(size: int) -> np.ndarray:
    """Workload of SGD with a constant learning rate: prefix sums, ``(size,)``."""
    return np.ones(size)


def momentum(size: int, mu: float) -> np.ndarray:
    """Workload of heavy-ball momentum ``mu`` in [0, 1) with a constant learning rate."""
    if not 0 <= mu < 1:
        raise ValueError(f"noise.toeplitz.momentum: mu must be in [0, 1), got {mu!r}.")
    return (1 - mu ** np.arange(1, size + 1)) / (1 - mu)


def root_of_prefix_sums(size: int) -> np.ndarray:
    """First column ``(size,)`` of the square root of prefix sums, a good strategy for them."""
    k = np.arange(1, size)
    return np.cumprod(np.concatenate([[1.0], (2 * k - 1) / (2 * k)]))


def root(column: Coefficients) -> np.ndarray:
    """First column of the square root of a Toeplitz matrix with a positive first entry."""
    a = np.asarray(column, dtype=np.float64)
    r = np.zeros(len(a))
    r[0] = math.sqrt(a[0])
    for j in range(1, len(a)):
        r[j] = (a[j] - r[1:j] @ r[j - 1 : 0 : -1]) / (2 * r[0])
    return r


def toeplitz_inverse(column: Coefficients, size: int) -> np.ndarray:
    """First column ``(size,)`` of the inverse of the matrix of this size."""
    return solve(column, np.concatenate([[1.0], np.zeros(size - 1)]))


def solve(column: Coefficients, values: np.ndarray) -> np.ndarray:
    """Computes ``S^-1 values`` for ``(size,)`` or ``(size, d)`` by a recursive filter along axis 0."""
    from scipy.signal import lfilter

    filtered: np.ndarray = lfilter([1.0], np.asarray(column, dtype=np.float64), values, axis=0)
    return filtered


def product(one: Coefficients, other: Coefficients, size: int) -> np.ndarray:
    """First column ``(size,)`` of the product of two Toeplitz matrices."""
    from scipy.signal import fftconvolve

    short = min(len(one), len(other))
    left, right = (np.asarray(c, dtype=np.float64)[:size] for c in (one, other))
    found = np.zeros(size)
    full = np.convolve(left, right) if short <= 64 else fftconvolve(left, right)
    found[: min(size, len(full))] = full[:size]
    return found


def matrix(column: Coefficients, size: int) -> np.ndarray:
    """Full matrix ``(size, size)``, for checks and small runs."""
    found = np.zeros((size, size))
    for k, value in enumerate(column[:size]):
        found[np.arange(k, size), np.arange(size - k)] = value
    return found


def column_norms(column: Coefficients, size: int) -> np.ndarray:
    """Norms ``(size,)`` of the columns of the matrix of this size. The last columns are truncated."""
    squares = np.cumsum(np.square(np.asarray(column, dtype=np.float64)[:size]))
    kept = np.minimum(np.arange(size, 0, -1), len(squares))
    return np.sqrt(squares[kept - 1])


def error_weights(size: int, loss: str) -> np.ndarray:
    """Weights ``w`` of the error ``sum_t w_t beta_t^2`` of a run, with beta the first column of ``A S^-1``."""
    if loss not in ("mean", "max"):
        raise ValueError(f"noise.toeplitz: loss {loss!r} is unknown. Choose one of: 'mean', 'max'.")
    return np.ones(size) if loss == "max" else np.arange(size, 0, -1) / size


def banded_loss(column: Coefficients, workload: np.ndarray, loss: str = "mean") -> float:
    """Squared error times squared sensitivity, if no example participates twice within the bands.

    The loss is invariant to scaling of the strategy.
    """
    beta = solve(column, workload)
    sq_norm = float(np.sum(np.square(np.asarray(column, dtype=np.float64)[: len(workload)])))
    return float(error_weights(len(workload), loss) @ np.square(beta)) * sq_norm
