"""Grids of evenly spaced privacy losses."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from dpengine.accounting.discrete_losses import safe_reach


@dataclass
class Domain:
    """Grid of ``size`` evenly spaced points from ``t_min`` to ``t_max``.

    Args:
        t_min: First point.
        t_max: Last point.
        size: Number of points, even.
        shifts: Total distance by which the grid was shifted.

    Raises:
        TypeError: If ``size`` is not an int.
        ValueError: If ``size`` is odd.
    """

    t_min: float
    t_max: float
    size: int
    shifts: float = 0.0

    def __post_init__(self) -> None:
        if not isinstance(self.size, int):
            raise TypeError(f"size is a {type(self.size).__name__}. Pass an int.")
        if self.size % 2:
            raise ValueError(f"size={self.size} is odd. Pass an even number.")

    @classmethod
    def create_aligned(cls, t_min: float, t_max: float, dt: float) -> Domain:
        """Returns a grid of multiples of ``dt`` that covers ``t_min`` to ``t_max``."""
        first, last = math.floor(t_min / dt), math.ceil(t_max / dt)
        last += (last - first + 1) % 2
        return cls(first * dt, last * dt, last - first + 1)

    def shift_right(self, dt: float) -> Domain:
        """Returns the grid shifted by ``dt``."""
        return Domain(self.t_min + dt, self.t_max + dt, self.size, self.shifts + dt)

    @property
    def dt(self) -> float:
        """Spacing of the points."""
        return (self.t_max - self.t_min) / (self.size - 1)

    @property
    def ts(self) -> npt.NDArray[np.float64]:
        """The points ``(size,)``."""
        return np.linspace(self.t_min, self.t_max, self.size)

    def __getitem__(self, i: int) -> float:
        return self.t_min + i * self.dt


def compute_safe_domain_size(
    prvs: Sequence[Any], max_self_compositions: Sequence[int], eps_error: float, delta_error: float
) -> float:
    """Returns the largest absolute loss that a domain should include.

    Args:
        prvs: Subsampled Gaussian mechanisms.
        max_self_compositions: Number of compositions of each.
        eps_error: Width of the interval of epsilon.
        delta_error: Probability mass that may lie outside.
    """
    pairs = zip(prvs, max_self_compositions, strict=True)
    releases = [(prv.noise_multiplier, prv.sample_rate, int(count)) for prv, count in pairs]
    return safe_reach(releases, eps_error, delta_error)
