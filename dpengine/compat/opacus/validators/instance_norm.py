"""Instance norm, which must not track statistics of the batch."""

from __future__ import annotations

from typing import Any

from torch import nn

from dpengine.validation.fix_model import fix as mended

from .errors import IllegalModuleConfigurationError, UnsupportedModuleError
from .utils import register_module_fixer, register_module_validator

INSTANCENORM = (nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d)


@register_module_validator(INSTANCENORM)
def validate(module: Any) -> list[UnsupportedModuleError]:
    """An error if the layer tracks running statistics.

    Args:
        module: The layer.

    Returns:
        A list with one error, or none.
    """
    if not module.track_running_stats:
        return []
    message = (
        f"{type(module).__name__} has track_running_stats=True, which writes statistics of the batch without noise. "
        "Call fix, or build it without."
    )
    return [IllegalModuleConfigurationError(message)]


@register_module_fixer(INSTANCENORM)
def fix(module: Any) -> Any:
    """The layer without running statistics.

    Args:
        module: The layer; it is left as it is.

    Returns:
        The layer itself if it tracks nothing, else a copy that does not.
    """
    return module if not validate(module) else mended(module)[0]
