"""Stage 2: a forward and a backward pass become LayerCall records."""

from .record import LayerCall

__all__ = ["LayerCall"]
