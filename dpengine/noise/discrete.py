"""Discrete Gaussian noise for sums of integers, without rounding errors.

Uses rejection sampling from a discrete Laplace distribution.

Source: Canonne, Kamath, Steinke 2020 (arXiv:2004.00010).
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from dpengine.errors import InvalidBudgetError

from .chacha20 import WORDS_PER_BLOCK
from .source import NoiseSource

_LAPLACE_SCALE = 1.3  # ratio of the Laplace scale to sigma; about 0.6 of the proposals are accepted
_MAX_SIGMA = 2.0**48  # integers of this size are exact in float64
_MAX_PROPOSALS = 2**20


def add_discrete_normal_(
    sums: Tensor, sigma: float, *, source: NoiseSource, step: int, domain: str = "discrete", start: int = 0
) -> Tensor:
    """Adds discrete Gaussian noise in place. An integer x has probability proportional to ``exp(-x**2 / (2 * s**2))``.

    Privacy: the mechanism is ``1 / (2 * s**2)``-zCDP for sums with sensitivity 1. Acceptance probabilities are computed
    in float64, with a relative error of 2**-50.

    Args:
        sums: Tensor of int64, which is modified in place.
        sigma: Standard deviation ``s`` of the noise, in [0, 2**48].
        source: Source of the random words.
        step: Number of the step, which must be new. The same step, domain and start give the same noise.
        domain: Purpose of the noise. Each use of the source must have a different domain.
        start: Index of ``sums[0]`` in the complete vector, if ``sums`` is a slice of it. The slices must be the same at
            every step.

    Returns:
        ``sums``.

    Raises:
        TypeError: If ``sums`` is not int64.
        InvalidBudgetError: If ``sigma`` is out of range.
    """
    if sums.dtype is not torch.int64:
        raise TypeError(f"noise.discrete: sums are {sums.dtype}; pass int64, as clipped_grad(grid_scale=...) returns.")
    if not 0 <= sigma <= _MAX_SIGMA:
        raise InvalidBudgetError(f"noise.discrete: sigma must be in [0, 2**48], got {sigma!r}.")
    if sigma == 0 or not sums.numel():
        return sums
    noise = _discrete_normals(sums.numel(), sigma, source, f"{domain}/{start}", step)
    return sums.add_(torch.from_numpy(noise).view(sums.shape).to(sums.device))


def _discrete_normals(size: int, sigma: float, source: NoiseSource, domain: str, step: int) -> np.ndarray:
    parts: list[np.ndarray] = []
    missing, block = size, 0
    while missing:
        count = min(_MAX_PROPOSALS, int(2 * missing) + 64)
        words = source.words(3 * count, domain=domain, step=step, block=block)
        block += -(-3 * count // WORDS_PER_BLOCK)
        accepted = _accepted(words.reshape(3, count), sigma)[:missing]
        parts.append(accepted)
        missing -= len(accepted)
    return np.concatenate(parts)


def _accepted(words: np.ndarray, sigma: float) -> np.ndarray:
    """Returns the accepted proposals in order."""
    uniform = ((words >> np.uint64(11)).astype(np.float64) + 0.5) * 2.0**-53
    scale = _LAPLACE_SCALE * sigma
    rate = -1.0 / scale  # log(1 - p) of the geometric distribution with p = 1 - exp(-1 / scale)
    proposed = np.floor(np.log(uniform[0]) / rate) - np.floor(np.log(uniform[1]) / rate)
    exponent = -((np.abs(proposed) - sigma * sigma / scale) ** 2) / (2 * sigma * sigma)
    return proposed[uniform[2] < np.exp(exponent)].astype(np.int64)
