"""Schedulers of the clipping norm."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from dpengine.engine.schedulers import MAX_GRAD_NORM, by_factor, value_of
from dpengine.errors import keyword_hints

from .by_epoch import ByEpoch, Exponential, Step


@keyword_hints
class _GradClipScheduler(ByEpoch):
    """Base class of clipping norm schedulers. The constructor takes the first step, to ``last_epoch + 1``.

    Args:
        optimizer: The private optimizer, or any object with a ``max_grad_norm``.
        last_epoch: The epoch before the first one.

    Raises:
        ValueError: If the optimizer has no ``max_grad_norm``, or is given a value out of range.
    """

    setting = MAX_GRAD_NORM
    getter = "get_max_grad_norm"

    def get_max_grad_norm(self) -> float:
        """Returns the value of epoch ``last_epoch``. Subclasses define it."""
        return self._next()


@keyword_hints
class ExponentialGradClip(Exponential, _GradClipScheduler):
    """Multiplies the clipping norm by ``gamma`` each epoch."""


@keyword_hints
class LambdaGradClip(_GradClipScheduler):
    """Multiplies the clipping norm at construction by a function of the epoch.

    Args:
        optimizer: The private optimizer.
        scheduler_function: Function from the epoch to the factor.
        last_epoch: The epoch before the first one.
    """

    def __init__(self, optimizer: Any, *, scheduler_function: Callable[[int], float], last_epoch: int = -1):
        by_factor(scheduler_function)
        self.scheduler_function = scheduler_function
        self.base_max_grad_norm = value_of(optimizer, MAX_GRAD_NORM)
        super().__init__(optimizer, last_epoch=last_epoch)

    def _next(self) -> float:
        return by_factor(self.scheduler_function)(self.base_max_grad_norm, self.base_max_grad_norm, self.last_epoch)


@keyword_hints
class StepGradClip(Step, _GradClipScheduler):
    """Multiplies the clipping norm by ``gamma`` every ``step_size`` epochs."""
