"""Finds data of a batch that reach a model outside the recorded torch calls."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from dpengine.capture.tensors import tensors_in

if TYPE_CHECKING:
    from .loop_record import LoopRecord

Digest = tuple[tuple[int, ...], str, str]  # shape, sum and sum of squares of a tensor

EARLIER_GRAPH = "the loop uses a tensor with the graph of an earlier batch, such as a hidden state"


def untracked_input(record: LoopRecord, model_inputs: Any) -> str | None:
    """Returns the reason why the inputs of a model cannot be traced to the batch; None if they can."""
    inputs = tensors_in(model_inputs)
    if any(id(tensor) in record.earlier_tensors for tensor in inputs):
        return EARLIER_GRAPH
    if record.conversions:
        name = record.conversions[-1][1]
        if any(type(leaf) is float for leaf in pytree.tree_leaves(model_inputs)):
            return f"the model receives a number, and {name} read a number from the batch"
        if inputs and not any(id(tensor) in record.dependent for tensor in inputs):
            return f"the input of the model may be computed from numbers that {name} read from the batch"
    elif inputs and not record.drew_random and not any(id(tensor) in record.dependent for tensor in inputs):
        return "the input of the model was not computed from tensors of the batch by torch functions"
    return None


def attribute_of_batch(record: LoopRecord, model: nn.Module) -> str | None:
    """Returns a description of a model attribute with a tensor that combines samples; None if there is none.

    Such a tensor is computed from the batch, and does not have one entry per sample.
    """
    for prefix, module in model.named_modules():
        for name, value in vars(module).items():
            if name in ("_parameters", "_buffers", "_modules"):  # the independence checks compare these after the pass
                continue
            tensors: Sequence[Tensor] = (value,) if isinstance(value, Tensor) else ()
            if type(value) in (list, dict):
                tensors = tensors_in(value)
            if any(id(t) in record.dependent and record.samples not in t.shape[:2] for t in tensors):
                return f"attribute '{name}' of {f'layer {prefix!r}' if prefix else 'the model'}"
    return None


def digest(tensor: Tensor) -> Digest:
    """Returns the shape, sum and sum of squares of a tensor, which change if its values change."""
    values = tensor.to_dense() if tensor.layout is not torch.strided else tensor
    values = values.detach().to(torch.complex128 if tensor.is_complex() else torch.float64)
    return tuple(tensor.shape), repr(values.sum().item()), repr(values.abs().square().sum().item())
