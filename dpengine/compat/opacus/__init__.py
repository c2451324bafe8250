"""Opacus's names over dpengine: in a script that was written for Opacus, only the import line changes."""

from .version import __version__

__all__ = ["__version__"]
