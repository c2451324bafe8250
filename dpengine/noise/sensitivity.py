"""Sensitivity of a strategy matrix to one example that participates several times.

An example participates in at most ``participations`` steps, which are at least ``separation`` apart. The squared
sensitivity for contributions of norm 1 is the maximum of ``sum_{i,j in I} |X_ij|`` over all such sets of steps ``I``,
where ``X = S^T S``.

Source: Choquette-Choo et al. 2023 (arXiv:2306.08153); Kalinin and Lampert 2024 (arXiv:2405.13763) for Toeplitz
strategies.
"""

from __future__ import annotations

import functools

import numpy as np

from .toeplitz import Coefficients


def max_participations(size: int, separation: int, participations: int | None = None) -> int:
    """Returns the maximum number of participations of an example."""
    if size < 0 or separation < 1 or (participations is not None and participations < 1):
        raise ValueError(
            f"noise.sensitivity: got {size} steps, separation {separation}, participations {participations}; "
            "separation and participations must be at least 1."
        )
    max_count = -(-size // separation)
    return max_count if participations is None else min(participations, max_count)


def toeplitz_sq_sensitivity(
    column: Coefficients, size: int, separation: int, participations: int | None = None
) -> float:
    """Returns the squared sensitivity of a Toeplitz strategy for contributions of norm 1.

    It is exact if the coefficients are nonnegative and nonincreasing; otherwise it is an upper bound.

    Args:
        column: First column of the strategy.
        size: Number of steps.
        separation: Number of steps between two participations.
        participations: Maximum number of participations; None for the number that the separation allows.

    Returns:
        The squared sensitivity.
    """
    bound = nonincreasing_bound(column)[:size]
    count = max_participations(size, separation, participations)
    if len(bound) <= separation:
        # Columns do not overlap. The first columns have the largest norms, and only the last may be truncated.
        squares = np.cumsum(np.square(bound))
        starts = np.arange(count) * separation
        return float(squares[np.minimum(len(squares), size - starts) - 1].sum())
    return float(np.sum(np.square(sum_of_columns(bound, size, separation, count))))


def nonincreasing_bound(column: Coefficients) -> np.ndarray:
    """Returns the smallest nonincreasing sequence that bounds the absolute values of the coefficients."""
    c = np.abs(np.asarray(column, dtype=np.float64))
    return np.maximum.accumulate(c[::-1])[::-1]


def sum_of_columns(column: np.ndarray, size: int, separation: int, count: int) -> np.ndarray:
    """Returns the sum ``(size,)`` of the first ``count`` columns at 0, separation, 2 separation, ..."""
    total = np.zeros(size)
    for i in range(count):
        start = i * separation
        total[start:] += np.concatenate([column, np.zeros(max(0, size - len(column)))])[: size - start]
    return total


def largest_sum(values: np.ndarray, separation: int, count: int) -> float:
    """Returns the largest sum of at most ``count`` values that are at least ``separation`` apart."""
    size = len(values)
    best = np.zeros(size + separation)
    for _ in range(count):
        best[:size] = values + best[separation : size + separation]
        best[:size] = np.maximum(0, np.maximum.accumulate(best[:size][::-1])[::-1])
        best[size:] = 0
    return float(best[0]) if size else 0.0


def sq_sensitivity(strategy: np.ndarray, separation: int, participations: int | None = None) -> float:
    """Returns a bound on the squared sensitivity of a strategy matrix.

    The bound is exact if columns at a distance of ``separation`` or more are orthogonal.

    Args:
        strategy: The strategy ``(size, size)``.
        separation: Minimum number of steps between two participations of an example.
        participations: Maximum number of participations; None for the number that the separation allows.

    Returns:
        The bound.
    """
    gram = np.abs(strategy.T @ strategy)
    size = len(gram)
    count = max_participations(size, separation, participations)
    i, j = np.indices(gram.shape)
    if not np.any(gram[np.abs(i - j) >= separation]):
        return largest_sum(np.diag(gram).copy(), separation, count)
    return largest_sum(np.array([largest_sum(row, separation, count) for row in gram]), separation, count)


def epochs_sq_sensitivity(strategy: np.ndarray, epochs: int) -> float:
    """Returns the squared sensitivity of a strategy matrix for participation in the same step of every epoch.

    Args:
        strategy: The strategy ``(size, size)``.
        epochs: Number of epochs, which divides ``size``.

    Returns:
        The squared sensitivity.

    Raises:
        ValueError: If ``epochs`` does not divide the number of steps.
    """
    size = len(strategy)
    if epochs < 1 or size % epochs:
        raise ValueError(f"noise.sensitivity: {epochs} epochs do not divide {size} steps.")
    gram, period = np.abs(strategy.T @ strategy), size // epochs
    return max(float(gram[offset::period, offset::period].sum()) for offset in range(period))


@functools.lru_cache(maxsize=16)  # each report needs it, and long runs have many cycles
def cycle_sq_sensitivities(column: bytes, size: int, cycle_length: int) -> tuple[float, ...]:
    """Returns the squared sensitivity of a Toeplitz strategy after each cycle, divided by that after the first cycle.

    Args:
        column: First column of the strategy, as bytes of float64.
        size: Number of steps.
        cycle_length: Number of steps between two participations of an example.

    Returns:
        One number for each cycle that begins within the run.
    """
    values = np.frombuffer(column)
    ends = [min(cycle * cycle_length, size) for cycle in range(1, -(-size // cycle_length) + 1)]
    norm = float(np.sum(np.square(values)))
    return tuple(toeplitz_sq_sensitivity(values, end, cycle_length) / norm for end in ends)


def cycle_sq_sensitivities_of(strategy: np.ndarray, cycle_length: int) -> tuple[float, ...]:
    """Returns the result of `cycle_sq_sensitivities` for a lower-triangular strategy ``(size, size)``."""
    size = len(strategy)
    cycles = -(-size // cycle_length)
    padded = np.zeros((cycles * cycle_length, cycles * cycle_length))
    padded[:size, :size] = strategy
    gram, sq_sensitivities = np.zeros((cycle_length, cycles, cycles)), []
    for cycle in range(cycles):
        # The rows of this cycle, by the position of the column in its cycle: (cycle_length, rows, cycles).
        rows = padded[cycle * cycle_length :][:cycle_length]
        rows = rows.reshape(cycle_length, cycles, cycle_length).transpose(2, 0, 1)
        gram += rows.transpose(0, 2, 1) @ rows
        sq_sensitivities.append(float(np.abs(gram).sum(axis=(1, 2)).max()))
    largest = float(np.square(strategy).sum(axis=0).max())
    return tuple((np.maximum.accumulate(sq_sensitivities) / largest).tolist())
