"""The forward pass, loss, backward pass and clipping as one graph, for ``torch.compile``."""

from typing import TYPE_CHECKING

from dpengine import lazy_exports

if TYPE_CHECKING:
    from .backward import CompiledBackward as CompiledBackward
else:
    __getattr__, __dir__, __all__ = lazy_exports(
        __name__,
        {
            "backward": ["CompiledBackward"],
        },
    )
