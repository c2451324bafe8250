"""Flat clipping (Abadi et al. 2016) and automatic clipping, AUTO-S (Bu et al. 2022)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor

from dpengine.errors import keyword_hints

from .policy import SLACK, AbstractClip, check_norms, factors_within, positive, selected


@final
@keyword_hints
@dataclass(frozen=True)
class Flat(AbstractClip):
    """Scales each sample's gradient down to a norm of at most ``max_norm``.

    Args:
        max_norm: Clipping norm (L2), positive and finite.

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


_WHERE = "clipping.Automatic"


@final
@keyword_hints
@dataclass(frozen=True)
class Automatic(AbstractClip):
    """Multiplies each sample's gradient by ``max_norm / (norm + stability)``, so that its norm is below ``max_norm``.

    Small gradients are scaled up, so ``max_norm`` and the learning rate have the same effect: fix one, tune the other.

    Args:
        max_norm: Norm of large gradients after clipping.
        stability: Constant that is added to the norm. It preserves the order of small norms, which ensures convergence.

    Raises:
        InvalidBudgetError: If an argument is not positive and finite.
    """

    max_norm: float = 1.0
    stability: float = 0.01

    def __post_init__(self) -> None:
        object.__setattr__(self, "max_norm", positive(_WHERE, "max_norm", self.max_norm))
        object.__setattr__(self, "stability", positive(_WHERE, "stability", self.stability))

    @property
    def bounds(self) -> tuple[float, ...]:
        return (self.max_norm,)

    def group_of(self, names: Sequence[str]) -> list[int]:
        return [0] * len(names)

    def factors(self, norms_BK: Tensor) -> Tensor:
        check_norms(_WHERE, norms_BK, 1)
        largest = torch.finfo(norms_BK.dtype).max  # an infinite factor times a zero gradient would be NaN
        factors_BK = (torch.full_like(norms_BK, self.max_norm * (1 - SLACK)) / (norms_BK + self.stability)).clamp(
            max=largest
        )
        return selected(factors_BK, norms_BK)

    def resized(self, max_grad_norm: float) -> Automatic:
        return Automatic(max_grad_norm, self.stability)

    def describe(self) -> dict[str, Any]:
        return {"policy": "automatic", "max_norm": self.max_norm, "stability": self.stability}
