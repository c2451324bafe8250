"""What commands print: lines with a figure on the right, tables, and a little emphasis where a terminal shows it."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

WIDTH = 100


def line(left: str, right: str = "") -> str:
    """One line with something at its right edge."""
    return f"{left}{right:>{max(len(right) + 2, WIDTH - len(left))}}" if right else left


def table(header: Sequence[str], rows: Sequence[Sequence[str]], align: str) -> str:
    """A table with a frame.

    Args:
        header: One text for each column; they are centred.
        rows: As many texts each.
        align: For each column "<", "^" or ">".

    Returns:
        Several lines.
    """
    widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]

    def rule(left: str, middle: str, right: str) -> str:
        return left + middle.join("─" * (width + 2) for width in widths) + right

    def row(cells: Sequence[str], how: str) -> str:
        placed = (f" {cell:{side}{width}} " for cell, side, width in zip(cells, how, widths, strict=True))
        return "│" + "│".join(placed) + "│"

    body = [row(cells, align) for cells in rows]
    head = row(header, "^" * len(widths))
    return "\n".join([rule("┌", "┬", "┐"), head, rule("├", "┼", "┤"), *body, rule("└", "┴", "┘")])


def columns(rows: Sequence[Sequence[str]]) -> str:
    """Rows without a frame, their cells aligned on the left."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(f"{cell:{width}}" for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    )


def strong(text: str) -> str:
    """The text in bold, where standard output is a terminal and ``NO_COLOR`` is not set."""
    plain = os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb" or not sys.stdout.isatty()
    return text if plain else f"\033[1m{text}\033[0m"
