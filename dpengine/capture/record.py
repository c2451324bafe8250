"""Records that capture reports: one for each call of a layer in a backward pass."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn
from torch.utils import _pytree as pytree


def turned(tensor: Tensor) -> Tensor:
    """Swaps axes 0 and 1 of a tensor of a model with ``batch_first=False``, if its batch is on axis 1.

    That holds for indices and for tensors with three axes or more. A float tensor ``(B, F)`` has its batch in front.
    """
    batch_is_first = tensor.dim() < 2 or (tensor.dim() == 2 and tensor.is_floating_point())
    return tensor if batch_is_first else tensor.transpose(0, 1)


@dataclass(eq=False, slots=True, weakref_slot=True)
class LayerCall:
    """One call of a layer: its inputs and the gradient of its output, with the batch on axis 0.

    This also holds if the model has its batch on axis 1.

    Attributes:
        layer: The module, with its settings (stride, eps, ...) and the parameters that the optimizer updates.
        inputs: Positional inputs of ``forward``, tensors detached.
        grad_output: Gradient of the loss by the output, ``(B, ...)``; a tuple if the layer returns several tensors.
        kwargs: Keyword inputs of ``forward``.
        output: The output, if the rule has ``needs_output``, else None.
        name: Dotted name of the layer in the model.
        batch_first: True if the layer itself has the batch on axis 0; else see ``turned``.
        mean_loss: True if the loss is declared to be the mean over B samples, which scales gradients by 1 / B.
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
        """Number of samples."""
        grad = self.grad_output
        if isinstance(grad, Tensor):
            return grad.shape[0]
        return next(leaf for leaf in pytree.tree_leaves(grad) if isinstance(leaf, Tensor)).shape[0]

    def replace(self, **changes: Any) -> LayerCall:
        """Returns a copy with some fields changed."""
        return dataclasses.replace(self, **changes)


class LayerUses(dict[str, "Use"]):
    """The uses of a layer's parameters, by their name in the layer, in calls that differ in the number of samples only.

    A `LayerForward` creates a new one only if a shape, a setting of the layer or a parameter changed. Hashes and
    compares by identity, so it can be a key of what is cached between passes.

    Attributes:
        alike: Type, parameter names, settings, shapes without axis 0 and dtypes. Equal for layers that can be stacked.
    """

    alike: tuple[object, ...] = ()
    __hash__ = object.__hash__  # type: ignore[assignment]
    __eq__ = object.__eq__  # type: ignore[assignment]


@dataclass(frozen=True, eq=False)
class Use:
    """The use of one parameter in a call.

    Attributes:
        parameter: The parameter.
        name: Its dotted name in the model.
        place: The slice of its leading axis that was used; None for all of it.
        part: Shape of the part on this process, if the layer is split over processes; None for all of it.
    """

    parameter: nn.Parameter
    name: str
    place: slice | None = None
    part: tuple[int, ...] | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of a per-sample gradient on this process, without the batch axis."""
        return tuple(self.parameter.shape) if self.part is None else self.part

    @property
    def numel(self) -> int:
        """Number of elements of ``shape``."""
        return math.prod(self.shape)
