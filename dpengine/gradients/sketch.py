"""Sums of gradients in little memory, for telling whether two of them differ."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

_WIDTH = 4096  # numbers of a sketch of one kind; what is not larger is kept as it is
_KINDS = 4


class Sketches:
    """Stands in for a ``FlatBuffer``: of each sum it keeps its products with random signs, which add up like it.

    The norm of a sketch is that of the sum on average (Alon, Matias and Szegedy 1996), give or take a half.
    """

    def __init__(self) -> None:
        self.of: dict[nn.Parameter, Tensor] = {}

    def add(self, parameter: nn.Parameter, total: Tensor, scale: float = 1.0) -> None:
        """Adds ``scale * total``."""
        sketch = _sketched(total.reshape(-1)) * scale
        self.of[parameter] = self.of[parameter] + sketch if parameter in self.of else sketch

    def fill(self, parameter: nn.Parameter, write: Callable[[Tensor, float], None]) -> None:
        """Adds what ``write`` writes. See ``FlatBuffer.fill``."""
        dtype = torch.promote_types(parameter.dtype, torch.float32)
        total = torch.empty(parameter.shape, dtype=dtype, device=parameter.device)
        write(total, 0.0)
        self.add(parameter, total)

    def complete(self, parameter: nn.Parameter) -> None:
        """Nothing waits for that here."""


def norm_of_sketch(sketch: Tensor) -> Tensor:
    """About the norm of what was sketched."""
    return sketch.norm() / (len(sketch) ** 0.5 if sketch.dim() == 2 else 1)


def _sketched(flat: Tensor) -> Tensor:
    if flat.numel() <= _WIDTH:
        return flat.clone()
    rows = flat.numel() // _WIDTH
    generator = torch.Generator().manual_seed(rows)  # the same signs for sums that are to be compared
    signs = torch.randint(0, 2, (_KINDS, rows + 1), generator=generator).to(flat) * 2 - 1
    sketch = signs[:, :rows] @ flat[: rows * _WIDTH].view(rows, _WIDTH)
    rest = flat[rows * _WIDTH :]
    sketch[:, : len(rest)] += signs[:, rows:] * rest
    return sketch
