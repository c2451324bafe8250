"""How norms and sums of one parameter are formed."""

from __future__ import annotations

import enum
from dataclasses import dataclass


class Method(enum.Enum):
    """What is done with per-sample gradients."""

    GHOST = "ghost"  # the norm by a shortcut, the sum by one weighted product
    KEEP = "keep"  # per-sample gradients are kept
    DISCARD = "discard"  # per-sample gradients are formed for some rows at a time, for the norm, and not kept


@dataclass(frozen=True)
class Way:
    """A method, and which of its functions a grad sampler shall use for it.

    Attributes:
        method: The method.
        name: A key of ``GradSampler.sq_norms`` for a ghost, else of ``GradSampler.grads``. Empty for its own.
    """

    method: Method
    name: str = ""

    def __str__(self) -> str:
        return f"{self.method.value}: {self.name}" if self.name else self.method.value

    @classmethod
    def of(cls, text: str) -> Way:
        """The inverse of ``str``."""
        method, _, name = text.partition(": ")
        return cls(Method(method), name)


KEEP = Way(Method.KEEP)


@dataclass(frozen=True)
class Choice:
    """The treatment of one parameter.

    Attributes:
        name: Dotted name of the parameter.
        layer: Its layer, in a few words.
        way: The way.
        why: A few words.
        seconds: What norm and sum take, as timed or estimated, for one batch; None where there was no choice.
        kept_bytes: Memory for gradients that are kept.
    """

    name: str
    layer: str
    way: Way
    why: str
    seconds: float | None
    kept_bytes: int
