"""Layers of which each rank holds a part: their calls on DTensors as calls of that part on ordinary tensors.

A linear layer whose outputs are split gets the whole input, and the gradient of its part of the output. One whose
inputs are split gets its part of the input, and the gradient of the whole output, which is the sum over ranks: so its
bias has the same gradient on each. An embedding with features split is like the first; with entries split, an entry
that lies elsewhere has no gradient here. The per-sample gradient of each part is then that of a smaller layer.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from dpengine.errors import UnsupportedLayerError

from .local_shards import Held, is_dtensor, local_part

LAYERS = (nn.Linear, nn.Embedding)


def layer_type(module: nn.Module) -> type[nn.Module]:
    """The class that a module was built from: ``fully_shard`` puts one of its own in between, which changes no call."""
    kinds = type(module).__mro__
    return kinds[2] if kinds[1].__name__ == "FSDPModule" else kinds[0]


@dataclass(frozen=True, eq=False)
class LocalCall:
    """A call of a part.

    Attributes:
        args: Positional inputs.
        kwargs: Keyword inputs.
        output: The part of the output, or the part that is summed over ranks.
        elsewhere: Where the output's gradient is none of this rank's, None for nowhere.
    """

    args: Any
    kwargs: Any
    output: Tensor
    elsewhere: Tensor | None


@dataclass(frozen=True, eq=False)
class LayerPart:
    """The part of a layer that is on this rank.

    Attributes:
        name: Dotted name of the layer.
        layer: A layer of the part's size, without numbers.
        shapes: Of the part of each parameter.
        axis: Along which the weight is cut, None if it is whole.
        held: What is here of the weight.
        padding: The entry that has no gradient, where entries are split.
    """

    name: str
    layer: nn.Module
    shapes: Mapping[str, tuple[int, ...]]
    axis: int | None
    held: Held
    padding: int | None = None

    @classmethod
    def of(cls, name: str, layer: nn.Module, held: Mapping[str, Held]) -> LayerPart:
        """The part of a layer, by what is here of its parameters. UnsupportedLayerError if it is cut in another way."""
        axes = {key: cut_axis(one) for key, one in held.items()}
        axis = axes.get("weight")
        of_bias = 0 if axis == 0 else None  # a bias goes with the outputs
        if layer_type(layer) not in LAYERS or axes.get("bias", of_bias) != of_bias:
            raise UnsupportedLayerError(
                f"Layer '{name}' ({type(layer).__name__}) is distributed over processes along axes {axes}; "
                "known are Linear and Embedding, as ColwiseParallel and RowwiseParallel cut them.",
                fix="Leave it out of the plan of parallelize_module, or freeze it.",
            )
        shapes = {key: one.formed.size for key, one in held.items()}
        first, second = shapes["weight"]
        dtype: Any = layer.weight.dtype
        if isinstance(layer, nn.Linear):
            part: nn.Module = nn.Linear(second, first, "bias" in held, device="meta", dtype=dtype)
            return cls(name, part, shapes, axis, held["weight"])
        assert isinstance(layer, nn.Embedding)
        numbers = torch.empty(first, second, device="meta", dtype=dtype)
        within, padding = (None, layer.padding_idx) if axis == 0 else (layer.padding_idx, None)
        part = nn.Embedding(first, second, within, _weight=numbers)
        return cls(name, part, shapes, axis, held["weight"], padding)

    def has_no_rows(self, args: Any) -> bool:
        """Whether this is a linear layer that is called without rows, where DTensors know no shapes."""
        return isinstance(self.layer, nn.Linear) and bool(args) and is_dtensor(args[0]) and args[0].numel() == 0

    def given(self, output: Tensor, mesh: Any) -> Any:
        """What the layer gives without rows, made of what the part gives."""
        from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

        placed: Any = Replicate() if self.axis is None else Partial() if self.axis == 1 else Shard(output.dim() - 1)
        shape = torch.Size((*output.shape[:-1], self.held.shape[0]))
        stride = torch.empty(shape, device="meta").stride()
        return DTensor.from_local(output, mesh, (placed,), run_check=False, shape=shape, stride=stride)

    def local(self, args: Any, kwargs: Any, output: Any) -> LocalCall:
        """A call of the layer as one of the part. UnsupportedLayerError if it is distributed as no known style does."""
        from torch.distributed.tensor import Replicate, Shard

        inputs = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if is_dtensor(leaf)]
        is_linear = isinstance(self.layer, nn.Linear)
        for tensor in inputs:
            wanted = Shard(tensor.dim() - 1) if is_linear and self.axis == 1 else Replicate()
            self._refuse_other("an input", tensor, wanted)
        sums = self.axis is not None and self.axis == (1 if is_linear else 0)
        given = Shard(output.dim() - 1) if self.axis is not None and not sums else Replicate()
        if not (sums and output.placements[0].is_partial()):
            self._refuse_other("an output", output, given)
        args, kwargs = pytree.tree_map(local_part, (args, kwargs))
        # What is summed over ranks has, on each of them, the gradient of the sum.
        here = output.to_local(grad_placements=(given,)) if output.requires_grad else output._local_tensor.detach()
        if is_linear or self.axis != 0:
            return LocalCall(args, kwargs, here, None)
        (entries,) = pytree.tree_leaves((args, kwargs))
        size, placed = self.held.formed.size[0], entries - self.held.formed.start[0]
        elsewhere = (placed < 0) | (placed >= size)
        if self.padding is not None:
            elsewhere |= entries == self.padding
        # Entries that lie elsewhere have no gradient; they are spread, since samplers merge equal ones.
        return LocalCall((placed.remainder(size),), {}, here, elsewhere)

    def _refuse_other(self, what: str, tensor: Any, wanted: Any) -> None:
        if tensor.placements == (wanted,):
            return
        raise UnsupportedLayerError(
            f"Layer '{self.name}' is split over processes, and has {what} that is {tensor.placements}, where {wanted} "
            "is needed for per-sample gradients.",
            fix="Leave input_layouts of ColwiseParallel and RowwiseParallel as they are, and use no SequenceParallel.",
        )

    @staticmethod
    def joined(tapped: Tensor, call: LocalCall, output: Any) -> Any:
        """The output again as the layer gave it, with a tap in it."""
        from torch.distributed.tensor import DTensor

        elsewhere = call.elsewhere
        if elsewhere is not None:
            tapped.register_hook(lambda grad: grad.masked_fill(elsewhere.unsqueeze(-1), 0))
        return DTensor.from_local(
            tapped, output.device_mesh, output.placements, run_check=False, shape=output.shape, stride=output.stride()
        )


def cut_axis(held: Held) -> int | None:
    """Along which axis a parameter is split over the ranks that have the same rows; None if each has all of it."""
    axes = [axis for axis, size in enumerate(held.formed.size) if size != held.shape[axis]]
    return axes[0] if axes else None


def ordinary(name: str, trees: Any) -> Any:
    """What went into a layer that is not split, arrived. UnsupportedLayerError if it is distributed."""

    def arrived(leaf: Any) -> Any:
        if is_dtensor(leaf):
            raise UnsupportedLayerError(
                f"Layer '{name}' is split over processes in a way whose per-sample gradients are not known: a tensor "
                f"of its call is distributed as {leaf.placements}.",
                fix="Leave it out of the plan of parallelize_module, or freeze it.",
            )
        return local_part(leaf)

    return pytree.tree_map(arrived, trees)
