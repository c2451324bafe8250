"""Validator and fixer of instance norm, which must not track statistics of the batch."""

from __future__ import annotations

from typing import Any

from torch import nn

from dpengine.validation.fix_model import fix as fix_model

from .errors import IllegalModuleConfigurationError, UnsupportedModuleError
from .utils import register_module_fixer, register_module_validator

INSTANCENORM = (nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d)


@register_module_validator(INSTANCENORM)
def validate(module: Any) -> list[UnsupportedModuleError]:
    """Returns a list with one error if the layer tracks running statistics, else an empty list."""
    if not module.track_running_stats:
        return []
    message = (
        f"{type(module).__name__} has track_running_stats=True, which writes batch statistics without noise. "
        "Call fix, or pass track_running_stats=False."
    )
    return [IllegalModuleConfigurationError(message)]


@register_module_fixer(INSTANCENORM)
def fix(module: Any) -> Any:
    """Returns the layer itself if it tracks no running statistics, else a copy that does not."""
    return module if not validate(module) else fix_model(module)[0]
