"""Schedulers of the noise multiplier."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from dpengine.engine.schedulers import NOISE_MULTIPLIER, by_factor, value_of
from dpengine.errors import keyword_hints

from .by_epoch import ByEpoch, Exponential, Step


@keyword_hints
class _NoiseScheduler(ByEpoch):
    """Base class of noise multiplier schedulers. The constructor advances to epoch ``last_epoch + 1``.

    Args:
        optimizer: The private optimizer, or any object with a ``noise_multiplier``.
        last_epoch: The epoch before the first one.

    Raises:
        ValueError: If the optimizer has no ``noise_multiplier``, or is given a value out of range.
    """

    setting = NOISE_MULTIPLIER
    getter = "get_noise_multiplier"

    def get_noise_multiplier(self) -> float:
        """Returns the value of epoch ``last_epoch``. Subclasses define it."""
        return self._next()


@keyword_hints
class ExponentialNoise(Exponential, _NoiseScheduler):
    """Multiplies the noise multiplier by ``gamma`` each epoch."""


@keyword_hints
class LambdaNoise(_NoiseScheduler):
    """Sets the noise multiplier to its initial value times a function of the epoch.

    Args:
        optimizer: The private optimizer.
        noise_lambda: Function from the epoch to the factor.
        last_epoch: The epoch before the first one.
    """

    def __init__(self, optimizer: Any, *, noise_lambda: Callable[[int], float], last_epoch: int = -1):
        by_factor(noise_lambda)
        self.noise_lambda = noise_lambda
        self.base_noise_multiplier = value_of(optimizer, NOISE_MULTIPLIER)
        super().__init__(optimizer, last_epoch=last_epoch)

    def _next(self) -> float:
        return by_factor(self.noise_lambda)(self.base_noise_multiplier, self.base_noise_multiplier, self.last_epoch)


@keyword_hints
class StepNoise(Step, _NoiseScheduler):
    """Multiplies the noise multiplier by ``gamma`` every ``step_size`` epochs."""
