"""Buffered linear Toeplitz strategies (BLT), in which a few decaying sums represent all earlier steps.

The first column of the strategy is ``t_0 = 1`` and ``t_k = sum_i omega_i theta_i^(k-1)``. The first column of its
inverse has the same form, with ``theta_hat`` and ``omega_hat``. The decays ``theta`` and ``theta_hat`` determine the
strategy, and they interlace.

Source: Dvijotham et al. 2024 (arXiv:2404.16706), McMahan et al. 2024 (arXiv:2408.08868).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from .toeplitz import error_weights

MAX_BUFFERS = 15
_MIN_GAIN = 0.01  # minimum relative decrease of the loss for one more buffer


@dataclass(frozen=True)
class BLTStrategy:
    """Buffered linear Toeplitz strategy, by its decays and scales in decreasing order of the decays.

    Attributes:
        decays: theta, ``(m,)`` in (0, 1).
        scales: omega, ``(m,)``, positive.
        inverse_decays: theta_hat, ``(m,)``. Each is below the corresponding element of ``decays``.
    """

    decays: tuple[float, ...]
    scales: tuple[float, ...]
    inverse_decays: tuple[float, ...]

    def column(self, size: int) -> np.ndarray:
        """Returns the first column of the strategy ``(size,)``."""
        return blt_column(self.decays, self.scales, size)

    def inverse_column(self, size: int) -> np.ndarray:
        """Returns the first column of the inverse ``(size,)``."""
        theta, hat = _float64(self.decays), _float64(self.inverse_decays)
        return _column(hat, _residues(hat, theta), size).numpy()


def blt_column(decays: tuple[float, ...], scales: tuple[float, ...], size: int) -> np.ndarray:
    """Returns the first column ``(size,)`` of the strategy with these buffers."""
    return _column(_float64(decays), _float64(scales), size).numpy()


def blt_from_decays(decays: tuple[float, ...], inverse_decays: tuple[float, ...]) -> BLTStrategy:
    """Returns the strategy with these decays."""
    order = [1.0, *(value for pair in zip(decays, inverse_decays, strict=True) for value in pair), 0.0]
    if any(a <= b for a, b in itertools.pairwise(order)):
        raise ValueError(
            f"noise.blt: decays must be 1 > theta_1 > inverse_1 > theta_2 > ... > 0, got {decays} and {inverse_decays}."
        )
    theta, hat = _float64(decays), _float64(inverse_decays)
    return BLTStrategy(tuple(decays), tuple(_residues(theta, hat).tolist()), tuple(inverse_decays))


def optimize_blt(size: int, *, buffers: int | None = None, loss: str = "max") -> BLTStrategy:
    """Returns the strategy with minimal error if each example participates once in a run.

    Args:
        size: Number of steps of the run.
        buffers: Number of buffers, at most 15. With None, buffers are added as long as each decreases the squared error
            by at least 1 %.
        loss: ``"mean"`` or ``"max"`` over the steps.

    Returns:
        The strategy.

    Raises:
        ValueError: If a number is out of range.
    """
    if size < 1 or (buffers is not None and not 0 <= buffers <= MAX_BUFFERS):
        raise ValueError(
            f"noise.optimize_blt: got {size} steps and {buffers} buffers. Pass at least 1 step and 0 to {MAX_BUFFERS} "
            "buffers."
        )
    weights = torch.from_numpy(np.ascontiguousarray(error_weights(size, loss)))
    best, best_loss = BLTStrategy((), (), ()), float(weights.cumsum(0)[-1])
    for count in range(1, MAX_BUFFERS + 1) if buffers is None else [buffers] if buffers else []:
        strategy, loss_of_strategy = _optimize(count, size, weights)
        if buffers is None and loss_of_strategy > best_loss * (1 - _MIN_GAIN):
            break
        best, best_loss = strategy, loss_of_strategy
    return best


def _optimize(count: int, size: int, weights: Tensor) -> tuple[BLTStrategy, float]:
    """Returns the strategy with ``count`` buffers and minimal loss, and its loss."""
    from scipy.optimize import minimize

    # At the start, 1 - decay is a geometric progression from 1 / size, as for poles that approximate a square root.
    values = 1 - (1 / max(size, 2)) ** (1 - (np.arange(2 * count) + 0.5) / (2 * count))
    shares = values / np.concatenate([[1.0], values[:-1]])
    start = np.log(shares / (1 - shares))
    loss_and_gradient = _with_gradient(lambda free: _log_loss(free, size, weights))
    result = minimize(loss_and_gradient, start, jac=True, method="L-BFGS-B", options={"maxiter": 500, "ftol": 1e-13})
    decays = np.cumprod(1 / (1 + np.exp(-result.x)))
    return blt_from_decays(tuple(decays[::2].tolist()), tuple(decays[1::2].tolist())), math.exp(float(result.fun))


def _with_gradient(loss: Callable[[Tensor], Tensor]) -> Callable[[np.ndarray], tuple[float, np.ndarray]]:
    def value(point: np.ndarray) -> tuple[float, np.ndarray]:
        free = torch.tensor(point, dtype=torch.float64, requires_grad=True)
        with torch.enable_grad():
            result = loss(free)
        (gradient,) = torch.autograd.grad(result, free)
        is_finite = bool(result.isfinite()) and bool(gradient.isfinite().all())
        return (float(result.detach()), gradient.numpy()) if is_finite else (math.inf, np.zeros_like(point))

    return value


def _log_loss(free: Tensor, size: int, weights: Tensor) -> Tensor:
    decays = torch.sigmoid(free).cumprod(0)  # decreasing values in (0, 1), which interlace
    theta, hat = decays[::2], decays[1::2]
    strategy = _column(theta, _residues(theta, hat), size)
    beta = _column(hat, _residues(hat, theta), size).cumsum(0)
    return (weights @ beta.square()).log() + strategy.square().sum().log()


def _residues(theta: Tensor, hat: Tensor) -> Tensor:
    """Returns ``prod_j (theta_i - hat_j) / prod_{j != i} (theta_i - theta_j)``."""
    delta = theta.unsqueeze(1) - theta.unsqueeze(0)
    return (theta.unsqueeze(1) - hat.unsqueeze(0)).prod(dim=1) / (delta + torch.eye(len(theta)).to(delta)).prod(dim=1)


def _float64(values: tuple[float, ...]) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def _column(decays: Tensor, scales: Tensor, size: int) -> Tensor:
    powers = torch.arange(size - 1, dtype=torch.float64).unsqueeze(1)
    sums = (decays.log() * powers).exp() @ scales if len(decays) else powers.new_zeros(size - 1)
    return torch.cat([torch.ones(1, dtype=torch.float64), sums])
