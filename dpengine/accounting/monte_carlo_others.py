"""The privacy curve of what was released beside a simulated run, ready to be asked at millions of losses."""

from __future__ import annotations

import dataclasses
import functools

import numpy as np

from . import pld
from .composition import Composition
from .events import Relation
from .monte_carlo_losses import Floats
from .monte_carlo_tally import Curve, alone

_POINTS = 48


@functools.lru_cache(maxsize=8)
def curve_of(composition: Composition, relation: Relation, tail: float) -> tuple[Curve, float]:
    """The curve of a history without its simulated runs.

    Args:
        composition: The history.
        relation: The neighbouring relation.
        tail: A delta that need not be told from 0.

    Returns:
        An upper bound on the curve, and where it has come down to ``tail``.
    """
    rest = dataclasses.replace(composition, runs=())
    if rest.empty:
        return alone, 0.0
    end = pld.epsilon(rest, tail, relation)
    points = np.linspace(0.0, max(end, 1e-9), _POINTS)
    deltas = np.append([pld.delta(rest, float(point), relation) for point in points[:-1]], tail)
    deltas = np.minimum.accumulate(deltas)

    def above(epsilons: Floats) -> Floats:
        """Delta is convex in ``e^epsilon``, so chords lie above it; from ``end`` on it is at most ``tail``."""
        cell = np.minimum(np.searchsorted(points, epsilons, side="right") - 1, _POINTS - 2)
        along = np.expm1(np.minimum(epsilons, points[-1]) - points[cell]) / np.expm1(points[cell + 1] - points[cell])
        found: Floats = deltas[cell] + (deltas[cell + 1] - deltas[cell]) * np.clip(along, 0.0, 1.0)
        return found

    def curve(epsilons: Floats) -> Floats:
        # For a = e^epsilon below 1: H_a(P, Q) = 1 - a + a H_{1/a}(Q, P), and the curve bounds both directions.
        below = epsilons < 0
        a = np.exp(np.minimum(epsilons, 0.0))
        found = above(np.abs(epsilons))
        return np.where(below, 1 - a + a * found, found)

    return curve, float(end)
