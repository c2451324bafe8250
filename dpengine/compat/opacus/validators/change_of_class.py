"""Replacement of a torch layer by its private subclass, with the same weights and settings."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from torch import nn

from dpengine.validation.fix_model import copied

from .errors import NotYetSupportedModuleError, ShouldReplaceModuleError, UnsupportedModuleError
from .utils import register_module_fixer, register_module_validator

M = TypeVar("M", bound=nn.Module)
Validator = Callable[[nn.Module], list[UnsupportedModuleError]]


def register_replacement(original: type[nn.Module], private: type[M]) -> tuple[Validator, Callable[[nn.Module], M]]:
    """Registers and returns validator and fixer of a layer. ``private`` is a subclass without additional state."""

    @register_module_validator(original)
    def validate(module: nn.Module) -> list[UnsupportedModuleError]:
        """Returns one error: there is a replacement for the layer."""
        message = f"nn.{original.__name__} uses its weights for all rows at once. Call fix, or use {private.__name__}."
        return [ShouldReplaceModuleError(message)]

    @register_module_fixer(original)
    def fix(module: nn.Module) -> M:
        """Returns the replacement, with copies of the weights. Raises NotYetSupportedModuleError for a subclass."""
        if type(module) is not original:
            raise NotYetSupportedModuleError(
                f"{type(module).__name__} is a subclass of {original.__name__} and may compute something else. Build a "
                f"{private.__name__} yourself, or register a fixer with "
                f"@register_module_fixer({type(module).__name__})."
            )
        replacement = copied(module)
        replacement.__class__ = private
        return replacement  # type: ignore[return-value]

    return validate, fix
