"""What people keep beside the optimizer: loss scalers and learning-rate schedulers, made to fit private steps."""

from __future__ import annotations

import functools
from typing import Any

from torch import Tensor
from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer


def attach_scaler(scaler: GradScaler) -> None:
    """Freezes a GradScaler's scale, in place: it is divided out before clipping, and no step is ever skipped."""
    scaler.__class__ = _frozen_class(type(scaler))


def detach_scaler(scaler: GradScaler) -> None:
    """Gives a scaler its own class back."""
    base = getattr(type(scaler), "dp_base", None)
    if base is not None:
        scaler.__class__ = base


@functools.cache
def _frozen_class(base: type[GradScaler]) -> type[GradScaler]:
    members = {
        "dp_base": base,
        "__doc__": "A GradScaler whose scale is divided out before clipping and stays as it is.",
        "step": lambda self, optimizer, *args, **kwargs: optimizer.step(*args, **kwargs),
        "unscale_": lambda self, optimizer: None,
        "update": _update,
    }
    return type(f"DP{base.__name__}", (base,), members)


def _update(self: Any, new_scale: float | Tensor | None = None) -> None:
    """Does nothing: growth and backoff would follow from private gradients."""


class SkippingStep:
    """Stands in the ``step`` slot of a scheduler: does nothing after an optimizer step that only accumulated."""

    def __init__(self, scheduler: Any, optimizer: Optimizer):
        self.scheduler = scheduler
        self.optimizer = optimizer

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        if not getattr(self.optimizer, "step_was_skipped", False):
            type(self.scheduler).step(self.scheduler, *args, **kwargs)


def attach_scheduler(scheduler: Any, optimizer: Optimizer) -> None:
    """Makes a scheduler skip when its optimizer skipped."""
    scheduler.__dict__["step"] = SkippingStep(scheduler, optimizer)


def detach_scheduler(scheduler: Any) -> None:
    """Gives a scheduler its own step back."""
    if isinstance(scheduler.__dict__.get("step"), SkippingStep):
        del scheduler.__dict__["step"]
