"""Validation errors. The engine also raises ``UnsupportedModuleError`` for layers that it does not support."""

from dpengine.errors import UnsupportedError, UnsupportedModuleError

__all__ = [
    "IllegalModuleConfigurationError",
    "NotYetSupportedModuleError",
    "ShouldReplaceModuleError",
    "UnsupportableModuleError",
    "UnsupportedError",
    "UnsupportedModuleError",
]


class UnsupportableModuleError(UnsupportedModuleError):
    """A module that cannot be supported."""


class NotYetSupportedModuleError(UnsupportedModuleError):
    """A module that is not supported yet."""


class ShouldReplaceModuleError(UnsupportedModuleError):
    """A module that ``ModuleValidator.fix`` can replace."""


class IllegalModuleConfigurationError(UnsupportedModuleError):
    """A module with a setting that prevents private training."""
