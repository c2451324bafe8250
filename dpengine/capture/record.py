"""Records of the layer calls in a backward pass."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from dpengine.errors import UnsupportedLayerError

from .tensors import map_tensors, tensors_in


def swap_batch_axis(tensor: Tensor) -> Tensor:
    """Swaps axes 0 and 1 of a tensor of a model with ``batch_first=False``, if its batch is on axis 1.

    The batch is on axis 1 of integer tensors and of tensors with three or more axes. It is on axis 0 of ``(B, F)``.
    """
    batch_is_first = tensor.dim() < 2 or (tensor.dim() == 2 and tensor.is_floating_point())
    return tensor if batch_is_first else tensor.transpose(0, 1)


@dataclass(eq=False, slots=True, weakref_slot=True)
class LayerCall:
    """One call of a layer: its inputs and the gradient of its output.

    The batch is on axis 0, even if the model has its batch on axis 1.

    Attributes:
        layer: The module, with its settings (stride, eps, ...) and the parameters that the optimizer updates.
        inputs: Positional inputs of ``forward``, tensors detached.
        grad_output: Gradient of the loss w.r.t. the output, ``(B, ...)``; a tuple for several outputs.
        kwargs: Keyword inputs of ``forward``.
        output: The output, if the rule has ``needs_output``, else None.
        name: Dotted name of the layer in the model.
        batch_first: True if the layer itself has the batch on axis 0; else see ``swap_batch_axis``.
        mean_loss: True if the loss is declared to be the mean over B samples, which scales gradients by 1 / B.
        per_sample_run: Record that ``JointSampler.forward`` returned if the forward pass ran each sample separately.
            With it, the rule repeats the pass with the same random numbers. None if the layer ran on the batch.
    """

    layer: nn.Module
    inputs: tuple[Any, ...]
    grad_output: Any
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    output: Any = None
    name: str = ""
    batch_first: bool = True
    mean_loss: bool = False
    per_sample_run: Any = None

    @property
    def batch_size(self) -> int:
        """Number of samples. Raises UnsupportedLayerError if the layer returned one number for all samples."""
        leaf = tensors_in(self.grad_output)[0]
        if leaf.dim():
            return leaf.shape[0]
        raise UnsupportedLayerError(
            f"Layer '{self.name}' ({type(self.layer).__name__}) returned one number for the whole batch, from which "
            "per-sample gradients cannot be computed.",
            fix="If the model's forward calls it and is not sharded, pass grad_sample_mode='auto' or 'whole_model'. "
            "Else call it on values of single samples, such as loss_fn(..., reduction='none'), and average its output.",
        )

    def replace(self, **changes: Any) -> LayerCall:
        """Returns a copy with some fields changed."""
        return dataclasses.replace(self, **changes)

    def tensors(self) -> list[Tensor]:
        """Returns the tensors of the inputs, the gradient and the output, in order."""
        return tensors_in((self.inputs, dict(self.kwargs), self.grad_output, self.output))

    def map(self, function: Callable[[Tensor], Tensor]) -> LayerCall:
        """Returns a copy with a function applied to all tensors."""
        fields = (self.inputs, dict(self.kwargs), self.grad_output, self.output)
        inputs, kwargs, grad_output, output = map_tensors(function, fields)
        return self.replace(inputs=inputs, kwargs=kwargs, grad_output=grad_output, output=output)


@dataclass(frozen=True, eq=False)
class ForwardCall:
    """A call of a module that has not run yet.

    Attributes:
        layer: The module.
        forward: Runs the module.
        args: Positional inputs.
        kwargs: Keyword inputs.
        parameters: The trainable parameters, by name in the module.
        name: Dotted name of the module in the model.
        batch_first: See `LayerCall`.
    """

    layer: nn.Module
    forward: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    parameters: Mapping[str, nn.Parameter]
    name: str
    batch_first: bool


class LayerUses(dict[str, "Use"]):
    """The uses of a layer's parameters, by name in the layer, in calls that differ only in the number of samples.

    A `LayerForward` creates a new object only if a shape, a setting of the layer or a parameter changed. Objects are
    hashed and compared by identity, so they can be keys of caches.

    Attributes:
        layer: The layer.
        name: Dotted name of the layer in the model.
        rule: The grad samplers of the parameters.
        mean_loss: See `LayerCall`.
        dtype: Dtype of the output.
        stack_key: Type, parameter names, settings, shapes without axis 0 and dtypes. Equal for layers that can be
            stacked.
    """

    layer: nn.Module
    name: str
    rule: Mapping[str, Any]
    mean_loss: bool
    dtype: torch.dtype
    stack_key: tuple[object, ...]
    __hash__ = object.__hash__  # type: ignore[assignment]
    __eq__ = object.__eq__  # type: ignore[assignment]


class TensorCall:
    """One call of a layer that has one input and one output tensor, with the batch on axis 0.

    A fast form of `LayerCall` for the most common layers.

    Attributes:
        uses: The layer, and the uses of its parameters.
        inputs: The input, not detached; None after the call was used.
        shape: Shape of the output, ``(B, ...)``.
        grad: Gradient of the loss w.r.t. the output; None before the backward pass, and after the call was used.
        grad_shape: Shape of ``grad``: that of the output, or of its base tensor if the output is a view.
    """

    __slots__ = ("grad", "grad_shape", "inputs", "shape", "uses")
    uses: LayerUses
    inputs: Tensor | None
    shape: torch.Size
    grad_shape: torch.Size
    grad: Tensor | None

    def layer_call(self) -> LayerCall:
        """Returns the call as a `LayerCall`."""
        assert self.inputs is not None and self.grad is not None
        uses, grad = self.uses, self.grad.reshape(self.shape)
        return LayerCall(uses.layer, (self.inputs.detach(),), grad, name=uses.name, mean_loss=uses.mean_loss)


@dataclass(frozen=True, eq=False)
class Use:
    """The use of one parameter in a call.

    Attributes:
        parameter: The parameter.
        name: Dotted name of the parameter in the model.
        axis_slice: The slice of the leading axis that was used; None for the full parameter.
        local_shape: Shape of the part on this process, if the layer is split over processes; None if it is not split.
    """

    parameter: nn.Parameter
    name: str
    axis_slice: slice | None = None
    local_shape: tuple[int, ...] | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of a per-sample gradient on this process, without the batch axis."""
        return tuple(self.parameter.shape) if self.local_shape is None else self.local_shape

    @property
    def numel(self) -> int:
        """Number of elements of ``shape``."""
        return math.prod(self.shape)


class Recipient(Protocol):
    """Receives the layer calls of a backward pass, as a grad mode does."""

    def receive(self, call: LayerCall, uses: Mapping[str, Use], rule: Any) -> None:
        """Receives a layer call, once the gradient of the layer's output is computed."""

    def receive_tensor_call(self, call: TensorCall) -> None:
        """Receives a call of a layer with one input and one output tensor.

        Other threads may call this method at the same time, and autocast may be enabled. A recipient that does more
        than store the call must do so within ``Capture.reporting``. It must set ``call.inputs`` and ``call.grad`` to
        None after it used them.
        """

    def receive_rows(self, use: Use, grad: Tensor) -> None:
        """Receives a part ``(B, *param.shape)`` of a parameter's per-sample gradient."""


class Listener(Recipient, Protocol):
    """Receives the layer calls and the events of a capture."""

    def forward_started(self, rows: int | None) -> None:
        """Called before a train-mode forward pass of the whole model, with its batch size if known."""

    def backward_ended(self) -> None:
        """Called at the end of a backward pass that reached the model's output."""
