"""The bundled data set, UCI Adult, and its loader."""

from .adult import load_adult
from .record import LabelledData

__all__ = ["LabelledData", "load_adult"]
