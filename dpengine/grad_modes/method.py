"""Methods for the norms and the clipped sum of one parameter."""

from __future__ import annotations

import enum
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
