"""Grad modes: layer calls to per-sample gradient norms and clipped sums."""

from typing import TYPE_CHECKING

from dpengine import lazy_exports

if TYPE_CHECKING:
    from .choose_method import MethodTable as MethodTable
else:
    __getattr__, __dir__, __all__ = lazy_exports(
        __name__,
        {
            "choose_method": ["MethodTable"],
        },
    )
