"""Accountant with privacy random variables (Gopi, Lee, Wutschitz 2021, arXiv:2106.02848), as a second opinion.

Each direction of the neighboring relation is composed over the complete run, and the larger result is returned, as an
interval that contains epsilon. The dominating pairs of releases are those of ``pld``; the lattice is independent of it.
Rounding errors of an FFT are absolute, so a delta that is not large compared with them raises an error.
"""

from __future__ import annotations

import functools
import math

import numpy as np

from dpengine.accounting import gdp
from dpengine.accounting.composition import Bounds, Composition
from dpengine.accounting.events import Relation
from dpengine.accounting.tilted_pld.loss_pairs import DIRECTIONS, LossPair
from dpengine.errors import AccountingRefusedError

from .prv_sum import LossSum, NoMeshError, Releases, Sketch, rounded_sum

_INITIAL_ACCURACY, _ACCURACY, _MAX_SHIFT = 5e-2, 1e-3, 5e-2
"""Relative errors of epsilon from rounding to the mesh: initial, final, and for the finest mesh that fits."""
_DELTA_ACCURACY = 5e-3  # relative error of delta from rounding to the mesh
_ERROR = 1e-3  # relative error of delta from windows and rounding
_MAX_ROUNDING = 1e-2  # maximum relative error of delta from floating-point rounding
_MAX_LOST = 1e-1  # maximum relative error of delta from windows
_MAX_KINDS = 64
_MIN_NOISE = 0.02  # below it, losses are in the thousands
_UNIT = 2.0**-53


def epsilon(composition: Composition, delta: float, relation: Relation) -> float:
    """Returns an upper bound on epsilon; exact without sampling. Raises if errors of rounding or mesh dominate."""
    return bounds(composition, delta, relation).upper


def bounds(composition: Composition, delta: float, relation: Relation) -> Bounds:
    """Returns a lower bound, an estimate and an upper bound of epsilon, which are equal without sampling.

    The interval has a relative width of about 0.2 %, or more if memory does not allow such a fine mesh.
    """
    if composition.non_private or composition.unsampled:
        return gdp.bounds(composition, delta, relation)
    return _bracket(composition, delta, relation)[0]


def spacing(composition: Composition, delta: float, relation: Relation) -> float | None:
    """Returns the spacing of the mesh of losses behind `epsilon`; None without a mesh."""
    if composition.non_private or composition.unsampled:
        return None
    return _bracket(composition, delta, relation)[1]


def delta(composition: Composition, epsilon: float, relation: Relation) -> float:
    """Returns an upper bound on delta; exact without sampling. Raises if errors of rounding or mesh dominate."""
    if composition.non_private or composition.unsampled:
        return gdp.delta(composition, epsilon, relation)
    return _delta(composition, epsilon, relation)


@functools.lru_cache(maxsize=32)
def _bracket(composition: Composition, delta: float, relation: Relation) -> tuple[Bounds, float]:
    """Returns the bounds, and the mesh spacing of the upper bound."""
    with np.errstate(all="ignore"):
        directions = [_DirectionBounds(releases, delta) for releases in _releases(composition, delta, relation)]
        for direction in directions:
            direction.refine(_INITIAL_ACCURACY * direction.scale)
        while True:
            worst = max(directions, key=lambda direction: direction.upper)
            if worst.upper <= 0:
                return Bounds(0.0, 0.0, 0.0), worst.loss_sum.step
            max_shift = _ACCURACY * max(worst.estimate, worst.upper / 4)
            if worst.loss_sum.is_finest or worst.max_shift <= 1.5 * max_shift:
                break
            worst.refine(max_shift)
    if worst.loss_sum.shift > _MAX_SHIFT * worst.upper:
        raise _unsupported(
            f"the finest mesh that fits moves an epsilon of {worst.upper:.3g} by {worst.loss_sum.shift:.2g}"
        )
    lower = max(direction.lower for direction in directions)
    estimate = max(direction.estimate for direction in directions)
    return Bounds(lower, estimate, worst.upper), worst.loss_sum.step


class _DirectionBounds:
    """Bounds on epsilon in one direction at one delta, which `refine` computes on a finer mesh."""

    loss_sum: LossSum
    lower: float
    estimate: float
    upper: float

    def __init__(self, releases: Releases, delta: float):
        self.delta = delta
        self.sketch = Sketch(releases, _ERROR * delta)
        self.scale = max(self.sketch.epsilon(delta), 0.05 * self.sketch.deviation)
        self.max_shift = math.inf

    def refine(self, max_shift: float) -> None:
        """Uses a mesh that changes epsilon by at most ``max_shift``, or the finest mesh that fits."""
        self.max_shift = max_shift
        self.loss_sum = _composed(self.sketch, max_shift)
        _check_errors(self.loss_sum, self.delta)
        self.lower, self.estimate, self.upper = self.loss_sum.bracket(self.delta)


@functools.lru_cache(maxsize=32)
def _delta(composition: Composition, epsilon: float, relation: Relation) -> float:
    with np.errstate(all="ignore"):
        estimates = [
            (releases, *Sketch(releases, 1e-12).log_delta(epsilon))
            for releases in _releases(composition, 1.0, relation)
        ]
        estimate = math.exp(min(0.0, max(log_delta for _, log_delta, _ in estimates)))
        if estimate < _UNIT:
            raise _unsupported(f"delta is about {estimate:.1g}, which is below the rounding error of an FFT")
        upper, lower, loss_sums = 0.0, 0.0, []
        for releases, _, slope in estimates:
            total = _composed(Sketch(releases, _ERROR / 10 * estimate), _DELTA_ACCURACY / slope)
            loss_sums.append(total)
            upper = max(upper, (total.delta(epsilon - total.shift) + total.absolute_error) * (1 + total.relative))
            lower = max(lower, total.delta(epsilon + total.shift) - total.absolute_error)
    for total in loss_sums:
        _check_errors(total, upper)
    if upper > 2 * lower:
        raise _unsupported(f"on the finest mesh that fits, delta is between {max(0.0, lower):.2g} and {upper:.2g}")
    return min(1.0, upper)


def _releases(composition: Composition, delta: float, relation: Relation) -> list[Releases]:
    """Returns all releases as pairs, for each direction."""
    composition.check_no_sampled_runs()
    composition.check_no_batch_events("prv")
    composition.check_no_selections()
    kinds = len(composition.sampled) + (composition.precision > 0)
    count = sum(group.count for group in composition.sampled) + (composition.precision > 0)
    smallest_noise = min(group.noise_multiplier for group in composition.sampled)
    if kinds > _MAX_KINDS:
        raise _unsupported(f"{kinds} distinct releases are more than the {_MAX_KINDS} that it composes")
    if smallest_noise < _MIN_NOISE:
        raise _unsupported(f"losses at noise_multiplier={smallest_noise:g} are too large for its mesh")
    if 2 * count * _UNIT > _MAX_ROUNDING * delta:
        raise _unsupported(f"the rounding of {count:,} releases is more than {_MAX_ROUNDING:.0%} of delta={delta:.2g}")
    releases: list[Releases] = []
    for direction in DIRECTIONS[relation]:
        pairs = [(LossPair(g.sample_rate, g.noise_multiplier, direction), g.count) for g in composition.sampled]
        if composition.precision > 0:
            pairs.append((LossPair(1.0, 1 / math.sqrt(composition.precision), direction), 1))
        releases.append(tuple(pairs))
    return releases


def _composed(sketch: Sketch, shift: float) -> LossSum:
    try:
        return rounded_sum(sketch, shift)
    except NoMeshError as error:
        raise _unsupported(str(error)) from None


def _check_errors(loss_sum: LossSum, delta: float) -> None:
    if loss_sum.rounding > _MAX_ROUNDING * delta:
        raise _unsupported(
            f"rounding may change probabilities by {loss_sum.rounding:.1g}, which is not small compared to {delta:.2g}"
        )
    if loss_sum.lost > _MAX_LOST * delta:
        raise _unsupported("the losses do not fit on its mesh")


def _unsupported(reason: str) -> AccountingRefusedError:
    return AccountingRefusedError(f"accountant 'prv' has no sound answer: {reason}.", fix="Use accountant='pld'.")
