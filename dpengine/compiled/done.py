"""A pass that ran in a graph, as a gradient strategy: its norms are known, and its sums can be had.

Axes: B rows of the batch, P rows it is padded to, K groups of parameters that are clipped together.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from dpengine.capture import LayerCall, Use
from dpengine.errors import UnsupportedLayerError
from dpengine.gradients import AbstractGradients, Sums

from .graphs import Graphs


@dataclass(eq=False)
class Done(AbstractGradients):
    """Norms of a pass, and the way to its sums.

    Attributes:
        graphs: What ran.
        held: What the sums need.
        sq_norms_PK: Of unscaled gradients.
        num_rows: Of the batch.
        stretch: By how much smaller gradients are since a loss that is a mean was one over padded rows.
        named: The parameters that took part.
    """

    graphs: Graphs
    held: list[Tensor]
    sq_norms_PK: Tensor
    num_rows: int
    stretch: float
    named: Mapping[str, nn.Parameter]

    def receive(self, call: LayerCall, uses: Mapping[str, Use], rule: Any) -> None:
        raise UnsupportedLayerError(f"Layer '{call.name}' reported a pass that is over.")

    def receive_rows(self, use: Use, grad: Tensor) -> None:
        raise UnsupportedLayerError(f"'{use.name}' reported a pass that is over.")

    @property
    def rows(self) -> Mapping[str, int]:
        return {"the model": self.num_rows} if self.held else {}

    @property
    def parameters(self) -> Mapping[nn.Parameter, str]:
        return {parameter: name for name, parameter in self.named.items()}

    def sq_norms(self, groups: Mapping[nn.Parameter, int], num_groups: int, scale: float) -> Tensor:
        return self.sq_norms_PK[: self.num_rows] * (scale * self.stretch) ** 2

    def drop(self, rows_B: Tensor) -> None:
        raise UnsupportedLayerError("A row that is not finite reached a compiled pass.")

    def add_sums(self, groups: Mapping[nn.Parameter, int], weights_BK: Tensor, scale: float, into: Sums) -> None:
        weights_PK = weights_BK.new_zeros(self.sq_norms_PK.shape)
        weights_PK[: self.num_rows] = weights_BK
        for parameter, total in zip(self.named.values(), self.graphs.sums(self.held, weights_PK), strict=True):
            into.add(parameter, total, scale * self.stretch)
            into.complete(parameter)

    def clear(self) -> None:
        self.held = []
