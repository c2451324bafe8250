"""A run in a folder: saved as a whole, and gone on with. Nothing that is read can be code."""

from .load import exists, load
from .save import save

__all__ = ["exists", "load", "save"]
