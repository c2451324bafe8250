"""Native code for what Python and torch are slow at. Every kernel has a plain twin, which gives the same."""

from .library import native_library, thread_team

__all__ = ["native_library", "thread_team"]
