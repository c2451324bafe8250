"""Records the inputs and the output gradient of each watched layer."""

from typing import TYPE_CHECKING

from dpengine import lazy_exports

if TYPE_CHECKING:
    from .record import LayerCall as LayerCall
    from .record import Use as Use
    from .replay import ForwardPass as ForwardPass
else:
    __getattr__, __dir__, __all__ = lazy_exports(
        __name__,
        {
            "record": ["LayerCall", "Use"],
            "replay": ["ForwardPass"],
        },
    )
