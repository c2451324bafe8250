"""Calls in the record of a training loop."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from dpengine.capture.replay import Pass
from dpengine.capture.tensors import tensors_in

Place = tuple[str, int, int]  # "data", "list", "output" or "random", index of the call, index of the tensor


class Call(NamedTuple):
    """A call of a torch function.

    Attributes:
        function: The function.
        args: Its arguments.
        kwargs: Its keyword arguments.
        result: What it returned.
        grad: Whether gradients were enabled.
        autocast: Device type and dtype of each autocast that was enabled.
        random: State of the random generators before the call, if it changed them.
        harmless: Whether a branch that the result chooses only raises an error or notes values.
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
    """A forward pass of the model: its inputs, the outputs that the loop got, and the recorded pass."""

    inputs: list[Tensor]
    outputs: list[Tensor]
    recorded: Pass


def results_of(call: Call | ModelCall) -> list[Tensor]:
    """Returns the tensors that a call returned."""
    return call.outputs if isinstance(call, ModelCall) else tensors_in(call.result)
