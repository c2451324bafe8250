"""Inputs of a module, split along the batch axis into samples."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.utils import _pytree as pytree

from dpengine.capture.record import swap_batch_axis


@dataclass(frozen=True, eq=False)
class BatchInputs:
    """Inputs of a module call. Inputs with a batch axis can be split into samples.

    Attributes:
        leaves: All inputs, including those in containers, with the batch on axis 0.
        spec: Structure of ``(args, kwargs)``.
        batched_indices: Indices of the leaves with a batch axis.
        batch_first: True if the module itself has the batch on axis 0.
    """

    leaves: list[Any]
    spec: Any
    batched_indices: list[int]
    batch_first: bool

    @classmethod
    def of(cls, args: Any, kwargs: Mapping[str, Any], batch_size: int, *, batch_first: bool) -> BatchInputs:
        """Returns the inputs of a call. Leaves have a batch axis if the size of their axis 0 is ``batch_size``."""
        leaves, spec = pytree.tree_flatten((args, dict(kwargs)))
        batched_indices = [i for i, leaf in enumerate(leaves) if batch_size_of(leaf) == batch_size]
        return cls(leaves, spec, batched_indices, batch_first)

    @property
    def layout(self) -> tuple[Any, list[int]]:
        """Structure of the inputs, and the indices of the leaves with a batch axis."""
        return self.spec, self.batched_indices

    @property
    def batched(self) -> list[Any]:
        """Inputs with a batch axis: tensors, or batches of graphs."""
        return [self.leaves[index] for index in self.batched_indices]

    def sample(self, index: int) -> list[Any]:
        """Returns `batched` for one sample, as a batch of one."""
        return [_sample_of(leaf, index) for leaf in self.batched]

    def arguments(self, batched: list[Any]) -> tuple[Any, dict[str, Any]]:
        """Returns the args and kwargs with ``batched`` as inputs, in the axis order of the module."""
        leaves = list(self.leaves)
        for index, leaf in zip(self.batched_indices, batched, strict=True):
            leaves[index] = leaf
        leaves = [convert_axis_order(leaf, batch_first=self.batch_first) for leaf in leaves]
        return pytree.tree_unflatten(leaves, self.spec)


def _is_graph_batch(leaf: Any) -> bool:
    """Returns True for a batch of PyTorch Geometric, which stores the nodes of all graphs in one tensor."""
    geometric = sys.modules.get("torch_geometric.data")
    return geometric is not None and isinstance(leaf, geometric.Batch)


def batch_size_of(leaf: Any) -> int | None:
    """Returns the size of axis 0 of an input, or its number of graphs; None for other inputs."""
    if isinstance(leaf, Tensor):
        return len(leaf) if leaf.dim() else None
    return leaf.num_graphs if _is_graph_batch(leaf) else None


def _sample_of(leaf: Any, index: int) -> Any:
    if isinstance(leaf, Tensor):
        # Contiguous, because torch 2.13 crashes in the backward of group_norm on a channels_last input.
        return leaf[index : index + 1].contiguous()
    return sys.modules["torch_geometric.data"].Batch.from_data_list([leaf.get_example(index)])


def convert_axis_order(leaf: Any, *, batch_first: bool) -> Any:
    """Converts a leaf from the axis order of a module to batch first, or back."""
    return leaf if batch_first or not isinstance(leaf, Tensor) else swap_batch_axis(leaf)
