"""The bundled UCI Adult data set."""

from typing import TYPE_CHECKING

from dpengine import lazy_exports

if TYPE_CHECKING:
    from .adult import LabelledData as LabelledData
    from .adult import load_adult as load_adult
else:
    __getattr__, __dir__, __all__ = lazy_exports(
        __name__,
        {"adult": ["LabelledData", "load_adult"]},
    )
