"""Errors of validation. What the engine itself refuses is an ``UnsupportedModuleError`` as well."""

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
    """A module for which nothing is known."""


class ShouldReplaceModuleError(UnsupportedModuleError):
    """A module for which there is a replacement, which ``ModuleValidator.fix`` makes."""


class IllegalModuleConfigurationError(UnsupportedModuleError):
    """A module with a setting that forbids private training."""
