"""Lower-triangular Toeplitz matrices for correlated noise, given by their first columns.

A strategy ``S`` with first column ``c`` determines the correlation of the noise: a run adds ``S^-1 Z``, where the rows
of ``Z`` are independent. A workload ``A`` with first column ``a`` determines the linear queries whose error counts. For
example, the workload of SGD with a constant learning rate is prefix sums, for which ``a`` is all ones. The error of the
queries is ``A S^-1 Z``. All numbers are float64.

Source: Choquette-Choo et al. 2023 (arXiv:2306.08153); Fichtenberger, Henzinger, Upadhyay 2023 for the square root.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

Coefficients = Sequence[float] | np.ndarray


def prefix_sums(size: int) -> np.ndarray:
    """Returns the workload of SGD with a constant learning rate, prefix sums ``(size,)``."""
    return np.ones(size)


def momentum(size: int, mu: float) -> np.ndarray:
    """Returns the workload ``(size,)`` of heavy-ball momentum ``mu`` in [0, 1) with a constant learning rate."""
    if not 0 <= mu < 1:
        raise ValueError(f"noise.toeplitz.momentum: mu must be in [0, 1), got {mu!r}.")
    return (1 - mu ** np.arange(1, size + 1)) / (1 - mu)


def root_of_prefix_sums(size: int) -> np.ndarray:
    """Returns the first column ``(size,)`` of the square root of the prefix-sum matrix, a good strategy for it."""
    k = np.arange(1, size)
    return np.cumprod(np.concatenate([[1.0], (2 * k - 1) / (2 * k)]))


def root(column: Coefficients) -> np.ndarray:
    """Returns the first column of the square root of a Toeplitz matrix with a positive first entry."""
    a = np.asarray(column, dtype=np.float64)
    r = np.zeros(len(a))
    r[0] = math.sqrt(a[0])
    for j in range(1, len(a)):
        r[j] = (a[j] - r[1:j] @ r[j - 1 : 0 : -1]) / (2 * r[0])
    return r


def toeplitz_inverse(column: Coefficients, size: int) -> np.ndarray:
    """Returns the first column ``(size,)`` of the inverse of the matrix of this size."""
    return solve(column, np.concatenate([[1.0], np.zeros(size - 1)]))


def solve(column: Coefficients, values: np.ndarray) -> np.ndarray:
    """Computes ``S^-1 values`` for ``(size,)`` or ``(size, d)`` by a recursive filter along axis 0."""
    from scipy.signal import lfilter

    filtered: np.ndarray = lfilter([1.0], np.asarray(column, dtype=np.float64), values, axis=0)
    return filtered


def product(first: Coefficients, second: Coefficients, size: int) -> np.ndarray:
    """Returns the first column ``(size,)`` of the product of two Toeplitz matrices."""
    from scipy.signal import fftconvolve

    shorter = min(len(first), len(second))
    left, right = (np.asarray(c, dtype=np.float64)[:size] for c in (first, second))
    column = np.zeros(size)
    convolution = np.convolve(left, right) if shorter <= 64 else fftconvolve(left, right)
    column[: min(size, len(convolution))] = convolution[:size]
    return column


def matrix(column: Coefficients, size: int) -> np.ndarray:
    """Returns the matrix ``(size, size)``, for checks and short runs."""
    result = np.zeros((size, size))
    for k, value in enumerate(column[:size]):
        result[np.arange(k, size), np.arange(size - k)] = value
    return result


def column_norms(column: Coefficients, size: int) -> np.ndarray:
    """Returns the norms ``(size,)`` of the columns of the matrix of this size, whose last columns are truncated."""
    squares = np.cumsum(np.square(np.asarray(column, dtype=np.float64)[:size]))
    lengths = np.minimum(np.arange(size, 0, -1), len(squares))
    return np.sqrt(squares[lengths - 1])


def error_weights(size: int, loss: str) -> np.ndarray:
    """Returns the weights w of the error ``sum_t w_t beta_t^2``, where beta is the first column of ``A S^-1``."""
    if loss not in ("mean", "max"):
        raise ValueError(f"noise.toeplitz: loss {loss!r} is unknown. Choose one of: 'mean', 'max'.")
    return np.ones(size) if loss == "max" else np.arange(size, 0, -1) / size


def banded_loss(column: Coefficients, workload: np.ndarray, loss: str = "mean") -> float:
    """Returns the squared error times the squared sensitivity, if no example participates twice within the bands.

    Scaling the strategy does not change the loss.
    """
    beta = solve(column, workload)
    sq_norm = float(np.sum(np.square(np.asarray(column, dtype=np.float64)[: len(workload)])))
    return float(error_weights(len(workload), loss) @ np.square(beta)) * sq_norm
