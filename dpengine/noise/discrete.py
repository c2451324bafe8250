"""The discrete Gaussian: noise for sums of whole numbers, which no rounding can betray.

Source: Canonne, Kamath, Steinke 2020 (arXiv:2004.00010), by rejection from a discrete Laplace distribution.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from dpengine.errors import InvalidBudgetError

from .chacha20 import WORDS_PER_BLOCK
from .source import NoiseSource

_WIDER = 1.3  # the scale of the Laplace distribution over sigma: about 0.6 of what is proposed is taken
_LARGEST_SIGMA = 2.0**48  # whole numbers that far out are still exact in float64
_MOST_AT_ONCE = 2**20


def add_discrete_normal_(
    sums: Tensor, sigma: float, *, source: NoiseSource, step: int, domain: str = "discrete", start: int = 0
) -> Tensor:
    """Adds independent discrete normals in place: an integer x with probability in proportion to exp(-x^2 / (2 s^2)).

    The release is ``1 / (2 s^2)``-zCDP for sums that one example changes by 1 at most. Proposals are accepted in
    float64, with probabilities whose relative error is 2**-50.

    Args:
        sums: Tensor of int64, changed in place.
        sigma: Standard deviation ``s`` of the noise, in [0, 2**48].
        source: Source of the random words.
        step: Number of the step, another one for each release: noise repeats at the same step, domain and start.
        domain: Name that separates this noise from other noise of the source.
        start: Index of ``sums[0]`` if ``sums`` is a slice of a vector, which must be cut alike at every step.

    Returns:
        ``sums``.

    Raises:
        TypeError: If ``sums`` is not of int64.
        InvalidBudgetError: If ``sigma`` is out of range.
    """
    if sums.dtype is not torch.int64:
        raise TypeError(f"noise.discrete: sums are {sums.dtype}; pass int64, as clipped_grad(grid_scale=...) gives.")
    if not 0 <= sigma <= _LARGEST_SIGMA:
        raise InvalidBudgetError(f"noise.discrete: sigma must be in [0, 2**48], got {sigma!r}.")
    if sigma == 0 or not sums.numel():
        return sums
    drawn = _drawn(sums.numel(), sigma, source, f"{domain}/{start}", step)
    return sums.add_(torch.from_numpy(drawn).view(sums.shape).to(sums.device))


def _drawn(size: int, sigma: float, source: NoiseSource, domain: str, step: int) -> np.ndarray:
    parts: list[np.ndarray] = []
    missing, block = size, 0
    while missing:
        count = min(_MOST_AT_ONCE, int(2 * missing) + 64)
        words = source.words(3 * count, domain=domain, step=step, block=block)
        block += -(-3 * count // WORDS_PER_BLOCK)
        taken = _taken(words.reshape(3, count), sigma)[:missing]
        parts.append(taken)
        missing -= len(taken)
    return np.concatenate(parts)


def _taken(words: np.ndarray, sigma: float) -> np.ndarray:
    """The proposals that are taken, in their order."""
    uniform = ((words >> np.uint64(11)).astype(np.float64) + 0.5) * 2.0**-53
    scale = _WIDER * sigma
    rate = -1.0 / scale  # log(1 - p) of the geometric distribution with p = 1 - exp(-1 / scale)
    proposed = np.floor(np.log(uniform[0]) / rate) - np.floor(np.log(uniform[1]) / rate)
    exponent = -((np.abs(proposed) - sigma * sigma / scale) ** 2) / (2 * sigma * sigma)
    return proposed[uniform[2] < np.exp(exponent)].astype(np.int64)
