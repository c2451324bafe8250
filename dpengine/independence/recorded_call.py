"""Calls in the record of a training loop."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from dpengine.capture.replay import ForwardPass
from dpengine.capture.tensors import tensors_in

# Identifies a tensor: "data", "list", "output" or "random"; index of the call; index of the tensor in the call.
TensorKey = tuple[str, int, int]


class Call(NamedTuple):
    """A call of a torch function.

    Attributes:
        function: The function.
        args: Its arguments.
        kwargs: Its keyword arguments.
        result: Its return value.
        grad: Whether gradients were enabled.
        autocast: Device type and dtype of each enabled autocast.
        random: State of the random generators before the call; None if the call did not change them.
        harmless: Whether the branches that the result selects only raise errors or log values.
    """

    function: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    result: Any
    grad: bool
    autocast: tuple[tuple[str, torch.dtype], ...]
    random: list[Tensor] | None
    harmless: bool


class ModelCall(NamedTuple):
    """A forward pass of the model: the inputs, the outputs that the loop received, and the recorded pass."""

    inputs: list[Tensor]
    outputs: list[Tensor]
    recorded: ForwardPass


def results_of(call: Call | ModelCall) -> list[Tensor]:
    """Returns the tensors in the result of a call."""
    return call.outputs if isinstance(call, ModelCall) else tensors_in(call.result)
