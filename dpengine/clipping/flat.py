"""Flat clipping: one threshold for the whole gradient (Abadi et al. 2016)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, final

from torch import Tensor

from dpengine.names import suggests_names

from .policy import AbstractClip, check_norms, factors_within, positive


@final
@suggests_names
@dataclass(frozen=True)
class Flat(AbstractClip):
    """Scales each sample's gradient down to norm ``max_norm`` at most.

    Args:
        max_norm: The threshold, an L2 norm. Positive and finite.

    Raises:
        InvalidBudgetError: If ``max_norm`` is not positive and finite.
    """

    max_norm: float

    def __post_init__(self) -> None:
        object.__setattr__(self, "max_norm", positive("clipping.Flat", "max_norm", self.max_norm))

    @property
    def bounds(self) -> tuple[float, ...]:
        return (self.max_norm,)

    def group_of(self, names: Sequence[str]) -> list[int]:
        return [0] * len(names)

    def factors(self, norms_BK: Tensor) -> Tensor:
        check_norms("clipping.Flat", norms_BK, 1)
        return factors_within(self.max_norm, norms_BK)

    def resized(self, max_grad_norm: float) -> Flat:
        return Flat(max_grad_norm)

    def describe(self) -> dict[str, Any]:
        return {"policy": "flat", "max_norm": self.max_norm}
