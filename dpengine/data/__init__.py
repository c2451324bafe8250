"""The bundled UCI Adult data set."""

from typing import TYPE_CHECKING

from dpengine import lazy_exports

if TYPE_CHECKING:
    from .adult import load_adult as load_adult
    from .record import LabelledData as LabelledData
else:
    __getattr__, __dir__, __all__ = lazy_exports(
        __name__,
        {
            "adult": ["load_adult"],
            "record": ["LabelledData"],
        },
    )
