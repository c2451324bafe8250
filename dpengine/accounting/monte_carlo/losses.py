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
"""Number of elements of a chunk of samples, over all steps."""
_MAX_ENTRIES = 2**25  # maximum number of entries of a strategy
_WORK = 40  # nanoseconds per row of an output, without multiplications


@dataclass(frozen=True)
class LossSampler:
    """Draws privacy losses.

    Attributes:
        rows: Number of elements of one output.
        work: Approximate duration of one sample of both directions, in nanoseconds.
        sigma: Standard deviation of the noise.
        add_participations: Adds ``S u`` to outputs (T, M), with new u for each sample.
        log_ratio: Returns ``log dP/dQ`` of outputs (T, M).
    """

    rows: int
    work: int
    sigma: float
    add_participations: Callable[[Rng, Floats], None]
    log_ratio: Callable[[Floats], Floats]

    def draw(self, samples: int, seed: int) -> tuple[Floats, Floats]:
        """Returns losses for removing and for adding an example, ``(samples,)`` each.

        Both directions use the same noise. The samples of each direction are independent.
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
                self.add_participations(rng, noise_TM)
                remove[part] = self.log_ratio(noise_TM)
        if not (np.isfinite(remove).all() and np.isfinite(add).all()):
            raise AccountingRefusedError("The noise multiplier is so small that losses overflow.")
        return remove, add


def loss_sampler(event: SampledMatrixEvent) -> LossSampler:
    """Returns the sampler of a run. Raises if its strategy would need too much memory."""
    entries = event.steps * (event.cycle_length if event.scheme == "balls-in-bins" else event.bands)
    if entries > _MAX_ENTRIES:
        raise AccountingRefusedError(
            f"A {event.scheme} run of {event.steps:,} steps has {entries:,} entries: too many to simulate.",
            fix="Use MatrixGaussianEvent, which does not use amplification.",
        )
    bands_KT = _bands(event)
    sigma = event.noise_multiplier * math.sqrt(float(np.square(bands_KT).sum(axis=0).max()))
    return _SAMPLERS[event.scheme](event, bands_KT, sigma)


def _bands(event: SampledMatrixEvent) -> Floats:
    """Returns the bands of the strategy: ``[k, i]`` is ``S[i + k, i]``, and 0 beyond the run."""
    steps = event.steps
    bands_KT = np.zeros((event.bands, steps))
    for k in range(event.bands):
        bands_KT[k, : steps - k] = (
            event.coefficients[k] if event.coefficients else [event.columns[i][i + k] for i in range(steps - k)]
        )
    return bands_KT


def balls_in_bins(event: SampledMatrixEvent, bands_KT: Floats, sigma: float) -> LossSampler:
    """Returns a sampler with the summed columns of each bin. Outputs are drawn in the span of these sums only."""
    bins, steps = event.cycle_length, event.steps
    sums_TB = np.zeros((steps, bins))
    for k, row in enumerate(bands_KT):
        t = np.arange(steps - k)
        np.add.at(sums_TB, (t + k, t % bins), row[: steps - k])
    _, spanned_TB = np.linalg.qr(sums_TB)  # the sums in coordinates of their span
    half_squares_B = np.square(spanned_TB).sum(axis=0)[:, None] / 2

    def add_participations(rng: Rng, y_TM: Floats) -> None:
        y_TM += spanned_TB[:, rng.integers(bins, size=y_TM.shape[1])]

    def log_ratio(y_TM: Floats) -> Floats:
        losses_BM = spanned_TB.T @ y_TM
        losses_BM -= half_squares_B
        losses_BM /= sigma * sigma
        return _log_sum(losses_BM) - math.log(bins)

    return LossSampler(len(spanned_TB), len(spanned_TB) * (_WORK + bins // 4), sigma, add_participations, log_ratio)


def cyclic_poisson(event: SampledMatrixEvent, bands_KT: Floats, sigma: float) -> LossSampler:
    """Returns a sampler of steps that are independent given the group, because their columns do not overlap."""
    groups, rate = event.cycle_length, event.sample_rate
    log_absent = math.log1p(-rate) if rate < 1 else -math.inf

    def add_participations(rng: Rng, y_TM: Floats) -> None:
        size = y_TM.shape[1]
        first = np.asarray(rng.integers(groups, size=size) + groups * (rng.geometric(rate, size=size) - 1))
        _participate(y_TM, bands_KT, first, lambda count: groups * rng.geometric(rate, size=count))

    def log_ratio(y_TM: Floats) -> Floats:
        losses_TM = _step_losses(bands_KT, sigma, y_TM)
        for row in losses_TM:
            row += math.log(rate)
            _log_add(row, log_absent, row)
        runs_BM = np.array([losses_TM[group::groups].sum(axis=0) for group in range(groups)])
        return _log_sum(runs_BM) - math.log(groups)

    return LossSampler(event.steps, event.steps * (_WORK + len(bands_KT)), sigma, add_participations, log_ratio)


def b_min_sep(event: SampledMatrixEvent, bands_KT: Floats, sigma: float) -> LossSampler:
    """Returns a sampler whose ratio is computed backwards: the future only depends on the remaining waiting time."""
    steps, separation, rate = event.steps, event.cycle_length, event.sample_rate
    log_absent = math.log1p(-rate) if rate < 1 else -math.inf
    # With a warm start, the waiting time is 0 with probability 1 / starts, and otherwise uniform.
    starts = 1 + (separation - 1) * rate

    def add_participations(rng: Rng, y_TM: Floats) -> None:
        size = y_TM.shape[1]
        waiting_time = np.zeros(size, dtype=np.int64)
        if event.warm_start and separation > 1:
            is_waiting = rng.random(size) >= 1 / starts
            waiting_time = np.where(is_waiting, rng.integers(1, separation, size=size), 0)
        first = waiting_time + rng.geometric(rate, size=size) - 1
        _participate(y_TM, bands_KT, first, lambda count: separation - 1 + rng.geometric(rate, size=count))

    def log_ratio(y_TM: Floats) -> Floats:
        losses_TM = _step_losses(bands_KT, sigma, y_TM) + math.log(rate)
        future_TM = np.zeros((steps + separation, y_TM.shape[1]))  # log ratio of the steps from t on, if not waiting
        for t in range(steps - 1, -1, -1):
            losses_TM[t] += future_TM[t + separation]
            _log_add(losses_TM[t], future_TM[t + 1] + log_absent, future_TM[t])
        if not event.warm_start:
            return future_TM[0]
        future_TM[1:separation] += math.log(rate)
        return _log_sum(future_TM[:separation]) - math.log(starts)

    return LossSampler(steps, steps * (_WORK + len(bands_KT)), sigma, add_participations, log_ratio)


_SAMPLERS = {"balls-in-bins": balls_in_bins, "cyclic-poisson": cyclic_poisson, "b-min-sep": b_min_sep}


def _participate(y_TM: Floats, bands_KT: Floats, step_M: Steps, draw_gaps: Callable[[int], Steps]) -> None:
    """Adds the columns of all participations. ``step_M`` is the first step of each sample, and is overwritten."""
    steps = len(y_TM)
    while (samples := np.flatnonzero(step_M < steps)).size:
        t = step_M[samples]
        for k, band_T in enumerate(bands_KT):
            y_TM[np.minimum(t + k, steps - 1), samples] += band_T[t]  # beyond the run, the entry is 0
        step_M[samples] += draw_gaps(len(samples))


def _step_losses(bands_KT: Floats, sigma: float, y_TM: Floats) -> Floats:
    """Returns the log ratio of one participation at each step: ``(2 <S_t, y> - |S_t|^2) / (2 sigma^2)``."""
    losses_TM = np.empty_like(y_TM)
    half_squares_T = np.square(bands_KT).sum(axis=0) / 2
    for t, half_square in enumerate(half_squares_T):
        within = y_TM[t : t + len(bands_KT)]
        np.dot(bands_KT[: len(within), t] / (sigma * sigma), within, out=losses_TM[t])
        losses_TM[t] -= half_square / (sigma * sigma)
    return losses_TM


def _log_add(first_M: Floats, second_M: Floats | float, out_M: Floats) -> None:
    """Computes ``log(e^first + e^second)``, several times faster than ``np.logaddexp``."""
    difference_M = first_M - second_M
    np.maximum(first_M, second_M, out=out_M)
    np.abs(difference_M, out=difference_M)
    np.negative(difference_M, out=difference_M)
    np.exp(difference_M, out=difference_M)
    np.log1p(difference_M, out=difference_M)
    out_M += difference_M


def _log_sum(logs_BM: Floats) -> Floats:
    largest_M = logs_BM.max(axis=0)
    total_M: Floats = np.log(np.exp(logs_BM - largest_M).sum(axis=0))
    return total_M + largest_M
