"""Checks that a loop writes no data of the batch to buffers or parameters of the model."""

from __future__ import annotations

from torch import Tensor, nn

from dpengine.capture.tensors import tensors_in
from dpengine.errors import BufferUpdateError

from .loop_record import LoopRecord
from .recorded_call import ModelCall
from .torch_calls import name_of, writes_to


def check_model_not_written(record: LoopRecord, model: nn.Module) -> None:
    """Raises BufferUpdateError if a call of the loop wrote data of the batch to a tensor of the model."""
    dependent = {id(tensor) for tensor in record.data}
    written: set[int] = set()  # addresses of the storages
    for call in record.calls:
        if isinstance(call, ModelCall):
            dependent.update(map(id, call.outputs))
        elif any(id(tensor) in dependent for tensor in tensors_in((call.args, call.kwargs))):
            dependent.update(map(id, tensors_in(call.result)))
            if writes_to(name_of(call.function), call.kwargs):
                target = tensors_in(call.kwargs.get("out", call.args[:1]))
                dependent.update(map(id, target))
                written.update(filter(None, map(_memory_of, target)))
    for kind, tensors in (("Buffer", model.named_buffers()), ("Parameter", model.named_parameters())):
        for name, tensor in tensors:
            if id(tensor) in dependent or _memory_of(tensor) in written:
                raise BufferUpdateError(
                    f"{kind} '{name}' was written by the loop from data of a batch. It is part of the model, and would "
                    "be released without noise.",
                    fix="Store such a value outside the model, for monitoring only. An average of weights may be "
                    "updated after optimizer.step().",
                )


def _memory_of(tensor: Tensor) -> int | None:
    try:
        return tensor.untyped_storage().data_ptr() or None
    except (RuntimeError, NotImplementedError):  # the tensor has no storage
        return None
