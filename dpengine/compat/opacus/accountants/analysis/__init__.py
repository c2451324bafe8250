"""Formulas of the accountants, as functions."""

from . import gdp, prv, rdp

__all__ = ["gdp", "prv", "rdp"]
