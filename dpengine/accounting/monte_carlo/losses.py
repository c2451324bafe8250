"""Privacy losses of runs with random participation, by simulation.

Without an example, a run outputs ``y = sigma Z`` (Q); with it, ``y = S u + sigma Z`` (P), with random participations u.
This pair dominates the run if S is nonnegative. `LossSampler` draws ``log dP/dQ`` under P, and its negative under Q.

Axes: T steps of the run (or equivalent coordinates), K bands of the strategy, B bins, M samples.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from dpengine.accounting.sampled_matrix import SampledMatrixEvent
from dpengine.errors import AccountingRefusedError

Floats = npt.NDArray[np.float64]
Steps = npt.NDArray[np.int64]
if TYPE_CHECKING:  # numpy imports its generators lazily
    Rng = np.random.Generator

_CHUNK = 2**19
"""Number of elements of a chunk of samples over all steps."""
_MOST_ENTRIES = 2**25  # maximum number of entries of a strategy
_WORK = 40  # nanoseconds for each row, besides multiplications


@dataclass(frozen=True)
class LossSampler:
    """Draws privacy losses.

    Attributes:
        rows: Number of elements in one output.
        work: Approximate nanoseconds for one sample of both directions.
        sigma: Standard deviation of the noise.
        join: Adds ``S u`` to outputs (T, M), with new u for each sample.
        log_ratio: ``log dP/dQ`` of outputs (T, M).
    """

    rows: int
    work: int
    sigma: float
    join: Callable[[Rng, Floats], None]
    log_ratio: Callable[[Floats], Floats]

    def draw(self, samples: int, seed: int) -> tuple[Floats, Floats]:
        """Returns losses of both directions: removing and adding an example.

        Both use the same noise. Samples of each direction are independent.
        """
        rng = np.random.Generator(np.random.SFC64(seed))
        remove, add = np.empty(samples), np.empty(samples)
        size = max(1, _CHUNK // self.rows)
        with np.errstate(all="ignore"):
            for start in range(0, samples, size):
                part = slice(start, min(start + size, samples))
                noise_TM = rng.standard_normal((self.rows, part.stop - start))
                noise_TM *= self.sigma
                np.negative(self.log_ratio(noise_TM), out=add[part])
                self.join(rng, noise_TM)
                remove[part] = self.log_ratio(noise_TM)
        if not (np.isfinite(remove).all() and np.isfinite(add).all()):
            raise AccountingRefusedError("The noise multiplier is so small that losses overflow.")
        return remove, add


def loss_sampler(event: SampledMatrixEvent) -> LossSampler:
    """Returns the sampler of a run. Raises if its strategy would need too much memory."""
    entries = event.steps * (event.cycle_length if event.scheme == "balls-in-bins" else event.bands)
    if entries > _MOST_ENTRIES:
        raise AccountingRefusedError(
            f"A {event.scheme} run of {event.steps:,} steps has {entries:,} entries: too many to simulate.",
            fix="Use MatrixGaussianEvent, which does not use amplification.",
        )
    bands_KT = _bands(event)
    sigma = event.noise_multiplier * math.sqrt(float(np.square(bands_KT).sum(axis=0).max()))
    return _SAMPLERS[event.scheme](event, bands_KT, sigma)


def _bands(event: SampledMatrixEvent) -> Floats:
    """Entry ``[k, i]`` is ``S[i + k, i]``, and 0 beyond the run: the last columns are truncated."""
    steps = event.steps
    found = np.zeros((event.bands, steps))
    for k in range(event.bands):
        found[k, : steps - k] = (
            event.coefficients[k] if event.coefficients else [event.columns[i][i + k] for i in range(steps - k)]
        )
    return found


def balls_in_bins(event: SampledMatrixEvent, bands_KT: Floats, sigma: float) -> LossSampler:
    """The columns of each bin are summed. Outputs are drawn in the span of these vectors only."""
    bins, steps = event.cycle_length, event.steps
    sums_TB = np.zeros((steps, bins))
    for k, row in enumerate(bands_KT):
        t = np.arange(steps - k)
        np.add.at(sums_TB, (t + k, t % bins), row[: steps - k])
    _, spanned_TB = np.linalg.qr(sums_TB)  # the sums in coordinates of their span
    half_squares_B = np.square(spanned_TB).sum(axis=0)[:, None] / 2

    def join(rng: Rng, y_TM: Floats) -> None:
        y_TM += spanned_TB[:, rng.integers(bins, size=y_TM.shape[1])]

    def log_ratio(y_TM: Floats) -> Floats:
        losses_BM = spanned_TB.T @ y_TM
        losses_BM -= half_squares_B
        losses_BM /= sigma * sigma
        return _log_sum(losses_BM) - math.log(bins)

    return LossSampler(len(spanned_TB), len(spanned_TB) * (_WORK + bins // 4), sigma, join, log_ratio)


def cyclic_poisson(event: SampledMatrixEvent, bands_KT: Floats, sigma: float) -> LossSampler:
    """Conditioned on the group, steps are independent, because their columns do not overlap."""
    groups, rate = event.cycle_length, event.sample_rate
    log_rest = math.log1p(-rate) if rate < 1 else -math.inf

    def join(rng: Rng, y_TM: Floats) -> None:
        size = y_TM.shape[1]
        at = np.asarray(rng.integers(groups, size=size) + groups * (rng.geometric(rate, size=size) - 1))
        _participate(y_TM, bands_KT, at, lambda count: groups * rng.geometric(rate, size=count))

    def log_ratio(y_TM: Floats) -> Floats:
        losses_TM = _step_losses(bands_KT, sigma, y_TM)
        for row in losses_TM:
            row += math.log(rate)
            _log_add(row, log_rest, row)
        runs_BM = np.array([losses_TM[group::groups].sum(axis=0) for group in range(groups)])
        return _log_sum(runs_BM) - math.log(groups)

    return LossSampler(event.steps, event.steps * (_WORK + len(bands_KT)), sigma, join, log_ratio)


def b_min_sep(event: SampledMatrixEvent, bands_KT: Floats, sigma: float) -> LossSampler:
    """Computed backwards from the last step: the future only depends on the remaining rest of the example."""
    steps, apart, rate = event.steps, event.cycle_length, event.sample_rate
    log_rest = math.log1p(-rate) if rate < 1 else -math.inf
    starts = 1 + (apart - 1) * rate  # an example is ready with probability 1 / starts, otherwise its rest is uniform

    def join(rng: Rng, y_TM: Floats) -> None:
        size = y_TM.shape[1]
        ready = np.zeros(size, dtype=np.int64)
        if event.warm_start and apart > 1:
            resting = rng.random(size) >= 1 / starts
            ready = np.where(resting, rng.integers(1, apart, size=size), 0)
        at = ready + rng.geometric(rate, size=size) - 1
        _participate(y_TM, bands_KT, at, lambda count: apart - 1 + rng.geometric(rate, size=count))

    def log_ratio(y_TM: Floats) -> Floats:
        losses_TM = _step_losses(bands_KT, sigma, y_TM) + math.log(rate)
        ahead_TM = np.zeros((steps + apart, y_TM.shape[1]))
        for t in range(steps - 1, -1, -1):
            losses_TM[t] += ahead_TM[t + apart]
            _log_add(losses_TM[t], ahead_TM[t + 1] + log_rest, ahead_TM[t])
        if not event.warm_start:
            return ahead_TM[0]
        ahead_TM[1:apart] += math.log(rate)
        return _log_sum(ahead_TM[:apart]) - math.log(starts)

    return LossSampler(steps, steps * (_WORK + len(bands_KT)), sigma, join, log_ratio)


_SAMPLERS = {"balls-in-bins": balls_in_bins, "cyclic-poisson": cyclic_poisson, "b-min-sep": b_min_sep}


def _participate(y_TM: Floats, bands_KT: Floats, at_M: Steps, gaps: Callable[[int], Steps]) -> None:
    """Adds the columns of all participations. The first of each sample is at ``at_M``; ``gaps`` draws gaps."""
    steps = len(y_TM)
    while (who := np.flatnonzero(at_M < steps)).size:
        at = at_M[who]
        for k, row in enumerate(bands_KT):
            y_TM[np.minimum(at + k, steps - 1), who] += row[at]  # beyond the run the entry is 0
        at_M[who] += gaps(len(who))


def _step_losses(bands_KT: Floats, sigma: float, y_TM: Floats) -> Floats:
    """Contribution of a single participation at each step: ``(2 <S_t, y> - |S_t|^2) / (2 sigma^2)``."""
    losses_TM = np.empty_like(y_TM)
    half_squares_T = np.square(bands_KT).sum(axis=0) / 2
    for t, half_square in enumerate(half_squares_T):
        within = y_TM[t : t + len(bands_KT)]
        np.dot(bands_KT[: len(within), t] / (sigma * sigma), within, out=losses_TM[t])
        losses_TM[t] -= half_square / (sigma * sigma)
    return losses_TM


def _log_add(one_M: Floats, other_M: Floats | float, out_M: Floats) -> None:
    """Computes ``log(e^one + e^other)``, several times as fast as ``np.logaddexp``."""
    apart_M = one_M - other_M
    np.maximum(one_M, other_M, out=out_M)
    np.abs(apart_M, out=apart_M)
    np.negative(apart_M, out=apart_M)
    np.exp(apart_M, out=apart_M)
    np.log1p(apart_M, out=apart_M)
    out_M += apart_M


def _log_sum(logs_BM: Floats) -> Floats:
    largest_M = logs_BM.max(axis=0)
    total_M: Floats = np.log(np.exp(logs_BM - largest_M).sum(axis=0))
    return total_M + largest_M
