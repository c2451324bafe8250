"""Canaries, which are examples that a fair coin includes in the audited run or excludes, and their scores.

Every canary is an example of the data set and is sampled like the others, so public output does not depend on the
coins. An excluded canary adds a gradient of zero. An included canary adds its own gradient or, for gradient canaries, a
large gradient along a direction that only the audit knows. It is clipped and summed like any other gradient.

An included canary adds at most its unit direction to the sum, in units of the sensitivity. The noise along the
direction is the noise multiplier times row t of ``S^-1 Z``. The product of S and the releases has independent noise,
and a participation at step t then contributes column t of S.

Axes: T steps, M canaries, K nonzero elements of a direction, B samples of a chunk, C canaries of a chunk.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from dpengine.capture.record import Use
from dpengine.grad_modes.rows import wide
from dpengine.grad_modes.strategy import AbstractGradients
from dpengine.noise import custom_noise
from dpengine.noise.correlated import Recurrence

Indices = npt.NDArray[np.int64]
Bits = npt.NDArray[np.bool_]

_MAX_NONZERO = 16  # maximum number of nonzero elements of a direction, which spread over most layers
_NORM_FACTOR = 8.0  # norm of a canary gradient over the clipping norm, large enough to be clipped


@dataclass(frozen=True, eq=False)
class Canaries:
    """Canaries of a data set."""

    coins: Bits  # ``(M,)``, True for included canaries
    canary_of: Indices  # ``(N,)``, the canary of each example of the data set; -1 for other examples

    @property
    def count(self) -> int:
        """Number of canaries."""
        return len(self.coins)


class Directions:
    """Sparse orthogonal unit vectors in the space of all parameters, with disjoint nonzero elements."""

    def __init__(self, sizes: Sequence[int], count: int, rng: np.random.Generator):
        self.ends = np.cumsum(sizes, dtype=np.int64)
        total = int(self.ends[-1]) if len(sizes) else 0
        if count > total:
            raise ValueError(
                f"auditing: {count:,} gradient canaries exceed the {total:,} trainable elements. Pass "
                f"canaries={total} or less, or kind='input'."
            )
        nonzero = min(_MAX_NONZERO, total // count)
        self.indices_MK = rng.permutation(total)[: count * nonzero].reshape(count, nonzero)
        self.values_MK = rng.choice([-1.0, 1.0], self.indices_MK.shape) / np.sqrt(nonzero)

    def project(self, vector: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        """Returns the inner products ``(M,)`` of a vector of all parameters with the directions."""
        products: npt.NDArray[np.float64] = (vector[self.indices_MK] * self.values_MK).sum(axis=1)
        return products

    def gradients(self, number: int, shape: Sequence[int], canary_B: Indices, norm: float, like: Tensor) -> Tensor:
        """Returns the canary gradients ``(B, *shape)`` of parameter ``number``, zero where ``canary_B`` is -1."""
        begin, end = (int(self.ends[number - 1]) if number else 0), int(self.ends[number])
        sample_C = np.flatnonzero(canary_B >= 0)
        indices_CK, values_CK = self.indices_MK[canary_B[sample_C]], norm * self.values_MK[canary_B[sample_C]]
        inside = (indices_CK >= begin) & (indices_CK < end)
        flat = torch.zeros(len(canary_B) * (end - begin), dtype=wide(like.dtype), device=like.device)
        positions = (sample_C[:, None] * (end - begin) + indices_CK - begin)[inside]
        flat[torch.from_numpy(positions).to(flat.device)] = torch.from_numpy(values_CK[inside]).to(flat)
        return flat.view(len(canary_B), *shape)


class CanaryGradients:
    """Wrapper of a grad mode that replaces the gradients of canaries before the norms are computed.

    Attributes:
        drawn: The canaries in the batch of each step, included or not.
    """

    def __init__(
        self,
        inner: AbstractGradients,
        canaries: Canaries,
        chunk: Callable[[], tuple[int, Indices]],
        directions: Directions | None,
        parameters: Callable[[], Mapping[str, nn.Parameter]],
        threshold: Callable[[], float],
    ):
        self.inner = inner
        self.drawn: dict[int, list[Indices]] = {}
        self._canaries = canaries
        self._chunk = chunk
        self._directions = directions
        self._parameters = parameters
        self._threshold = threshold
        self._replaced: Tensor | None = None

    def sq_norms(self, groups: Mapping[nn.Parameter, int], num_groups: int, scale: float) -> Tensor:
        if self.inner.rows:
            self._insert(scale)
        return self.inner.sq_norms(groups, num_groups, scale)

    def _insert(self, scale: float) -> None:
        step, rows = self._chunk()
        canary_B = self._canaries.canary_of[rows]
        self.drawn.setdefault(step, []).append(canary_B[canary_B >= 0])
        included = np.append(self._canaries.coins, False)[canary_B]  # index -1 selects the appended False
        replaced = (canary_B >= 0) & (~included if self._directions is None else True)
        if not replaced.any():
            return
        parameters = self._parameters()
        self._replaced = torch.from_numpy(replaced).to(next(iter(parameters.values())).device)
        self.inner.drop(self._replaced)
        if self._directions is None or not included.any():
            return
        inserted_B = np.where(included, canary_B, -1)
        norm = _NORM_FACTOR * self._threshold() / scale
        for number, (name, parameter) in enumerate(parameters.items()):
            grad = self._directions.gradients(number, parameter.shape, inserted_B, norm, parameter)
            self.inner.receive_rows(Use(parameter, name), grad)

    def drop(self, rows_B: Tensor) -> None:
        # A grad mode may store only the last mask of dropped samples.
        if self._replaced is not None and self._directions is None:
            rows_B = rows_B | self._replaced.to(rows_B.device)
        self.inner.drop(rows_B)

    def clear(self) -> None:
        self._replaced = None
        self.inner.clear()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)


Floats = npt.NDArray[np.float64]
MAX_STEPS = 4096  # maximum number of steps of a run whose noise matrix is built
_MIN_VARIANCE = 1e-12  # minimum variance in scores, which keeps scores of a run without noise finite


@dataclass(frozen=True, eq=False)
class Trace:
    """Projections of the releases of a run on the canary directions, and the batches of the canaries."""

    releases_TM: Floats  # ``<release * divisor, direction> / sensitivity``; 0 at steps without a release
    drawn_TM: npt.NDArray[np.bool_]  # whether a canary was in the batch, included or not
    noise_multiplier: float  # standard deviation of the noise of one participation, over the sensitivity
    sample_rate: float  # probability that a canary is in the batch of a possible step
    # First possible step of each canary, -1 for none; None if all steps are possible.
    first_steps_M: npt.NDArray[np.int64] | None = None
    cycle: int = 1  # number of steps from one possible step to the next
    strategy_TT: Floats | None = None  # S; None for independent noise

    @property
    def possible_TM(self) -> npt.NDArray[np.bool_]:
        """True where a canary may be in the batch."""
        steps, canaries = self.releases_TM.shape
        if self.first_steps_M is None:
            return np.ones((steps, canaries), dtype=bool)
        possible: npt.NDArray[np.bool_] = np.arange(steps)[:, None] % self.cycle == self.first_steps_M
        return possible & (self.first_steps_M >= 0)

    def decorrelated(self, values_TM: Floats) -> Floats:
        """Returns the product of S and the values, whose noise is independent across steps."""
        product: Floats = values_TM if self.strategy_TT is None else self.strategy_TT @ values_TM
        return product


def strategy_of(noise: Recurrence | None, steps: int) -> Floats | None:
    """Returns S ``(T, T)`` of the noise of a run; None for independent noise or a run that is too long."""
    if noise is None or steps > MAX_STEPS:
        return None
    matrix: Floats = custom_noise.strategy_of(noise, steps)
    return matrix


def log_likelihood_ratios(trace: Trace) -> Floats:
    """Returns scores ``(M,)``: the log likelihood ratio of the releases with and without a canary.

    The adversary knows the possible steps of a canary, but not the batches. If columns of S overlap and batches are
    random, the score ignores the overlap: it is then not a likelihood ratio, but still a valid score.
    """
    white_TM = trace.decorrelated(trace.releases_TM)
    variance = max(trace.noise_multiplier**2, _MIN_VARIANCE)
    if trace.sample_rate == 1:
        all_TM = trace.decorrelated(trace.possible_TM.astype(np.float64))
        scores: Floats = ((white_TM * all_TM).sum(axis=0) - (all_TM**2).sum(axis=0) / 2) / variance
        return scores
    if trace.strategy_TT is None:
        matched_TM, length_T1 = white_TM, np.ones((len(white_TM), 1))
    else:
        matched_TM, length_T1 = trace.strategy_TT.T @ white_TM, (trace.strategy_TT**2).sum(axis=0)[:, None]
    ratio_TM = (2 * matched_TM - length_T1) / (2 * variance)
    rate = trace.sample_rate
    scores_TM = np.logaddexp(math.log1p(-rate), math.log(rate) + ratio_TM)
    sums: Floats = np.where(trace.possible_TM, scores_TM, 0.0).sum(axis=0)
    return sums


def participation_means(trace: Trace) -> tuple[Floats, Floats]:
    """Estimates the mean contribution of each canary to a participation by least squares, given its batches.

    Returns means and weights, ``(M,)`` each. Means are in units of the sensitivity. Their variance is the squared noise
    multiplier over the weight.
    """
    white_TM = trace.decorrelated(trace.releases_TM)
    shape_TM = trace.decorrelated(trace.drawn_TM.astype(np.float64))
    weights: Floats = (shape_TM**2).sum(axis=0)
    means: Floats = (white_TM * shape_TM).sum(axis=0) / np.where(weights > 0, weights, 1.0)
    return means, weights
