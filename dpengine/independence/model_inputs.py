"""Finds data of a batch that reach a model by a way that a record of the loop does not follow."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from dpengine.capture.tensors import tensors_in

if TYPE_CHECKING:
    from .loop_record import LoopRecord

Digest = tuple[tuple[int, ...], str, str]  # of a tensor: shape, sum, sum of squares

OLDER = "the loop uses a tensor with the graph of an earlier batch, such as a hidden state"


def unseen_input(record: LoopRecord, given: Any) -> str | None:
    """Returns why the inputs of a model cannot be followed; None if they can."""
    inputs = tensors_in(given)
    if any(id(tensor) in record.older for tensor in inputs):
        return OLDER
    if record.leavers:
        name = record.leavers[-1][1]
        if any(type(leaf) is float for leaf in pytree.tree_leaves(given)):
            return f"the model gets a number, and one was read from the batch by {name}"
        if inputs and not any(id(tensor) in record.dependent for tensor in inputs):
            return f"the input of the model comes from numbers that were read from the batch by {name}"
    elif inputs and not record.drew and not any(id(tensor) in record.dependent for tensor in inputs):
        return "the input of the model does not come from tensors of the batch by calls of torch"
    return None


def attribute_of_batch(record: LoopRecord, model: nn.Module) -> str | None:
    """Returns the name of an attribute that holds a result of the loop without an entry for each sample."""
    for prefix, module in model.named_modules():
        for name, value in vars(module).items():
            if name in ("_parameters", "_buffers", "_modules"):  # compared after the pass
                continue
            held = (value,) if isinstance(value, Tensor) else tensors_in(value) if type(value) in (list, dict) else ()
            if any(id(t) in record.dependent and record.samples not in t.shape[:2] for t in held):
                return f"attribute '{name}' of {f'layer {prefix!r}' if prefix else 'the model'}"
    return None


def digest(tensor: Tensor) -> Digest:
    """Returns numbers that tell whether the values of a tensor changed."""
    values = tensor.to_dense() if tensor.layout is not torch.strided else tensor
    values = values.detach().to(torch.complex128 if tensor.is_complex() else torch.float64)
    return tuple(tensor.shape), repr(values.sum().item()), repr(values.abs().square().sum().item())
