"""The command line: ``dpengine calibrate | epsilon | report | check | ledger | audit | doctor``."""

from .main import main

__all__ = ["main"]
