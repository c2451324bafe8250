"""dpengine: PyTorch training with differential privacy, in the loop that you already have."""

from __future__ import annotations

import importlib
import logging
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dpengine.accounting import calibrate
    from dpengine.clipping import Adaptive, Automatic, Flat, Groups, PerLayer, PerSampleGradientClipper
    from dpengine.engine import PrivacyEngine
    from dpengine.errors import PrivacyWarning
    from dpengine.grad_sample_module import GradSampleModule
    from dpengine.grad_samplers import register_grad_sampler, register_norm_sampler
    from dpengine.optimizer import detach
    from dpengine.validation import check, check_loss, fix

__version__ = "0.1.0"

_HOMES = {
    "Adaptive": "dpengine.clipping",
    "Automatic": "dpengine.clipping",
    "Flat": "dpengine.clipping",
    "GradSampleModule": "dpengine.grad_sample_module",
    "Groups": "dpengine.clipping",
    "PerLayer": "dpengine.clipping",
    "PerSampleGradientClipper": "dpengine.clipping",
    "PrivacyEngine": "dpengine.engine",
    "PrivacyWarning": "dpengine.errors",
    "calibrate": "dpengine.accounting",
    "check": "dpengine.validation",
    "check_loss": "dpengine.validation",
    "detach": "dpengine.optimizer",
    "fix": "dpengine.validation",
    "register_grad_sampler": "dpengine.grad_samplers",
    "register_norm_sampler": "dpengine.grad_samplers",
}

__all__ = [
    "Adaptive",
    "Automatic",
    "Flat",
    "GradSampleModule",
    "Groups",
    "PerLayer",
    "PerSampleGradientClipper",
    "PrivacyEngine",
    "PrivacyWarning",
    "calibrate",
    "check",
    "check_loss",
    "detach",
    "fix",
    "register_grad_sampler",
    "register_norm_sampler",
]

logging.getLogger(__name__).addHandler(logging.NullHandler())


if not TYPE_CHECKING:  # a type checker would take any name for known

    def __getattr__(name: str) -> Any:
        if name not in _HOMES:
            raise AttributeError(f"module 'dpengine' has no attribute {name!r}")
        value = globals()[name] = getattr(importlib.import_module(_HOMES[name]), name)
        return value


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
