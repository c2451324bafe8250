"""A run in a folder: saved as a whole, and gone on with. Nothing that is read can be code."""

from .load import load
from .save import save

__all__ = ["load", "save"]
