"""The version of Opacus whose names, arguments and defaults this package follows."""

__version__ = "1.6.0"
