"""Translates calls of split layers on DTensors to calls of the rank's part of the layer on ordinary tensors.

- Linear layer, outputs split: the part has the full input and the gradient of its part of the output.
- Linear layer, inputs split: the part has its part of the input and the gradient of the full output. The output is the
  sum over ranks, so the bias has the same gradient on each rank.
- Embedding, features split: like a linear layer with split outputs.
- Embedding, entries split: entries of other ranks have no gradient on this rank.

The per-sample gradient of each part is that of a smaller layer.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from dpengine.errors import UnsupportedLayerError

from .local_shards import LocalShard, is_dtensor, local_part

LAYERS = (nn.Linear, nn.Embedding)


def layer_type(module: nn.Module) -> type[nn.Module]:
    """Returns the original class of a module. ``fully_shard`` replaces it by a subclass with the same calls."""
    kinds = type(module).__mro__
    return kinds[2] if kinds[1].__name__ == "FSDPModule" else kinds[0]


@dataclass(frozen=True, eq=False)
class LocalCall:
    """Call of a rank's part of a layer.

    Attributes:
        args: Positional inputs.
        kwargs: Keyword inputs.
        output: Part of the output, or this rank's addend if the output is a sum over ranks.
        remote: Mask of embedding entries that belong to other ranks, whose output gradient is ignored on this rank;
            None if there are none.
    """

    args: Any
    kwargs: Any
    output: Tensor
    remote: Tensor | None


@dataclass(frozen=True, eq=False)
class LayerPart:
    """A rank's part of a layer.

    Attributes:
        name: Dotted name of the layer.
        layer: Layer with the size of the part, on the meta device.
        shapes: Shape of the part of each parameter.
        axis: Axis along which the weight is split; None if it is not split.
        weight: Local shard of the weight.
        padding: Padding index of an embedding whose entries are split.
    """

    name: str
    layer: nn.Module
    shapes: Mapping[str, tuple[int, ...]]
    axis: int | None
    weight: LocalShard
    padding: int | None = None

    @classmethod
    def of(cls, name: str, layer: nn.Module, shards: Mapping[str, LocalShard]) -> LayerPart:
        """Returns the part with these local shards. Raises UnsupportedLayerError if the split is not supported."""
        axes = {key: split_axis(shard) for key, shard in shards.items()}
        axis = axes.get("weight")
        bias_axis = 0 if axis == 0 else None  # a bias is split like the outputs
        if layer_type(layer) not in LAYERS or axes.get("bias", bias_axis) != bias_axis:
            raise UnsupportedLayerError(
                f"Layer '{name}' ({type(layer).__name__}) is split over processes along axes {axes}. Only Linear and "
                "Embedding layers are supported, split by ColwiseParallel or RowwiseParallel.",
                fix="Leave it out of the plan of parallelize_module, or freeze it.",
            )
        shapes = {key: shard.computed.size for key, shard in shards.items()}
        first, second = shapes["weight"]
        dtype: Any = layer.weight.dtype
        if isinstance(layer, nn.Linear):
            part: nn.Module = nn.Linear(second, first, "bias" in shards, device="meta", dtype=dtype)
            return cls(name, part, shapes, axis, shards["weight"])
        assert isinstance(layer, nn.Embedding)
        weight = torch.empty(first, second, device="meta", dtype=dtype)
        padding_idx, padding = (None, layer.padding_idx) if axis == 0 else (layer.padding_idx, None)
        part = nn.Embedding(first, second, padding_idx, _weight=weight)
        return cls(name, part, shapes, axis, shards["weight"], padding)

    def is_empty_linear_call(self, args: Any) -> bool:
        """Returns True for a linear layer and an empty batch, for which DTensor infers wrong shapes."""
        return isinstance(self.layer, nn.Linear) and bool(args) and is_dtensor(args[0]) and args[0].numel() == 0

    @staticmethod
    def run_empty(layer: Any, inputs: Tensor) -> Tensor:
        """Returns the output of this rank's part of a linear layer for an empty batch."""
        bias = None if layer.bias is None else local_part(layer.bias).detach()
        return F.linear(inputs, local_part(layer.weight).detach(), bias)

    def empty_output(self, output: Tensor, mesh: Any) -> Any:
        """Returns the output of the complete layer for an empty batch, given the output of the part."""
        from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

        placement: Any = Replicate() if self.axis is None else Partial() if self.axis == 1 else Shard(output.dim() - 1)
        shape = torch.Size((*output.shape[:-1], self.weight.shape[0]))
        stride = torch.empty(shape, device="meta").stride()
        return DTensor.from_local(output, mesh, (placement,), run_check=False, shape=shape, stride=stride)

    def local(self, args: Any, kwargs: Any, output: Any) -> LocalCall:
        """Translates a call of the layer to a call of the part. Raises UnsupportedLayerError for other placements."""
        from torch.distributed.tensor import Replicate, Shard

        inputs = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if is_dtensor(leaf)]
        is_linear = isinstance(self.layer, nn.Linear)
        for tensor in inputs:
            expected = Shard(tensor.dim() - 1) if is_linear and self.axis == 1 else Replicate()
            self._check_placement("an input", tensor, expected)
        is_partial_sum = self.axis is not None and self.axis == (1 if is_linear else 0)
        placement = Shard(output.dim() - 1) if self.axis is not None and not is_partial_sum else Replicate()
        if not (is_partial_sum and output.placements[0].is_partial()):
            self._check_placement("an output", output, placement)
        args, kwargs = pytree.tree_map(local_part, (args, kwargs))
        # The gradient of an addend of the sum over ranks is the gradient of the sum.
        part = output.to_local(grad_placements=(placement,)) if output.requires_grad else output._local_tensor.detach()
        if is_linear or self.axis != 0:
            return LocalCall(args, kwargs, part, None)
        (entries,) = pytree.tree_leaves((args, kwargs))
        size, local_entries = self.weight.computed.size[0], entries - self.weight.computed.start[0]
        remote = (local_entries < 0) | (local_entries >= size)
        if self.padding is not None:
            remote |= entries == self.padding
        # Remote entries have no gradient here. They are mapped to different indices, because samplers merge equal ones.
        return LocalCall((local_entries.remainder(size),), {}, part, remote)

    def _check_placement(self, tensor_kind: str, tensor: Any, expected: Any) -> None:
        if tensor.placements == (expected,):
            return
        raise UnsupportedLayerError(
            f"Split layer '{self.name}' has {tensor_kind} with placements {tensor.placements}; per-sample gradients "
            f"need {expected}.",
            fix="Keep the default input_layouts of ColwiseParallel and RowwiseParallel, and do not use "
            "SequenceParallel.",
        )

    @staticmethod
    def with_tap(tapped: Tensor, call: LocalCall, output: Any) -> Any:
        """Returns the output of the layer as a DTensor that contains the tapped part."""
        from torch.distributed.tensor import DTensor

        remote = call.remote
        if remote is not None:
            tapped.register_hook(lambda grad: grad.masked_fill(remote.unsqueeze(-1), 0))
        return DTensor.from_local(
            tapped, output.device_mesh, output.placements, run_check=False, shape=output.shape, stride=output.stride()
        )


def split_axis(shard: LocalShard) -> int | None:
    """Returns the axis along which tensor parallelism splits a parameter; None if it does not."""
    axes = [axis for axis, size in enumerate(shard.computed.size) if size != shard.shape[axis]]
    return axes[0] if axes else None


def local_inputs(name: str, trees: Any) -> Any:
    """Waits for the inputs of a layer that is not split, and returns them. Raises an error for DTensors."""

    def wait_for(leaf: Any) -> Any:
        if is_dtensor(leaf):
            raise UnsupportedLayerError(
                f"Layer '{name}' is split over processes in an unsupported way: a tensor of its call has placements "
                f"{leaf.placements}.",
                fix="Leave it out of the plan of parallelize_module, or freeze it.",
            )
        return local_part(leaf)

    return pytree.tree_map(wait_for, trees)
