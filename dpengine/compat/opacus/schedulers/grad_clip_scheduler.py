"""Schedulers of the clipping threshold."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from dpengine.engine.schedulers import MAX_GRAD_NORM, by_factor, exponential, in_steps, value_of
from dpengine.errors import suggests_names

from .by_epoch import ByEpoch


@suggests_names
class _GradClipScheduler(ByEpoch):
    """Base of clipping threshold schedulers: a subclass says in ``get_max_grad_norm`` what each epoch gets.

    To make a scheduler is to take its first step, to ``last_epoch + 1``.

    Args:
        optimizer: The private optimizer, or any object with a ``max_grad_norm``.
        last_epoch: The epoch before the first one.

    Raises:
        ValueError: If the optimizer has no ``max_grad_norm``, or is given a value out of range.
    """

    setting = MAX_GRAD_NORM
    says = "get_max_grad_norm"

    def get_max_grad_norm(self) -> float:
        """The value of epoch ``last_epoch``, for subclasses to say."""
        return self._unsaid()


@suggests_names
class ExponentialGradClip(_GradClipScheduler):
    """Multiplies the clipping threshold by ``gamma`` each epoch.

    Args:
        optimizer: The private optimizer.
        gamma: The factor; not negative.
        last_epoch: The epoch before the first one.
    """

    def __init__(self, optimizer: Any, *, gamma: float, last_epoch: int = -1):
        exponential(gamma)
        self.gamma = gamma
        super().__init__(optimizer, last_epoch=last_epoch)

    def get_max_grad_norm(self) -> float:
        """The value in force times ``gamma``, but for epoch 0."""
        value = self.optimizer.max_grad_norm
        return exponential(self.gamma)(value, value, self.last_epoch)


@suggests_names
class LambdaGradClip(_GradClipScheduler):
    """Multiplies the clipping threshold that the optimizer has now by what a function says of the epoch.

    Args:
        optimizer: The private optimizer.
        scheduler_function: From the epoch to the factor.
        last_epoch: The epoch before the first one.
    """

    def __init__(self, optimizer: Any, *, scheduler_function: Callable[[int], float], last_epoch: int = -1):
        by_factor(scheduler_function)
        self.scheduler_function = scheduler_function
        self.base_max_grad_norm = value_of(optimizer, MAX_GRAD_NORM)
        super().__init__(optimizer, last_epoch=last_epoch)

    def get_max_grad_norm(self) -> float:
        """The value at construction times the function's factor."""
        return by_factor(self.scheduler_function)(
            self.optimizer.max_grad_norm, self.base_max_grad_norm, self.last_epoch
        )


@suggests_names
class StepGradClip(_GradClipScheduler):
    """Multiplies the clipping threshold by ``gamma`` every ``step_size`` epochs.

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

    def get_max_grad_norm(self) -> float:
        """The value in force, times ``gamma`` in the epochs that ``step_size`` divides, but for epoch 0."""
        value = self.optimizer.max_grad_norm
        return in_steps(self.step_size, self.gamma)(value, value, self.last_epoch)
