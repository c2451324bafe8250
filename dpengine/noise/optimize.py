"""Optimizes strategies for minimal error relative to their sensitivity, with explicit gradients.

Let ``a`` and ``c`` be the first columns of the workload A and the strategy S, and ``beta`` that of ``A S^-1``. The loss
is ``E v``, where ``E = sum_t w_t beta_t^2`` is the error and ``v`` is the squared sensitivity. The convolution of ``c``
and ``beta`` is ``a``, so ``dE/dc_k = -sum_{t>=k} lambda_t beta_{t-k}``. The adjoint ``lambda`` results from the same
recursive filter, applied backwards to ``2 w beta``.

Source: Choquette-Choo et al. 2023 (arXiv:2306.08153) for banded strategies, Kalinin and Lampert 2025 (arXiv:2505.12128)
for banded inverses.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from .sensitivity import max_participations, sum_of_columns
from .toeplitz import (
    Coefficients,
    error_weights,
    prefix_sums,
    product,
    root,
    root_of_prefix_sums,
    solve,
    toeplitz_inverse,
)

Loss = Callable[[np.ndarray], tuple[float, np.ndarray]]
_MAX_STEPS = 500


def optimize_banded(
    size: int,
    bands: int,
    *,
    workload: np.ndarray | None = None,
    loss: str = "mean",
    separation: int | None = None,
    steps: int = _MAX_STEPS,
) -> np.ndarray:
    """Returns the banded Toeplitz strategy with minimal error.

    Args:
        size: Number of steps of the run, at least 1.
        bands: Number of coefficients of the strategy, at most ``size``.
        workload: First column of the workload, ``(size,)``; None for prefix sums.
        loss: ``"mean"`` or ``"max"`` over the steps.
        separation: Number of steps between two participations of an example; None if no example participates twice
            within the bands.
        steps: Maximum number of iterations of the optimizer.

    Returns:
        The first column ``(bands,)``, with norm 1 and a positive first element.

    Raises:
        ValueError: If a number is out of range.
    """  # noqa: DOC502 - the checks raise
    _check_size(size, bands)
    a = prefix_sums(size) if workload is None else _checked_workload(workload, size)
    weights = error_weights(size, loss)
    start = (root_of_prefix_sums(bands) if workload is None else root(np.abs(a[:bands]) + 0.0))[:bands]
    sensitivity = (
        _column_norm if separation is None or bands <= separation else _overlapping_sensitivity(size, bands, separation)
    )
    return _normalized(_minimize(lambda c: _banded_loss(c, a, weights, sensitivity), start, steps))


def optimize_scheduled(
    size: int, bands: int, *, rates: np.ndarray, momentum: float = 0.0, steps: int = 500
) -> np.ndarray:
    """Returns the banded Toeplitz strategy with minimal error for momentum and changing learning rates.

    The update of the model until step t is ``sum_{s <= t} rate_s m_s``, where ``m_s = momentum m_{s-1} + g_s`` and
    ``g_s`` is the noisy sum of step s. This workload is not Toeplitz, so the optimization takes ``O(size^2)`` time and
    memory.
    """
    _check_size(size, bands)
    rates = _checked_workload(rates, size)
    if not 0 <= momentum < 1:
        raise ValueError(f"noise.optimize: momentum must be in [0, 1), got {momentum!r}.")
    decay = momentum ** np.arange(size)
    start = root_of_prefix_sums(bands)
    return _normalized(_minimize(lambda c: _scheduled_loss(c, rates, decay), start, steps))


def scheduled_loss(column: Coefficients, *, rates: np.ndarray, momentum: float = 0.0) -> float:
    """Returns the loss of `optimize_scheduled`: mean squared error over the steps times the squared column norm."""
    decay = momentum ** np.arange(len(rates))
    return _scheduled_loss(np.asarray(column, dtype=np.float64), np.asarray(rates, dtype=np.float64), decay)[0]


def optimize_banded_inverse(
    size: int,
    bands: int,
    *,
    workload: np.ndarray | None = None,
    loss: str = "mean",
    separation: int | None = None,
    participations: int | None = None,
    steps: int = _MAX_STEPS,
) -> np.ndarray:
    """Returns the coefficients of the banded inverse of the strategy with minimal error.

    Args:
        size: Number of steps of the run.
        bands: Number of coefficients of the inverse of the strategy.
        workload: First column of the workload; None for prefix sums.
        loss: ``"mean"`` or ``"max"`` over the steps.
        separation: Number of steps between two participations of an example; None for a single participation.
        participations: Maximum number of participations; None for the number that the separation allows.
        steps: Maximum number of iterations of the optimizer.

    Returns:
        The coefficients ``(bands,)``, whose first element is 1.

    Raises:
        ValueError: If a number is out of range.
    """  # noqa: DOC502 - the checks raise
    _check_size(size, bands)
    a = prefix_sums(size) if workload is None else _checked_workload(workload, size)
    weights, separation_or_size = error_weights(size, loss), separation or size
    count = max_participations(size, separation_or_size, participations if separation is not None else 1)
    start = banded_inverse_square_root(size, bands, a)

    def loss_and_gradient(d: np.ndarray) -> tuple[float, np.ndarray]:
        beta, c = product(a, d, size), toeplitz_inverse(d, size)
        error, by_beta = float(weights @ np.square(beta)), 2 * weights * beta
        by_error = np.array([by_beta[k:] @ a[: size - k] for k in range(bands)])
        total = sum_of_columns(c, size, separation_or_size, count)
        sq_norm = float(total @ total)
        by_c = np.zeros(size)
        for start in range(0, count * separation_or_size, separation_or_size):
            by_c[: size - start] += 2 * total[start:]
        adjoint = solve(d, by_c[::-1])[::-1]
        by_norm = -np.array([adjoint[k:] @ c[: size - k] for k in range(bands)])
        return error * sq_norm, sq_norm * by_error + error * by_norm

    coefficients = _minimize(loss_and_gradient, start, steps)
    return coefficients / coefficients[0]


def banded_inverse_square_root(size: int, bands: int, workload: np.ndarray | None = None) -> np.ndarray:
    """Returns the first coefficients of the inverse of the workload's square root (BISR), ``(bands,)``.

    Source: Kalinin and Lampert 2025 (arXiv:2505.12128).
    """
    _check_size(size, bands)
    column = root_of_prefix_sums(bands) if workload is None else root(_checked_workload(workload, size)[:bands])
    return toeplitz_inverse(column, bands)


def _check_size(size: int, bands: int) -> None:
    if not 1 <= bands <= size:
        raise ValueError(f"noise.optimize: got {bands} bands for {size} steps. Pass 1 to {size} bands.")


def _checked_workload(workload: np.ndarray, size: int) -> np.ndarray:
    a = np.asarray(workload, dtype=np.float64)
    if a.shape != (size,) or not np.isfinite(a).all() or a[0] <= 0:
        raise ValueError(
            f"noise.optimize: a workload must have shape ({size},), finite entries and a positive first entry; got "
            f"shape {a.shape}."
        )
    return a


def _column_norm(c: np.ndarray) -> tuple[float, np.ndarray]:
    return float(c @ c), 2 * c


def _overlapping_sensitivity(size: int, bands: int, separation: int) -> Loss:
    """Returns the function that computes the squared sensitivity with overlapping columns, and its gradient."""
    count = max_participations(size, separation)

    def sensitivity(c: np.ndarray) -> tuple[float, np.ndarray]:
        total = sum_of_columns(c, size, separation, count)
        by_c = np.zeros(bands)
        for i in range(count):
            part = total[i * separation :][:bands]
            by_c[: len(part)] += 2 * part
        return float(total @ total), by_c

    return sensitivity


def _banded_loss(c: np.ndarray, a: np.ndarray, weights: np.ndarray, sensitivity: Loss) -> tuple[float, np.ndarray]:
    beta = solve(c, a)
    error = float(weights @ np.square(beta))
    adjoint = solve(c, (2 * weights * beta)[::-1])[::-1]
    by_error = -_cross_correlation(adjoint, beta, len(c))
    sq_norm, by_norm = sensitivity(c)
    return error * sq_norm, sq_norm * by_error + error * by_norm


def _scheduled_loss(c: np.ndarray, rates: np.ndarray, decay: np.ndarray) -> tuple[float, np.ndarray]:
    size, bands = len(rates), len(c)
    g = solve(c, decay)
    # B[t, j] = sum_{s=j}^t rate_s g_{s-j}: a cumulative sum along each column.
    steps = np.zeros((size, size))
    for k in range(size):
        steps[np.arange(k, size), np.arange(size - k)] = rates[k:] * g[k]
    errors = np.cumsum(steps, axis=0)
    errors[np.triu_indices(size, 1)] = 0
    error = float(np.square(errors).sum()) / size
    by_step = np.cumsum(2 / size * errors[::-1], axis=0)[::-1]
    by_g = np.array([np.diagonal(by_step, -k) @ rates[k:] for k in range(size)])
    adjoint = solve(c, by_g[::-1])[::-1]
    sq_norm = float(c @ c)
    return error * sq_norm, -sq_norm * _cross_correlation(adjoint, g, bands) + 2 * error * c


def _cross_correlation(x: np.ndarray, y: np.ndarray, bands: int) -> np.ndarray:
    """Returns ``sum_{t>=k} x_t y_{t-k}`` for each ``k < bands``."""
    return np.array([x[k:] @ y[: len(y) - k] for k in range(bands)])


def _minimize(loss_and_gradient: Loss, start: np.ndarray, steps: int) -> np.ndarray:
    from scipy.optimize import minimize

    def finite(c: np.ndarray) -> tuple[float, np.ndarray]:
        with np.errstate(all="ignore"):
            loss, gradient = loss_and_gradient(c)
        is_finite = np.isfinite(loss) and np.isfinite(gradient).all()
        return (float(loss), gradient) if is_finite else (np.inf, np.zeros_like(c))

    if len(start) == 1 or steps <= 0:
        return start
    settings = {"maxiter": steps, "ftol": 1e-15, "gtol": 1e-10}
    best: np.ndarray = minimize(finite, start, jac=True, method="L-BFGS-B", options=settings).x
    return best if finite(best)[0] <= finite(start)[0] else start


def _normalized(c: np.ndarray) -> np.ndarray:
    return c / np.linalg.norm(c) * (1 if c[0] > 0 else -1)
