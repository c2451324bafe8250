"""Table of the algorithm chosen for each parameter."""

from __future__ import annotations

from collections.abc import Sequence

from .method import Choice

_HEAD = ("parameter", "layer", "method", "why", "ms", "kept MiB")


def explain(choices: Sequence[Choice]) -> str:
    """Returns a table of parameters: layer, method, reason, milliseconds for norm and sum, memory of kept gradients."""
    rows = [_HEAD, *(_row(choice) for choice in choices)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(_HEAD))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    return "\n".join(lines)


def _row(choice: Choice) -> tuple[str, ...]:
    layer = choice.layer if len(choice.layer) <= 60 else f"{choice.layer[:57]}..."
    milliseconds = "" if choice.seconds is None else f"{1e3 * choice.seconds:.3f}"
    kept = f"{choice.kept_bytes / 2**20:.1f}" if choice.kept_bytes else ""
    return choice.name, layer, str(choice.algorithm), choice.why, milliseconds, kept
