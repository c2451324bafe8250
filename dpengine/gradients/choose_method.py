"""Which method gives a parameter's norms and sums. Reads shapes only, never data."""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass

from dpengine.capture import LayerCall
from dpengine.grad_samplers import GradSampler


class Method(enum.Enum):
    """How norms and sums of one parameter are formed."""

    GHOST = "ghost"  # the norm by a shortcut, the sum by one weighted product
    KEEP = "keep"  # per-sample gradients are kept
    DISCARD = "discard"  # per-sample gradients are formed for some rows at a time, for the norm, and not kept


@dataclass(frozen=True)
class Situation:
    """What the choice may depend on.

    Attributes:
        sampler: The sampler, None where gradients arrive per sample already.
        call: The one call that stands for all uses, None where several calls could not be joined.
        bytes_kept: What keeping this parameter's gradients would cost, in bytes.
        bytes_left: What may still be kept.
        in_rows: Whether the calls can be cut into rows.
    """

    sampler: GradSampler | None
    call: LayerCall | None
    bytes_kept: int
    bytes_left: int
    in_rows: bool


Choose = Callable[[Situation], Method]


def by_shape(situation: Situation) -> Method:
    """The shortcut where it pays; else keep while the budget lasts; else discard."""
    sampler, call = situation.sampler, situation.call
    fits = situation.bytes_kept <= situation.bytes_left
    if sampler is not None and call is not None and sampler.use_sq_norm(call):
        if not (fits and sampler.keep_pays is not None and sampler.keep_pays(call)):
            return Method.GHOST
    return Method.KEEP if fits or not situation.in_rows else Method.DISCARD


def always_keep(situation: Situation) -> Method:
    """Every per-sample gradient is kept."""
    return Method.KEEP
