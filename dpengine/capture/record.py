"""What capture hands on: one record for each use of a layer in a backward pass."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn
from torch.utils import _pytree as pytree


def turned(tensor: Tensor) -> Tensor:
    """The tensor with its batch moved from axis 1 to the front, or back, in models that have it second.

    Only tensors with three axes or more, and indices, have it there: those of ``(B, F)`` have no other axis before it.
    """
    has_it_in_front = tensor.dim() < 2 or (tensor.dim() == 2 and tensor.is_floating_point())
    return tensor if has_it_in_front else tensor.transpose(0, 1)


@dataclass(eq=False, slots=True, weakref_slot=True)
class LayerCall:
    """One use of a layer: what went in, and the gradient of what came out.

    Every tensor that carries the batch has it on axis 0, whatever the model's own order was.

    Attributes:
        layer: The module, for its settings (stride, eps, ...). Its parameters are the real ones.
        inputs: Positional inputs of ``forward``, tensors detached.
        grad_output: Gradient of the loss by the output, ``(B, ...)``; a tuple where the layer returns several tensors.
        kwargs: Keyword inputs of ``forward``.
        output: The output itself where the receiver asked for it, else None.
        name: Dotted name of the layer in the model.
        batch_first: Whether the layer's own order has the batch on axis 0, too; else see ``turned``.
        mean_loss: Whether the loss was declared to be a mean over the rows, so that a row's own loss is as much larger.
    """

    layer: nn.Module
    inputs: tuple[Any, ...]
    grad_output: Any
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    output: Any = None
    name: str = ""
    batch_first: bool = True
    mean_loss: bool = False

    @property
    def batch_size(self) -> int:
        """Number of rows."""
        grad = self.grad_output
        if isinstance(grad, Tensor):
            return grad.shape[0]
        return next(leaf for leaf in pytree.tree_leaves(grad) if isinstance(leaf, Tensor)).shape[0]

    def replace(self, **changes: Any) -> LayerCall:
        """A copy with some fields changed."""
        return dataclasses.replace(self, **changes)


class LayerUses(dict[str, "Use"]):
    """The uses of a layer's parameters, by their name in the layer.

    The layer makes them anew when a parameter was replaced, frozen or unfrozen. They hash and compare by identity, so
    that two passes over the same layers are recognized.

    Attributes:
        settings: Names of the attributes of the layer on which its grad samplers depend.
    """

    settings: tuple[str, ...] = ()
    __hash__ = object.__hash__  # type: ignore[assignment]
    __eq__ = object.__eq__  # type: ignore[assignment]


@dataclass(frozen=True, eq=False)
class Use:
    """A parameter's part in a call.

    Attributes:
        parameter: The parameter.
        name: Its dotted name in the model.
        place: The slice of its leading axis that was used, None for all of it.
        part: Shape of the part that is here, where the layer is split over processes; None for the whole.
    """

    parameter: nn.Parameter
    name: str
    place: slice | None = None
    part: tuple[int, ...] | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the gradients that are formed here."""
        return tuple(self.parameter.shape) if self.part is None else self.part

    @property
    def numel(self) -> int:
        """Numbers in a gradient that is formed here."""
        return math.prod(self.shape)
