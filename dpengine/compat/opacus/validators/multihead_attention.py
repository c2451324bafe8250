"""MultiheadAttention, which the engine trains as it is, and Opacus under another name."""

from __future__ import annotations

from torch import nn

from dpengine.compat.opacus.layers import DPMultiheadAttention

from .change_of_class import as_class
from .errors import ShouldReplaceModuleError, UnsupportedModuleError
from .utils import register_module_fixer, register_module_validator


@register_module_validator(nn.MultiheadAttention)
def validate(module: nn.MultiheadAttention) -> list[UnsupportedModuleError]:
    """One error: there is a replacement.

    Args:
        module: The layer.

    Returns:
        A list with one error.
    """
    message = "nn.MultiheadAttention uses its weights for all rows at once. Call fix, or use DPMultiheadAttention."
    return [ShouldReplaceModuleError(message)]


@register_module_fixer(nn.MultiheadAttention)
def fix(module: nn.MultiheadAttention) -> DPMultiheadAttention:
    """A ``DPMultiheadAttention`` with copies of the weights and with all settings.

    Args:
        module: The layer; it is left as it is.

    Returns:
        The replacement.

    Raises:
        NotYetSupportedModuleError: If it is a subclass, which may do more.
    """  # noqa: DOC502 - raised on our behalf
    return as_class(module, nn.MultiheadAttention, DPMultiheadAttention)
