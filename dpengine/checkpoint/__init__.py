"""A run in a folder: saved as a whole, and gone on with. Nothing that is read can be code."""

from .save import load, save

__all__ = ["load", "save"]
