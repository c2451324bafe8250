"""Lower bounds on epsilon from scores of included and excluded canaries, and two-sided p-values of test statistics.

`clopper_pearson_epsilon` assumes only that scores are independent, as they are over many runs. The Gaussian forms
assume normal scores, as a white-box observer has them, and need far fewer.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from scipy import stats
from torch import Tensor

Floats = npt.NDArray[np.float64]


def rate_at_most(hits: int, trials: int, alpha: float) -> float:
    """The Clopper-Pearson upper limit of a rate."""
    from scipy.special import betaincinv

    return 1.0 if hits >= trials else float(betaincinv(hits + 1, trials - hits, 1 - alpha))


def clopper_pearson_epsilon(
    in_scores: npt.ArrayLike, out_scores: npt.ArrayLike, *, delta: float, alpha: float
) -> float:
    """What epsilon is at least, from independent scores, with confidence ``1 - alpha``.

    The rule is "in" if a score reaches a threshold. The thresholds are the vertices of the convex hull of the error
    rates, and share ``alpha`` between them.

    Args:
        in_scores: ``(n,)``, of canaries that took part. Higher means "in".
        out_scores: ``(n',)``, of others.
        delta: For which epsilon is meant.
        alpha: In (0, 1).

    Returns:
        The bound; 0.0 if the scores tell nothing.

    Raises:
        ValueError: If scores are missing, or not one-dimensional.
    """
    inside, outside = np.asarray(in_scores, dtype=np.float64), np.asarray(out_scores, dtype=np.float64)
    if inside.ndim != 1 or outside.ndim != 1 or not len(inside) or not len(outside):
        raise ValueError(
            f"auditing.clopper_pearson_epsilon: scores have shapes {inside.shape} and {outside.shape}; both must be "
            "one-dimensional and not empty."
        )
    vertices = _hull(inside, outside)
    each = alpha / len(vertices) / 2
    found = 0.0
    for missed, passed in vertices:
        misses = rate_at_most(missed, len(inside), each)
        alarms = rate_at_most(len(outside) - passed, len(outside), each)
        if 1 - misses - delta > 0:
            found = max(found, math.log((1 - misses - delta) / alarms))
    return found


def _hull(inside: Floats, outside: Floats) -> list[tuple[int, int]]:
    """Numbers of canaries below a threshold, those that were in and those that were out: vertices of their hull."""
    thresholds = np.append(np.unique(np.concatenate([inside, outside])), np.inf)
    missed = np.searchsorted(np.sort(inside), thresholds)
    passed = np.searchsorted(np.sort(outside), thresholds)
    vertices: list[tuple[int, int]] = []
    for point in zip(missed.tolist(), passed.tolist(), strict=True):
        while len(vertices) > 1 and not _turns_down(vertices[-2], vertices[-1], point):
            vertices.pop()
        vertices.append(point)
    return vertices


def _turns_down(one: tuple[int, int], middle: tuple[int, int], last: tuple[int, int]) -> bool:
    """Whether the middle point is above the chord of its neighbours."""
    return (middle[1] - one[1]) * (last[0] - one[0]) > (last[1] - one[1]) * (middle[0] - one[0])


def per_step_p_value(in_steps: npt.ArrayLike, out_steps: npt.ArrayLike, *, noise_multiplier: float) -> float:
    """The chance of such releases if the noise was as claimed, and no canary added more than its share.

    Args:
        in_steps: ``(n,)``: releases along a canary's direction at steps that it was in, as
            ``release * divisor / (noise_multiplier * sensitivity)``.
        out_steps: ``(n',)``, the same at steps that it was not in.
        noise_multiplier: What is claimed.

    Returns:
        A p-value for the claim, from the shift between both and from their variance.

    Raises:
        ValueError: If there are fewer than two numbers on either side.
    """
    from scipy import stats  # takes a second to import

    inside, outside = np.asarray(in_steps, dtype=np.float64), np.asarray(out_steps, dtype=np.float64)
    if min(len(inside), len(outside)) < 2:
        raise ValueError(
            f"auditing.per_step_p_value: {len(inside)} steps in and {len(outside)} out; at least 2 of each are needed."
        )
    freedom = len(inside) + len(outside) - 2
    squares = float(((inside - inside.mean()) ** 2).sum() + ((outside - outside.mean()) ** 2).sum())
    error = math.sqrt(squares / freedom * (1 / len(inside) + 1 / len(outside)))
    above = float(inside.mean() - outside.mean()) - 1 / noise_multiplier
    shifted = float(stats.t(freedom).sf(above / error)) if error else float(above <= 0)
    quiet = float(stats.chi2(freedom).cdf(squares))
    return min(1.0, 2 * min(shifted, quiet))


@dataclass(frozen=True)
class GaussianShift:
    """How far canaries that were in lie above the others, over the noise of one participation.

    Attributes:
        shift: In units of the sensitivity: 1 if a canary adds all that it may.
        noise: Standard deviation for one participation, in the same units: at most the noise multiplier, as far as
            nothing else disturbs.
        ratio_at_least: ``shift / noise``, less what chance may have added.
    """

    shift: float
    noise: float
    ratio_at_least: float


def gaussian_shift(
    means: npt.ArrayLike, weights: npt.ArrayLike, coins: npt.ArrayLike, *, alpha: float
) -> GaussianShift | None:
    """Compares canaries that were in with others, where how often each was drawn is known.

    Args:
        means: ``(m,)``, of each canary: what it seems to have added at a participation.
        weights: ``(m,)``: participations that the mean is of. The variance of a mean is that of one over this.
        coins: ``(m,)``, whether each took part.
        alpha: How often the bound may be too high.

    Returns:
        The comparison, with a bound on the ratio by the normal approximation; None where there are too few canaries.
    """
    from scipy.special import ndtri

    mean, weight, coin = np.asarray(means, float), np.asarray(weights, float), np.asarray(coins, bool)
    known = weight > 0
    mean, weight, coin = mean[known], weight[known], coin[known]
    if min(coin.sum(), (~coin).sum()) < 2:
        return None
    total = {side: float(weight[coin == side].sum()) for side in (True, False)}
    centre = {side: float((weight * mean)[coin == side].sum()) / total[side] for side in (True, False)}
    freedom = len(mean) - 2
    squares = float((weight * (mean - np.where(coin, centre[True], centre[False])) ** 2).sum())
    noise, shift = math.sqrt(squares / freedom), centre[True] - centre[False]
    if noise == 0:
        return GaussianShift(shift, 0.0, math.inf if shift > 0 else 0.0)
    ratio = shift / noise
    error = math.sqrt(1 / total[True] + 1 / total[False] + ratio**2 / (2 * freedom))
    return GaussianShift(shift, noise, max(0.0, ratio + float(ndtri(alpha)) * error))


def two_sided(z: float) -> float:
    """Of a standard normal to be as far out as ``z``; 0 for what is no number."""
    return math.erfc(abs(z) / math.sqrt(2)) if z == z else 0.0


def chi_square(total: float, degrees: float) -> float:
    """Of a sum of squares of so many normals."""
    if degrees <= 0:
        return 1.0
    if not (total >= 0 and math.isfinite(total)):
        return 0.0
    return float(2 * min(stats.chi2.cdf(total, degrees), stats.chi2.sf(total, degrees)))


def binomial(count: int, number: int, rate: float) -> float:
    """Of so many successes: twice the lighter tail."""
    return float(min(1.0, 2 * min(stats.binom.cdf(count, number, rate), stats.binom.sf(count - 1, number, rate))))


def kolmogorov(values: Tensor) -> float:
    """Of the largest distance between the values' distribution and that of standard normals."""
    if not bool(values.isfinite().all()):
        return 0.0
    return float(stats.kstest(values.double().flatten().numpy(), "norm", method="asymp").pvalue)


def correlation(one: Tensor, other: Tensor) -> float:
    """Of the sum of products of two sequences that should be independent standard normals."""
    products = one.double() * other.double()
    return two_sided(float(products.sum()) / math.sqrt(max(1, products.numel())))
