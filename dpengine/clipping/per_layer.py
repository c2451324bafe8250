"""Per-layer clipping: each layer that owns parameters has a threshold of its own (McMahan et al. 2018)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, final

from torch import Tensor

from dpengine.errors import suggests_names

from .policy import AbstractClip, check_norms, factors_within, positive

_WHERE = "clipping.PerLayer"


@final
@suggests_names
@dataclass(frozen=True)
class PerLayer(AbstractClip):
    """Scales each sample's gradient layer by layer.

    A layer is what the part of a parameter's name before the last dot names; layers are counted in the model's order.

    Args:
        max_norms: One number C is shared out evenly: each of K layers gets C / sqrt(K), so that the whole gradient
            keeps norm C. A sequence gives each layer its own, and the whole gradient the root of the sum of squares.

    Raises:
        InvalidBudgetError: If a threshold is not positive and finite.
    """

    max_norms: float | Sequence[float]

    def __post_init__(self) -> None:
        given = self.max_norms
        listed = isinstance(given, Sequence) and not isinstance(given, str)
        checked = (
            tuple(positive(_WHERE, f"max_norms[{i}]", value) for i, value in enumerate(given))  # type: ignore[arg-type]
            if listed
            else positive(_WHERE, "max_norms", given)
        )
        if checked == ():
            raise ValueError(f"{_WHERE}: max_norms is empty. Give one number, or one for each layer.")
        object.__setattr__(self, "max_norms", checked)

    @property
    def bounds(self) -> tuple[float, ...]:
        """A threshold for each layer, or the one number that is shared out."""
        return self.max_norms if isinstance(self.max_norms, tuple) else (self.max_norms,)  # type: ignore[return-value]

    def group_of(self, names: Sequence[str]) -> list[int]:
        """The layer of each parameter; ValueError if the thresholds are for another number of layers."""
        layers: dict[str, int] = {}
        groups = [layers.setdefault(name.rpartition(".")[0], len(layers)) for name in names]
        if isinstance(self.max_norms, tuple) and len(self.max_norms) != len(layers):
            raise ValueError(
                f"{_WHERE}: max_norms has {len(self.max_norms)} thresholds for {len(layers)} layers with trainable "
                f"parameters: {', '.join(repr(layer) for layer in layers)}. Give one for each, or a single number."
            )
        return groups

    def factors(self, norms_BK: Tensor) -> Tensor:
        if isinstance(self.max_norms, tuple):
            check_norms(_WHERE, norms_BK, len(self.max_norms))
            return factors_within(self.max_norms, norms_BK)
        check_norms(_WHERE, norms_BK)
        return factors_within(self.bounds[0] / math.sqrt(max(norms_BK.shape[1], 1)), norms_BK)

    def resized(self, max_grad_norm: float) -> PerLayer:
        norm = positive(_WHERE, "max_grad_norm", max_grad_norm)
        if not isinstance(self.max_norms, tuple):
            return PerLayer(norm)
        return PerLayer([bound * (norm / self.max_grad_norm) for bound in self.max_norms])

    def describe(self) -> dict[str, Any]:
        shared_out = not isinstance(self.max_norms, tuple)
        return {"policy": "per_layer", "max_norms": list(self.bounds), "shared_out": shared_out}
