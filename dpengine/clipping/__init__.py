"""Clipping policies: per-sample gradient norms to clipping factors."""

from typing import TYPE_CHECKING

from dpengine import lazy_exports

if TYPE_CHECKING:
    from .adaptive import Adaptive as Adaptive
    from .flat import Automatic as Automatic
    from .flat import Flat as Flat
    from .groups import Groups as Groups
    from .per_layer import PerLayer as PerLayer
    from .policy import AbstractClip as AbstractClip
else:
    __getattr__, __dir__, __all__ = lazy_exports(
        __name__,
        {
            "adaptive": ["Adaptive"],
            "flat": ["Automatic", "Flat"],
            "groups": ["Groups"],
            "per_layer": ["PerLayer"],
            "policy": ["AbstractClip"],
        },
    )
