"""The command line: ``dpengine demo | calibrate | epsilon | report | check | data | doctor``."""

from .main import main

__all__ = ["main"]
