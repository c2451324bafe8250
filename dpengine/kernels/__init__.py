"""Native code for what Python and torch are slow at. Every kernel has a plain twin, which gives the same."""

from . import products
from .library import native_library, thread_team
from .memory import keep_freed_memory
from .traced import traced

__all__ = ["keep_freed_memory", "native_library", "products", "thread_team", "traced"]
