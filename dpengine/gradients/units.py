"""Rows of a batch that belong to one unit of privacy, such as a user: their gradients are one before clipping.

Axes: B rows, U units.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class Units:
    """Whose each row is.

    Attributes:
        place_B: The unit of each row, from 0.
        count: Units.
        mean: Whether a unit's gradient is the mean over its rows; else their sum.
    """

    place_B: Tensor
    count: int
    mean: bool

    def weights(self) -> Tensor:
        """What each row counts within its unit, ``(B,)``."""
        if not self.mean:
            return torch.ones(len(self.place_B))
        return 1 / torch.bincount(self.place_B, minlength=self.count)[self.place_B].double()

    def add_rows(self, out: Tensor, grad: Tensor, start: int, stop: int) -> None:
        """Adds gradients of some rows ``(stop - start, *param.shape)`` to those of units ``(U, *param.shape)``."""
        weight = self.weights()[start:stop].to(out)
        weighted = grad.to(out.dtype) * weight.view(-1, *[1] * (grad.dim() - 1))
        out.index_add_(0, self.place_B[start:stop].to(out.device), weighted)
