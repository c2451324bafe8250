"""What someone who sees every release and knows a canary's direction makes of a run.

A canary that takes part at step t adds at most its direction to the sum, in units of the sensitivity, and the noise
along that direction is the noise multiplier times row t of ``S^-1 Z``. Multiplied by S, releases have independent noise
again, and a participation at step t has the shape of column t of S.

Axes: T steps, M canaries.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from dpengine.noise import Recurrence

Floats = npt.NDArray[np.float64]
LONGEST = 4096  # steps for which the matrix of correlated noise is built
_LEAST = 1e-12  # variance that scores are formed with, so that those of a run without noise are numbers too


@dataclass(frozen=True, eq=False)
class Trace:
    """What a run released along the directions of canaries.

    Attributes:
        releases_TM: ``<release * divisor, direction> / sensitivity``; 0 at steps without a release.
        drawn_TM: Whether a canary was in the batch, whatever its coin says.
        noise_multiplier: Standard deviation of the noise of one participation, over the sensitivity.
        sample_rate: The chance of a canary to be in a batch that it can be in.
        turns_M: The first step that each can be in, -1 for none; None where all can be in each.
        cycle: Steps from one that it can be in to the next.
        strategy_TT: S, or None where noise is independent.
    """

    releases_TM: Floats
    drawn_TM: npt.NDArray[np.bool_]
    noise_multiplier: float
    sample_rate: float
    turns_M: npt.NDArray[np.int64] | None = None
    cycle: int = 1
    strategy_TT: Floats | None = None

    @property
    def possible_TM(self) -> npt.NDArray[np.bool_]:
        """Whether a canary could be in the batch."""
        steps, canaries = self.releases_TM.shape
        if self.turns_M is None:
            return np.ones((steps, canaries), dtype=bool)
        taken: npt.NDArray[np.bool_] = np.arange(steps)[:, None] % self.cycle == self.turns_M
        return taken & (self.turns_M >= 0)

    def decorrelated(self, values_TM: Floats) -> Floats:
        """The values where noise is independent over steps."""
        found: Floats = values_TM if self.strategy_TT is None else self.strategy_TT @ values_TM
        return found


def strategy_of(noise: Recurrence | None, steps: int) -> Floats | None:
    """S ``(T, T)`` of the noise that a run really draws; None where it is independent, or the run is too long."""
    if noise is None or steps > LONGEST:
        return None
    from scipy.linalg import solve_triangular

    noising_TT = torch.zeros(steps, steps, dtype=torch.float64)
    state_KD = torch.zeros(noise.kept, steps, dtype=torch.float64)

    def fresh(out: Tensor, weight: float, step: int) -> None:
        out[step] += weight  # the normals of a step, as coordinates

    for step in range(steps):
        noise.row(step, fresh, state_KD, noising_TT[step])
    found: Floats = solve_triangular(noising_TT.numpy(), np.eye(steps), lower=True) / noise.column_norm
    return found


def log_likelihood_ratios(trace: Trace) -> Floats:
    """Scores ``(M,)``: the log of how much more probable the releases are if a canary took part.

    Batches stay unknown, but for which steps a canary can be in. Where columns of S overlap and batches are random, the
    score leaves that overlap out: it is then a score like any other.

    Returns:
        The scores, higher for "in".
    """
    white_TM = trace.decorrelated(trace.releases_TM)
    variance = max(trace.noise_multiplier**2, _LEAST)
    if trace.sample_rate == 1:
        all_TM = trace.decorrelated(trace.possible_TM.astype(np.float64))
        whole: Floats = ((white_TM * all_TM).sum(axis=0) - (all_TM**2).sum(axis=0) / 2) / variance
        return whole
    if trace.strategy_TT is None:
        matched_TM, length_T1 = white_TM, np.ones((len(white_TM), 1))
    else:
        matched_TM, length_T1 = trace.strategy_TT.T @ white_TM, (trace.strategy_TT**2).sum(axis=0)[:, None]
    ratio_TM = (2 * matched_TM - length_T1) / (2 * variance)
    rate = trace.sample_rate
    scores_TM = np.logaddexp(math.log1p(-rate), math.log(rate) + ratio_TM)
    summed: Floats = np.where(trace.possible_TM, scores_TM, 0.0).sum(axis=0)
    return summed


def means_of_participations(trace: Trace) -> tuple[Floats, Floats]:
    """What each canary seems to have added at a participation, by least squares, where its draws are known.

    Returns:
        ``(M,)`` means, in units of the sensitivity, and ``(M,)`` weights: the variance of a mean is the squared noise
        multiplier over its weight. A canary that was never drawn has weight 0.
    """
    white_TM = trace.decorrelated(trace.releases_TM)
    shape_TM = trace.decorrelated(trace.drawn_TM.astype(np.float64))
    weights: Floats = (shape_TM**2).sum(axis=0)
    means: Floats = (white_TM * shape_TM).sum(axis=0) / np.where(weights > 0, weights, 1.0)
    return means, weights
