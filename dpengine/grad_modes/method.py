"""Methods for the norms and the clipped sum of one parameter, and the table of those that were chosen."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass


class Method(enum.Enum):
    """Treatment of per-sample gradients."""

    GHOST = "ghost"  # not formed: norm by a shortcut, sum by one weighted product
    KEEP = "keep"  # formed and kept
    DISCARD = "discard"  # formed for some samples at a time for the norm, and not kept


@dataclass(frozen=True)
class Algorithm:
    """Method, and the function of the grad sampler that computes it.

    Attributes:
        method: The method.
        name: Key of ``GradSampler.sq_norms`` for ``GHOST``, else of ``GradSampler.grads``. Empty for the default.
    """

    method: Method
    name: str = ""

    def __str__(self) -> str:
        return f"{self.method.value}: {self.name}" if self.name else self.method.value

    @classmethod
    def of(cls, text: str) -> Algorithm:
        """Parses the result of ``str``."""
        method, _, name = text.partition(": ")
        return cls(Method(method), name)


KEEP = Algorithm(Method.KEEP)


@dataclass(frozen=True)
class Choice:
    """Algorithm chosen for one parameter.

    Attributes:
        name: Dotted name of the parameter.
        layer: Short description of its layer.
        algorithm: The chosen algorithm.
        why: Short reason for the choice.
        seconds: Timed or estimated duration of norm and sum for one batch; None without alternatives.
        kept_bytes: Memory for kept gradients, in bytes.
    """

    name: str
    layer: str
    algorithm: Algorithm
    why: str
    seconds: float | None
    kept_bytes: int


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
