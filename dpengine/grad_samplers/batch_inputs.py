"""Inputs of a module with their batch axis, split into rows."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.utils import _pytree as pytree

from dpengine.capture.record import swap_batch_axis


@dataclass(frozen=True, eq=False)
class Inputs:
    """Inputs of a module. Those with a batch axis are split into rows.

    Attributes:
        leaves: The inputs in all containers, with the batch on axis 0.
        spec: Structure of ``(args, kwargs)``.
        cut: Indices of the leaves with a batch axis.
        batch_first: True if the module itself has the batch on axis 0.
    """

    leaves: list[Any]
    spec: Any
    cut: list[int]
    batch_first: bool

    @classmethod
    def of(cls, args: Any, kwargs: Mapping[str, Any], count: int, *, batch_first: bool) -> Inputs:
        """Returns the inputs of a call with ``count`` rows, which have the batch on axis 0."""
        leaves, spec = pytree.tree_flatten((args, dict(kwargs)))
        cut = [i for i, leaf in enumerate(leaves) if rows_in(leaf) == count]
        return cls(leaves, spec, cut, batch_first)

    @property
    def layout(self) -> tuple[Any, list[int]]:
        """Structure of the inputs, and which of them have a batch axis."""
        return self.spec, self.cut

    @property
    def batched(self) -> list[Any]:
        """The inputs with a batch axis: tensors, or batches of graphs."""
        return [self.leaves[index] for index in self.cut]

    def row(self, row: int) -> list[Any]:
        """Returns `batched` for one row, as a batch of one."""
        return [_row_of(leaf, row) for leaf in self.batched]

    def arguments(self, tensors: list[Any]) -> tuple[Any, dict[str, Any]]:
        """Returns the inputs with `batched` replaced by ``tensors``, in the axis order of the module."""
        leaves = list(self.leaves)
        for index, tensor in zip(self.cut, tensors, strict=True):
            leaves[index] = tensor
        return pytree.tree_unflatten([in_order(leaf, batch_first=self.batch_first) for leaf in leaves], self.spec)


def _is_graphs(leaf: Any) -> bool:
    """Returns True for a batch of PyTorch Geometric, which stores the nodes of all graphs in one tensor."""
    geometric = sys.modules.get("torch_geometric.data")
    return geometric is not None and isinstance(leaf, geometric.Batch)


def rows_in(leaf: Any) -> int | None:
    """Returns the number of rows of an input; None if it has no batch axis."""
    if isinstance(leaf, Tensor):
        return len(leaf) if leaf.dim() else None
    return leaf.num_graphs if _is_graphs(leaf) else None


def _row_of(leaf: Any, row: int) -> Any:
    if isinstance(leaf, Tensor):
        # Contiguous, because torch 2.13 crashes in the backward of group_norm on a channels_last input.
        return leaf[row : row + 1].contiguous()
    return sys.modules["torch_geometric.data"].Batch.from_data_list([leaf.get_example(row)])


def in_order(leaf: Any, *, batch_first: bool) -> Any:
    """Converts a leaf from the axis order of a module to that with the batch on axis 0, or back."""
    return leaf if batch_first or not isinstance(leaf, Tensor) else swap_batch_axis(leaf)
