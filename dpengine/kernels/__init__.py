"""Native code for what Python and torch are slow at. Every kernel has a plain twin that gives the same bits."""

from .library import native_library

__all__ = ["native_library"]
