"""Adapts loss scalers and learning-rate schedulers to private steps."""

from __future__ import annotations

import functools
from typing import Any

from torch import Tensor
from torch.amp.grad_scaler import GradScaler


def attach_scaler(scaler: GradScaler) -> None:
    """Makes the scale of a GradScaler constant, in place. Clipping divides by the scale, and no step is skipped."""
    scaler.__class__ = _frozen_class(type(scaler))  # type: ignore[arg-type]


def attach_scheduler(scheduler: Any) -> None:
    """Makes ``step`` of a scheduler do nothing after a skipped step of its optimizer, in place."""
    scheduler.__class__ = _skipping_class(type(scheduler))  # type: ignore[arg-type]


def detach(attached: Any) -> None:
    """Restores the original class of a scaler or scheduler."""
    attached.__class__ = getattr(type(attached), "dp_base", type(attached))


@functools.cache
def _frozen_class(base: type[GradScaler]) -> type[GradScaler]:
    members = {
        "dp_base": base,
        "__doc__": "A GradScaler with a constant scale. Clipping divides by the scale.",
        "__module__": __name__,
        "__reduce_ex__": _reduce_to_base,
        "step": lambda self, optimizer, *args, **kwargs: optimizer.step(*args, **kwargs),
        "unscale_": lambda self, optimizer: None,
        "update": _update,
    }
    return type(f"DP{base.__name__}", (base,), members)


def _update(self: Any, new_scale: float | Tensor | None = None) -> None:
    """Does nothing: growth and backoff would depend on private gradients."""


@functools.cache
def _skipping_class(base: type[Any]) -> type[Any]:
    # A subclass, because a `step` attribute of the instance would be saved in the scheduler's state_dict.
    members = {
        "dp_base": base,
        "__doc__": f"{base.__name__} that ignores optimizer steps that only accumulate.",
        "__module__": __name__,
        "__reduce_ex__": _reduce_to_base,
        "step": _step_unless_skipped,
    }
    return type(f"DP{base.__name__}", (base,), members)


def _step_unless_skipped(self: Any, *args: Any, **kwargs: Any) -> None:
    if not getattr(self.optimizer, "step_was_skipped", False):
        self.dp_base.step(self, *args, **kwargs)


def _reduce_to_base(self: Any, protocol: Any) -> tuple[Any, ...]:
    """Makes copies and pickles instances of the original class."""
    return _new_instance, (self.dp_base,), self.__getstate__()


def _new_instance(kind: type[Any]) -> Any:
    return object.__new__(kind)
