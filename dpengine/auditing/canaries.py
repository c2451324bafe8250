"""Canaries in a run of the user: examples whose inclusion depends on a coin each, and their scores.

Every canary is an example of the data set and is drawn like the others, so nothing public depends on the coins. An
excluded canary adds a gradient of zero. An included one adds its own gradient or, as a gradient canary, a long gradient
along a direction that only the audit knows. Norms, clipping factors and sums are computed from it as from any other.

An included canary adds at most its direction to the sum, in units of the sensitivity, and the noise along the direction
is the noise multiplier times row t of ``S^-1 Z``. Multiplied by S, releases have independent noise again, and a
participation at step t has the shape of column t of S.

Axes: T steps, M canaries, K nonzero elements of a direction, B samples of a chunk.
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
from dpengine.noise import strategy
from dpengine.noise.correlated import Recurrence

Indices = npt.NDArray[np.int64]
Bits = npt.NDArray[np.bool_]

_PLACES = 16  # most nonzero elements of a direction: some in most layers, and few enough to store for many canaries
_LOUD = 8.0  # norm of a canary's gradient over the clipping norm, so that it is clipped


@dataclass(frozen=True, eq=False)
class Canaries:
    """Canaries of a data set."""

    coins: Bits  # ``(M,)``, True for included canaries
    at: Indices  # ``(N,)``, the canary of each row of the data set; -1 for other rows

    @property
    def count(self) -> int:
        """Number of canaries."""
        return len(self.coins)


class Directions:
    """Sparse unit vectors in the space of all parameters, without common nonzero elements.

    So the addition of one canary has no component along the direction of another.
    """

    def __init__(self, sizes: Sequence[int], count: int, rng: np.random.Generator):
        self.ends = np.cumsum(sizes, dtype=np.int64)
        total = int(self.ends[-1]) if len(sizes) else 0
        if count > total:
            raise ValueError(
                f"auditing: {count:,} gradient canaries for {total:,} trainable numbers; each needs one of its own. "
                f"Pass canaries={total} or less, or kind='input'."
            )
        places = min(_PLACES, total // count)
        self.places_MK = rng.permutation(total)[: count * places].reshape(count, places)
        self.values_MK = rng.choice([-1.0, 1.0], self.places_MK.shape) / np.sqrt(places)

    def along(self, vector: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        """Returns the products ``(M,)`` of a vector of all parameters with the directions."""
        found: npt.NDArray[np.float64] = (vector[self.places_MK] * self.values_MK).sum(axis=1)
        return found

    def rows(self, number: int, shape: Sequence[int], canary_B: Indices, norm: float, like: Tensor) -> Tensor:
        """Returns one parameter's part ``(B, *shape)`` of canary gradients, zero where ``canary_B`` is -1."""
        begin, end = (int(self.ends[number - 1]) if number else 0), int(self.ends[number])
        row_C = np.flatnonzero(canary_B >= 0)
        places_CK, values_CK = self.places_MK[canary_B[row_C]], norm * self.values_MK[canary_B[row_C]]
        inside = (places_CK >= begin) & (places_CK < end)
        flat = torch.zeros(len(canary_B) * (end - begin), dtype=wide(like.dtype), device=like.device)
        at = (row_C[:, None] * (end - begin) + places_CK - begin)[inside]
        flat[torch.from_numpy(at).to(flat.device)] = torch.from_numpy(values_CK[inside]).to(flat)
        return flat.view(len(canary_B), *shape)


class PlantedGradients:
    """A grad mode that replaces the gradients of canaries before norms are computed, and delegates all other calls.

    Attributes:
        drawn: By step, the canaries in the batch, included or not.
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
            self._plant(scale)
        return self.inner.sq_norms(groups, num_groups, scale)

    def _plant(self, scale: float) -> None:
        step, rows = self._chunk()
        canary_B = self._canaries.at[rows]
        self.drawn.setdefault(step, []).append(canary_B[canary_B >= 0])
        is_in = np.append(self._canaries.coins, False)[canary_B]  # -1 takes the last
        replaced = (canary_B >= 0) & (~is_in if self._directions is None else True)
        if not replaced.any():
            return
        parameters = self._parameters()
        self._replaced = torch.from_numpy(replaced).to(next(iter(parameters.values())).device)
        self.inner.drop(self._replaced)
        if self._directions is None or not is_in.any():
            return
        planted_B = np.where(is_in, canary_B, -1)
        norm = _LOUD * self._threshold() / scale
        for number, (name, parameter) in enumerate(parameters.items()):
            grad = self._directions.rows(number, parameter.shape, planted_B, norm, parameter)
            self.inner.receive_rows(Use(parameter, name), grad)

    def drop(self, rows_B: Tensor) -> None:
        # A grad mode may store only the last set of dropped rows.
        if self._replaced is not None and self._directions is None:
            rows_B = rows_B | self._replaced.to(rows_B.device)
        self.inner.drop(rows_B)

    def clear(self) -> None:
        self._replaced = None
        self.inner.clear()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)


Floats = npt.NDArray[np.float64]
LONGEST = 4096  # steps of the longest run whose noise matrix is built
_LEAST = 1e-12  # smallest variance in scores, so that scores of a run without noise are finite


@dataclass(frozen=True, eq=False)
class Trace:
    """Releases of a run along the directions of canaries."""

    releases_TM: Floats  # ``<release * divisor, direction> / sensitivity``; 0 at steps without a release
    drawn_TM: npt.NDArray[np.bool_]  # whether a canary was in the batch, included or not
    noise_multiplier: float  # standard deviation of the noise of one participation, over the sensitivity
    sample_rate: float  # probability of a canary to be in a possible batch
    # First possible step of each canary, -1 for none; None if all steps are possible.
    turns_M: npt.NDArray[np.int64] | None = None
    cycle: int = 1  # number of steps from one possible step to the next
    strategy_TT: Floats | None = None  # S; None for independent noise

    @property
    def possible_TM(self) -> npt.NDArray[np.bool_]:
        """True where a canary may be in the batch."""
        steps, canaries = self.releases_TM.shape
        if self.turns_M is None:
            return np.ones((steps, canaries), dtype=bool)
        taken: npt.NDArray[np.bool_] = np.arange(steps)[:, None] % self.cycle == self.turns_M
        return taken & (self.turns_M >= 0)

    def decorrelated(self, values_TM: Floats) -> Floats:
        """Returns the values multiplied by S, which makes noise independent across steps."""
        found: Floats = values_TM if self.strategy_TT is None else self.strategy_TT @ values_TM
        return found


def strategy_of(noise: Recurrence | None, steps: int) -> Floats | None:
    """Returns S ``(T, T)`` of the noise of a run; None for independent noise or a run that is too long."""
    if noise is None or steps > LONGEST:
        return None
    found: Floats = strategy.strategy_of(noise, steps)
    return found


def log_likelihood_ratios(trace: Trace) -> Floats:
    """Returns scores ``(M,)``: the log likelihood ratio of the releases with and without a canary.

    The batches are unknown except for the possible steps of a canary. If columns of S overlap and batches are random,
    the score ignores the overlap: it is then not a likelihood ratio, but still a valid score.
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
    """Estimates each canary's addition at a participation by least squares from known draws: means, weights ``(M,)``.

    Means are in units of the sensitivity; their variance is the squared noise multiplier over the weight.
    """
    white_TM = trace.decorrelated(trace.releases_TM)
    shape_TM = trace.decorrelated(trace.drawn_TM.astype(np.float64))
    weights: Floats = (shape_TM**2).sum(axis=0)
    means: Floats = (white_TM * shape_TM).sum(axis=0) / np.where(weights > 0, weights, 1.0)
    return means, weights
