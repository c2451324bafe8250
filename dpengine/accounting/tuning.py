"""Privacy cost of tuning, in which a mechanism runs a random number of times and the best result is published.

Source: Papernot, Steinke 2022 (arXiv:2110.03620), theorems 2 and 6. The number of runs has a truncated negative
binomial distribution (geometric for shape 1, logarithmic for shape 0) or a Poisson distribution. It must not depend on
the data, and only the best result may be published.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from dpengine.errors import InvalidBudgetError

from . import arguments
from .base_event import BaseEvent

Floats = npt.NDArray[np.float64]
_HALVINGS = 200


@dataclass(frozen=True)
class RepeatAndSelectEvent(BaseEvent):
    """Selection of the best of several runs of one mechanism.

    Attributes:
        base: Events of one run with their counts, none of them a `RepeatAndSelectEvent`.
        mean: Mean number of runs, at least 1. Below 1, the bound for Poisson would be negative.
        shape: Shape of the truncated negative binomial distribution, at least 0; infinity for Poisson.
    """

    base: tuple[tuple[Any, int], ...]
    mean: float
    shape: float = 1.0

    is_selection: ClassVar[bool] = True

    def __post_init__(self) -> None:
        object.__setattr__(self, "base", tuple((event, arguments.count("count", count)) for event, count in self.base))
        mean, shape = arguments.real("mean", self.mean), arguments.real("shape", self.shape)
        if not self.base or any(getattr(event, "is_selection", False) for event, _ in self.base):
            raise InvalidBudgetError(
                "RepeatAndSelectEvent.base must contain the events of one run, without a selection.",
                fix="Pass base=((PoissonGaussianEvent(0.01, 1.0), 1000),).",
            )
        if not (shape >= 0 and math.isfinite(mean) and mean >= 1):
            raise InvalidBudgetError(
                f"mean={mean!r} must be at least 1, and shape={shape!r} at least 0.",
                fix="Pass mean=10.0, shape=1.0.",
            )
        object.__setattr__(self, "mean", mean)
        object.__setattr__(self, "shape", shape)


def selected_rho(event: RepeatAndSelectEvent, orders: Floats, rho: Floats) -> Floats:
    """Returns the Renyi divergences of the published result."""
    if math.isinf(event.shape):
        return _poisson(event.mean, orders, rho)
    if event.mean == 1 and event.shape >= 0:
        return rho  # exactly one run
    gamma = _success(event.mean, event.shape)
    # The theorem has a second order, at which this term is smallest.
    at_second_order = (1 + event.shape) * (1 - 1 / orders) * rho + (1 + event.shape) * -math.log(gamma) / orders
    return np.asarray(rho + float(at_second_order.min()) + math.log(event.mean) / (orders - 1))


def _poisson(mean: float, orders: Floats, rho: Floats) -> Floats:
    """Returns the bound of theorem 6, with (eps, delta) of one run such that ``e^eps <= 1 + 1 / (order - 1)``."""
    epsilon = np.log1p(1 / (orders - 1))
    # Delta of one run at that epsilon, from its divergences (Canonne, Kamath, Steinke 2020, Prop. 12).
    exponents = (orders - 1) * (rho - epsilon[:, None] + np.log1p(-1 / orders)) - np.log(orders)
    delta = np.exp(np.minimum(0.0, exponents.min(axis=1)))
    return np.asarray(rho + mean * delta + math.log(mean) / (orders - 1))


def _success(mean: float, shape: float) -> float:
    """Returns the success probability of the distribution with this mean, rounded down."""
    low, high = 0.0, 1.0  # the mean decreases with the probability
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        if not low < middle < high:
            break
        low, high = (middle, high) if _mean(middle, shape) > mean else (low, middle)
    return max(low, 1e-300)


def _mean(gamma: float, shape: float) -> float:
    if shape == 0:
        return (1 / gamma - 1) / -math.log(gamma)
    return shape * (1 - gamma) / gamma / -math.expm1(shape * math.log(gamma))
