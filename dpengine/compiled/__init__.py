"""Forward, loss, backward and clipping as one graph, for ``torch.compile``."""

from .backward import CompiledBackward

__all__ = ["CompiledBackward"]
