"""Text layout of the demonstration: lines with a figure on the right, and framed tables."""

from __future__ import annotations

from collections.abc import Sequence

WIDTH = 100


def line(left: str, right: str = "") -> str:
    """Returns a line with ``right`` at its right edge."""
    return f"{left}{right:>{max(len(right) + 2, WIDTH - len(left))}}" if right else left


def table(header: Sequence[str], rows: Sequence[Sequence[str]], align: str) -> str:
    """Returns a framed table.

    Args:
        header: Title of each column, centered.
        rows: Cells of each row.
        align: "<", "^" or ">" for each column.

    Returns:
        The lines of the table, joined by newlines.
    """
    widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]

    def rule(left: str, middle: str, right: str) -> str:
        return left + middle.join("─" * (width + 2) for width in widths) + right

    def row(cells: Sequence[str], align: str) -> str:
        placed = (f" {cell:{side}{width}} " for cell, side, width in zip(cells, align, widths, strict=True))
        return "│" + "│".join(placed) + "│"

    body = [row(cells, align) for cells in rows]
    head = row(header, "^" * len(widths))
    return "\n".join([rule("┌", "┬", "┐"), head, rule("├", "┼", "┤"), *body, rule("└", "┴", "┘")])
