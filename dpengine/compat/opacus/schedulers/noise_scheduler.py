"""Schedulers of the noise multiplier."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from dpengine.engine.schedulers import NOISE_MULTIPLIER, by_factor, exponential, in_steps, value_of
from dpengine.errors import suggests_names

from .by_epoch import ByEpoch


@suggests_names
class _NoiseScheduler(ByEpoch):
    """Base of noise multiplier schedulers: a subclass says in ``get_noise_multiplier`` what each epoch gets.

    To make a scheduler is to take its first step, to ``last_epoch + 1``.

    Args:
        optimizer: The private optimizer, or any object with a ``noise_multiplier``.
        last_epoch: The epoch before the first one.

    Raises:
        ValueError: If the optimizer has no ``noise_multiplier``, or is given a value out of range.
    """

    setting = NOISE_MULTIPLIER
    says = "get_noise_multiplier"

    def get_noise_multiplier(self) -> float:
        """The value of epoch ``last_epoch``, for subclasses to say."""
        return self._unsaid()


@suggests_names
class ExponentialNoise(_NoiseScheduler):
    """Multiplies the noise multiplier by ``gamma`` each epoch.

    Args:
        optimizer: The private optimizer.
        gamma: The factor; not negative.
        last_epoch: The epoch before the first one.
    """

    def __init__(self, optimizer: Any, *, gamma: float, last_epoch: int = -1):
        exponential(gamma)
        self.gamma = gamma
        super().__init__(optimizer, last_epoch=last_epoch)

    def get_noise_multiplier(self) -> float:
        """The value in force times ``gamma``, but for epoch 0."""
        value = self.optimizer.noise_multiplier
        return exponential(self.gamma)(value, value, self.last_epoch)


@suggests_names
class LambdaNoise(_NoiseScheduler):
    """Multiplies the noise multiplier that the optimizer has now by what a function says of the epoch.

    Args:
        optimizer: The private optimizer.
        noise_lambda: From the epoch to the factor.
        last_epoch: The epoch before the first one.
    """

    def __init__(self, optimizer: Any, *, noise_lambda: Callable[[int], float], last_epoch: int = -1):
        by_factor(noise_lambda)
        self.noise_lambda = noise_lambda
        self.base_noise_multiplier = value_of(optimizer, NOISE_MULTIPLIER)
        super().__init__(optimizer, last_epoch=last_epoch)

    def get_noise_multiplier(self) -> float:
        """The value at construction times the function's factor."""
        return by_factor(self.noise_lambda)(
            self.optimizer.noise_multiplier, self.base_noise_multiplier, self.last_epoch
        )


@suggests_names
class StepNoise(_NoiseScheduler):
    """Multiplies the noise multiplier by ``gamma`` every ``step_size`` epochs.

    Args:
        optimizer: The private optimizer.
        step_size: Epochs from one change to the next.
        gamma: The factor; not negative.
        last_epoch: The epoch before the first one.
    """

    def __init__(self, optimizer: Any, *, step_size: int, gamma: float, last_epoch: int = -1):
        in_steps(step_size, gamma)
        self.step_size = step_size
        self.gamma = gamma
        super().__init__(optimizer, last_epoch=last_epoch)

    def get_noise_multiplier(self) -> float:
        """The value in force, times ``gamma`` in the epochs that ``step_size`` divides, but for epoch 0."""
        value = self.optimizer.noise_multiplier
        return in_steps(self.step_size, self.gamma)(value, value, self.last_epoch)
