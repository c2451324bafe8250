"""Recurrences: the matrices of correlated noise.

Axes: K rows of state, D elements of the noised slice.
"""

from __future__ import annotations

import hashlib

import numpy as np
import torch
from torch import Tensor

from .correlated import Fresh, Recurrence
from .toeplitz import Coefficients, column_norms


def banded_toeplitz(strategy: Coefficients, *, column_normalized_steps: int | None = None) -> Recurrence:
    """``x_t = (z_t - sum_{0<j<b} c_j x_{t-j}) / c_0``, with a state of the last b - 1 rows. BandMF.

    Source: Choquette-Choo et al. 2023 (arXiv:2306.08153).

    Args:
        strategy: First column c of S, ``(b,)``, finite, with a positive first element.
        column_normalized_steps: If given, divides each column of S by its norm, for a run of this many steps, after
            dividing c by its own norm. The largest column norm is then 1; otherwise it is that of c.

    Returns:
        The recurrence.

    Raises:
        ValueError: If the strategy is not such a column.
    """  # noqa: DOC502 - the checks raise on our behalf
    c = checked_column("strategy", strategy)
    size = column_normalized_steps
    if size is not None:
        c = c / np.linalg.norm(c)
        scales = column_norms(c, size)
    kept = len(c) - 1
    ring = _ring_weights(c)

    def row(t: int, fresh: Fresh, state_KD: Tensor, out: Tensor) -> None:
        fresh(out, 1 / float(c[0]), t)
        if kept:
            weights_K = torch.as_tensor(ring[t % kept], dtype=out.dtype, device=out.device)
            out.addmv_(state_KD.t(), weights_K)
            state_KD[t % kept] = out
        if size is not None:
            out.mul_(float(scales[t]))

    description = {"strategy": [float(value) for value in c], "bands": len(c), "column_normalized": size is not None}
    return Recurrence(f"banded-toeplitz-{_digest(c)}-{size}", row, kept=kept, size=size, description=description)


def _ring_weights(c: np.ndarray) -> list[np.ndarray]:
    """Returns the weights of the stored rows for each place of the ring buffer that is written next."""
    # Row s is stored at place s mod K, so x_{t-j} is at (t - j) mod K, and x_t replaces x_{t-K}.
    kept = len(c) - 1
    rings = []
    for place in range(kept):
        weights = np.zeros(kept)
        for j in range(1, kept + 1):
            weights[(place - j) % kept] = -c[j] / c[0]
        rings.append(weights)
    return rings


def banded_inverse(coefficients: Coefficients) -> Recurrence:
    """``x_t = sum_{j<b} d_j z_{t-j}``, without state: the fresh rows are regenerated.

    Source: Kalinin and Lampert 2025 (arXiv:2505.12128); with ``(1, -lambda)`` it is DP-lambda-CGD (arXiv:2601.22334).

    Args:
        coefficients: First column d of ``S^-1``, ``(b,)``, finite, with a positive first element.

    Returns:
        The recurrence.

    Raises:
        ValueError: If the coefficients are not such a column.
    """  # noqa: DOC502 - the checks raise on our behalf
    d = checked_column("coefficients", coefficients)

    def row(t: int, fresh: Fresh, state_KD: Tensor, out: Tensor) -> None:
        for j, weight in enumerate(d[: t + 1]):
            fresh(out, float(weight), t - j)

    description = {"inverse_coefficients": [float(value) for value in d]}
    return Recurrence(f"banded-inverse-{_digest(d)}", row, description=description)


def blt(decays: Coefficients, scales: Coefficients) -> Recurrence:
    """Buffered linear Toeplitz: ``x_t = z_t - sum_i omega_i B_i``, then ``B_i <- theta_i B_i + x_t``.

    Source: Dvijotham et al. 2024 (arXiv:2404.16706), McMahan et al. 2024 (arXiv:2408.08868).

    Args:
        decays: theta of S, ``(K,)`` in [0, 1]. Empty for independent noise.
        scales: omega of S, ``(K,)``.

    Returns:
        The recurrence.

    Raises:
        ValueError: If their shapes differ, or a decay is outside its range.
    """
    theta, omega = (np.asarray(values, dtype=np.float64).reshape(-1) for values in (decays, scales))
    if theta.shape != omega.shape or not ((theta >= 0) & (theta <= 1)).all() or not np.isfinite(omega).all():
        raise ValueError(
            f"noise.blt: decays must be in [0, 1], with as many finite scales; got {decays!r}, {scales!r}."
        )

    def row(t: int, fresh: Fresh, state_KD: Tensor, out: Tensor) -> None:
        fresh(out, 1.0, t)
        if len(theta):
            out.addmv_(state_KD.t(), torch.as_tensor(-omega, dtype=out.dtype, device=out.device))
            state_KD.mul_(torch.as_tensor(theta, dtype=out.dtype, device=out.device).unsqueeze(1)).add_(out)

    description = {"decays": theta.tolist(), "scales": omega.tolist()}
    return Recurrence(f"blt-{_digest(np.concatenate([theta, omega]))}", row, kept=len(theta), description=description)


def dense(strategy: np.ndarray) -> Recurrence:
    """Any lower-triangular strategy, without state: all fresh rows of a row are regenerated. For short runs.

    Args:
        strategy: S, ``(n, n)``.

    Returns:
        The recurrence, with n steps.

    Raises:
        ValueError: If S is not square, lower-triangular and regular.
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

    def row(t: int, fresh: Fresh, state_KD: Tensor, out: Tensor) -> None:
        for j in np.flatnonzero(rows[t, : t + 1]):
            fresh(out, float(rows[t, j]), int(j))

    size = len(matrix)
    return Recurrence(f"dense-{_digest(matrix.reshape(-1))}", row, size=size, description={"steps": size})


def checked_column(name: str, column: Coefficients) -> np.ndarray:
    """Returns the column as float64; raises ValueError unless it is 1-D, finite and begins with a positive number."""
    c = np.asarray(column, dtype=np.float64)
    if c.ndim != 1 or not len(c) or not np.isfinite(c).all() or not c[0] > 0:
        raise ValueError(
            f"noise: {name} must be a list of finite numbers that begins with a positive one; got {column!r}."
        )
    return c


def lambda_cgd(lam: float) -> Recurrence:
    """Each step subtracts a fraction of the previous step's noise: ``x_t = z_t - lam * z_{t-1}``.

    Args:
        lam: The fraction, in [0, 1).

    Returns:
        The recurrence, which has no state.

    Raises:
        ValueError: If ``lam`` is not in [0, 1).
    """
    if not 0 <= lam < 1:
        raise ValueError(f"noise.lambda_cgd: lambda must be in [0, 1), got {lam!r}.")
    return banded_inverse((1.0, -lam))


def _digest(numbers: np.ndarray) -> str:
    """Returns a short digest of the numbers, as a name."""
    return hashlib.blake2b(np.ascontiguousarray(numbers, dtype="<f8").tobytes(), digest_size=8).hexdigest()
