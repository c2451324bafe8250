"""Privacy random variables: the composition of Gopi, Lee, Wutschitz 2021 (arXiv:2106.02848), as a second opinion.

Each direction of the neighboring relation is composed over the complete run, and the worse one determines the result,
which is an interval that contains epsilon. It uses the same dominating pairs of a release as ``pld``, but neither its
lattice nor its tilt. Rounding errors of an FFT are absolute, so a delta that is not large compared with them raises an
error.
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

_ROUGHLY, _ACCURACY, _WORST = 5e-2, 1e-3, 5e-2
"""Relative errors of epsilon from rounding to the mesh: initial, final, and for the finest mesh that fits."""
_DELTA_ACCURACY = 5e-3  # relative error of delta from that rounding
_ERROR = 1e-3  # relative error of delta from windows and rounding
_MOST_ROUNDING = 1e-2  # maximum relative error of delta from floating-point rounding
_MOST_LOST = 1e-1  # maximum relative error of delta from windows
_MOST_KINDS = 64
_MIN_NOISE = 0.02  # below it, losses are in the thousands
_UNIT = 2.0**-53


def epsilon(composition: Composition, delta: float, relation: Relation) -> float:
    """Upper bound on epsilon; exact without sampling. Raises if rounding or the mesh would dominate."""
    return bounds(composition, delta, relation).upper


def bounds(composition: Composition, delta: float, relation: Relation) -> Bounds:
    """Lower bound, estimate and upper bound of epsilon. Without sampling all three are equal.

    The interval has a relative width of about 0.2 %, or more if memory does not allow such a fine mesh.
    """
    if composition.non_private or composition.unsampled:
        return gdp.bounds(composition, delta, relation)
    return _bracket(composition, delta, relation)[0]


def spacing(composition: Composition, delta: float, relation: Relation) -> float | None:
    """Spacing of the mesh of losses behind `epsilon`; None without a mesh."""
    if composition.non_private or composition.unsampled:
        return None
    return _bracket(composition, delta, relation)[1]


def delta(composition: Composition, epsilon: float, relation: Relation) -> float:
    """Upper bound on delta; exact without sampling. Raises if rounding or the mesh would dominate."""
    if composition.non_private or composition.unsampled:
        return gdp.delta(composition, epsilon, relation)
    return _delta(composition, epsilon, relation)


@functools.lru_cache(maxsize=32)
def _bracket(composition: Composition, delta: float, relation: Relation) -> tuple[Bounds, float]:
    """Returns the bounds, and the mesh spacing of the upper one."""
    with np.errstate(all="ignore"):
        questions = [_Question(releases, delta) for releases in _releases(composition, delta, relation)]
        for question in questions:
            question.refine(_ROUGHLY * question.scale)
        while True:
            worst = max(questions, key=lambda question: question.upper)
            if worst.upper <= 0:
                return Bounds(0.0, 0.0, 0.0), worst.law.step
            aim = _ACCURACY * max(worst.about, worst.upper / 4)
            if worst.law.finest or worst.aim <= 1.5 * aim:
                break
            worst.refine(aim)
    if worst.law.shift > _WORST * worst.upper:
        raise _unsupported(f"the finest mesh that fits moves an epsilon of {worst.upper:.3g} by {worst.law.shift:.2g}")
    lower, about = max(question.lower for question in questions), max(question.about for question in questions)
    return Bounds(lower, about, worst.upper), worst.law.step


class _Question:
    """Epsilon of one direction at one delta, on successively finer meshes."""

    law: LossSum
    lower: float
    about: float
    upper: float

    def __init__(self, releases: Releases, delta: float):
        self.delta = delta
        self.sketch = Sketch(releases, _ERROR * delta)
        self.scale = max(self.sketch.epsilon(delta), 0.05 * self.sketch.deviation)
        self.aim = math.inf

    def refine(self, aim: float) -> None:
        """Rounds to a mesh that changes epsilon by at most ``aim``, or to the finest that fits."""
        self.aim = aim
        self.law = _composed(self.sketch, aim)
        _check_errors(self.law, self.delta)
        self.lower, self.about, self.upper = self.law.bracket(self.delta)


@functools.lru_cache(maxsize=32)
def _delta(composition: Composition, epsilon: float, relation: Relation) -> float:
    with np.errstate(all="ignore"):
        found = [
            (releases, *Sketch(releases, 1e-12).log_delta(epsilon))
            for releases in _releases(composition, 1.0, relation)
        ]
        about = math.exp(min(0.0, max(log_delta for _, log_delta, _ in found)))
        if about < _UNIT:
            raise _unsupported(f"delta is about {about:.1g}, which the rounding of an FFT hides")
        upper, lower, laws = 0.0, 0.0, []
        for releases, _, slope in found:
            law = _composed(Sketch(releases, _ERROR / 10 * about), _DELTA_ACCURACY / slope)
            laws.append(law)
            upper = max(upper, (law.delta(epsilon - law.shift) + law.doubt) * (1 + law.relative))
            lower = max(lower, law.delta(epsilon + law.shift) - law.doubt)
    for law in laws:
        _check_errors(law, upper)
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
    least = min(group.noise_multiplier for group in composition.sampled)
    if kinds > _MOST_KINDS:
        raise _unsupported(f"{kinds} distinct releases are more than the {_MOST_KINDS} that it composes")
    if least < _MIN_NOISE:
        raise _unsupported(f"losses at noise_multiplier={least:g} are too large for its mesh")
    if 2 * count * _UNIT > _MOST_ROUNDING * delta:
        raise _unsupported(f"the rounding of {count:,} releases is more than {_MOST_ROUNDING:.0%} of delta={delta:.2g}")
    found = []
    for direction in DIRECTIONS[relation]:
        pairs = [(LossPair(g.sample_rate, g.noise_multiplier, direction), g.count) for g in composition.sampled]
        if composition.precision > 0:
            pairs.append((LossPair(1.0, 1 / math.sqrt(composition.precision), direction), 1))
        found.append(tuple(pairs))
    return found


def _composed(sketch: Sketch, shift: float) -> LossSum:
    try:
        return rounded_sum(sketch, shift)
    except NoMeshError as error:
        raise _unsupported(str(error)) from None


def _check_errors(law: LossSum, delta: float) -> None:
    if law.rounding > _MOST_ROUNDING * delta:
        raise _unsupported(
            f"rounding may change probabilities by {law.rounding:.1g}, which is not small compared with {delta:.2g}"
        )
    if law.lost > _MOST_LOST * delta:
        raise _unsupported("the losses do not fit on its mesh")


def _unsupported(reason: str) -> AccountingRefusedError:
    return AccountingRefusedError(f"accountant 'prv' has no sound answer: {reason}.", fix="Use accountant='pld'.")
