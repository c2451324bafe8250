"""Trainers of other packages. Each file is imported by its own name, and needs the package that it is named after."""

from .lightning_classes import lightning_class

__all__ = ["lightning_class"]
