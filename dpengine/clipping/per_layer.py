"""Per-layer clipping (McMahan et al. 2018): each layer with parameters has a separate clipping norm."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, final

from torch import Tensor

from dpengine.errors import keyword_hints

from .policy import AbstractClip, check_norms, factors_within, positive

_WHERE = "clipping.PerLayer"


@final
@keyword_hints
@dataclass(frozen=True)
class PerLayer(AbstractClip):
    """Scales each sample's gradient separately in each layer.

    The name of a parameter's layer is the part of its name before the last dot. Layers are in the model's order.

    Args:
        max_norms: A number C, which gives each of K layers the clipping norm C / sqrt(K), so that the complete gradient
            has a norm of at most C. Or the clipping norm of each layer; the complete gradient then has a norm of at
            most the root of the sum of their squares.

    Raises:
        InvalidBudgetError: If a clipping norm is not positive and finite.
    """

    max_norms: float | Sequence[float]

    def __post_init__(self) -> None:
        norms = self.max_norms
        is_sequence = isinstance(norms, Sequence) and not isinstance(norms, str)
        checked = (
            tuple(positive(_WHERE, f"max_norms[{i}]", value) for i, value in enumerate(norms))  # type: ignore[arg-type]
            if is_sequence
            else positive(_WHERE, "max_norms", norms)
        )
        if checked == ():
            raise ValueError(f"{_WHERE}: max_norms is empty. Pass one number, or one for each layer.")
        object.__setattr__(self, "max_norms", checked)

    @property
    def bounds(self) -> tuple[float, ...]:
        """Clipping norm of each layer, or the one number for the complete gradient."""
        return self.max_norms if isinstance(self.max_norms, tuple) else (self.max_norms,)  # type: ignore[return-value]

    def group_of(self, names: Sequence[str]) -> list[int]:
        """Returns the layer of each parameter. Raises ValueError for another number of clipping norms than layers."""
        layers: dict[str, int] = {}
        groups = [layers.setdefault(name.rpartition(".")[0], len(layers)) for name in names]
        if isinstance(self.max_norms, tuple) and len(self.max_norms) != len(layers):
            raise ValueError(
                f"{_WHERE}: max_norms has {len(self.max_norms)} clipping norms for {len(layers)} layers with trainable "
                f"parameters: {', '.join(repr(layer) for layer in layers)}. Pass one for each, or a single number."
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
        is_shared = not isinstance(self.max_norms, tuple)
        return {"policy": "per_layer", "max_norms": list(self.bounds), "shared_out": is_shared}
