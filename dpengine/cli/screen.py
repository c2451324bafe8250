"""Formats the output of the commands: aligned columns, and bold text on a terminal."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence


def columns(rows: Sequence[Sequence[str]]) -> str:
    """Returns a table of left-aligned columns without a frame."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(f"{cell:{width}}" for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    )


def strong(text: str) -> str:
    """Returns the text in bold if standard output is a terminal and ``NO_COLOR`` is not set."""
    is_plain = os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb" or not sys.stdout.isatty()
    return text if is_plain else f"\033[1m{text}\033[0m"
