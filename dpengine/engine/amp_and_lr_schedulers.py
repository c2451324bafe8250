"""Adapts loss scalers and learning-rate schedulers to private steps."""

from __future__ import annotations

import functools
from typing import Any

from torch import Tensor
from torch.amp.grad_scaler import GradScaler


def attach_scaler(scaler: GradScaler) -> None:
    """Freezes a GradScaler's scale, in place: it is divided out before clipping, and no step is ever skipped."""
    scaler.__class__ = _frozen_class(type(scaler))  # type: ignore[arg-type]


def attach_scheduler(scheduler: Any) -> None:
    """Makes a scheduler skip when its optimizer skipped, in place."""
    scheduler.__class__ = _skipping_class(type(scheduler))  # type: ignore[arg-type]


def detach(companion: Any) -> None:
    """Gives a scaler or scheduler its own class back."""
    companion.__class__ = getattr(type(companion), "dp_base", type(companion))


@functools.cache
def _frozen_class(base: type[GradScaler]) -> type[GradScaler]:
    members = {
        "dp_base": base,
        "__doc__": "A GradScaler whose scale is divided out before clipping and stays as it is.",
        "__module__": __name__,
        "__reduce_ex__": _reduce_to_base,
        "step": lambda self, optimizer, *args, **kwargs: optimizer.step(*args, **kwargs),
        "unscale_": lambda self, optimizer: None,
        "update": _update,
    }
    return type(f"DP{base.__name__}", (base,), members)


def _update(self: Any, new_scale: float | Tensor | None = None) -> None:
    """Does nothing: growth and backoff would follow from private gradients."""


@functools.cache
def _skipping_class(base: type[Any]) -> type[Any]:
    # A class and not a `step` on the instance: that would end up in the scheduler's state_dict.
    members = {
        "dp_base": base,
        "__doc__": f"{base.__name__} that does nothing after an optimizer step that only accumulated.",
        "__module__": __name__,
        "__reduce_ex__": _reduce_to_base,
        "step": _step_unless_skipped,
    }
    return type(f"DP{base.__name__}", (base,), members)


def _step_unless_skipped(self: Any, *args: Any, **kwargs: Any) -> None:
    if not getattr(self.optimizer, "step_was_skipped", False):
        self.dp_base.step(self, *args, **kwargs)


def _reduce_to_base(self: Any, protocol: Any) -> tuple[Any, ...]:
    """Copies and pickles are of the user's own class."""
    return _blank, (self.dp_base,), self.__getstate__()


def _blank(kind: type[Any]) -> Any:
    return object.__new__(kind)
