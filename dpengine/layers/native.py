"""LSTM and GRU over all steps, by the compiled kernels of ``dpengine.kernels`` and matrix products of torch.

The functions implement ``Cell.run`` and ``Cell.back``, with the library as first argument. The kernels get the address
of time t in each buffer, and the stride between samples.

Axes: B samples, T time, S slots (see Note [slots]), H hidden, P hidden after projection, G gates times H.
"""

from __future__ import annotations

import ctypes
from typing import Any

import torch
from torch import Tensor

from dpengine.kernels import onednn
from dpengine.kernels.library import native_library

from .schedule import Schedule

_BYTES = 4


def native_for(*tensors: Tensor | None) -> ctypes.CDLL | None:
    """Returns the library if it is available and supports these tensors; else None."""
    supported = all(
        type(t) is Tensor and t.device.type == "cpu" and t.dtype == torch.float32 and t.is_contiguous()
        for t in tensors
        if t is not None
    )
    return native_library() if supported else None


def lstm_run(
    library: ctypes.CDLL, gates: Tensor, weights: Any, states: Tensor, cells: Tensor, schedule: Schedule
) -> tuple[Tensor, Tensor | None]:
    """Computes states and cell states in place. Returns the gates, and the output before projection, if any."""
    samples, size, project = len(gates), cells.shape[-1], weights.project_PH
    scratch, bias = _scratch(gates, weights)
    weight = weights.hidden_GP.t()
    state = states[schedule.start(states)].clone(memory_format=torch.contiguous_format)  # contiguous, for torch.mm
    outputs = None if project is None else gates.new_zeros(samples, schedule.steps, size)
    packed = gates.new_empty(samples, size) if project is not None else state
    buffer = states if outputs is None else outputs
    strides = (size, gates.stride(0), cells.stride(0), buffer.stride(0))
    for time, count, before, after in schedule.step_indices(samples):
        hidden = _product(_first(state, count), weight, scratch)
        library.lstm_step_f32(
            *(count, *strides, hidden.data_ptr(), bias.data_ptr(), _at(gates, time), _at(cells, before)),
            *(_at(cells, after), _at(buffer, after if outputs is None else time), packed.data_ptr()),
        )
        if project is not None:
            torch.mm(_first(packed, count), project.t(), out=_first(state, count))
            states[:count, after] = _first(state, count)
    return gates, outputs


def lstm_back(
    library: ctypes.CDLL, trace: Any, weights: Any, schedule: Schedule, grad_states: Tensor, grad_c: Tensor
) -> tuple[Tensor, Tensor]:
    """Returns the gradients of the input part and the hidden part of the pre-activations, which are the same tensor."""
    gates, cells, project = trace.gates_BTG, trace.cells_BSH, weights.project_PH
    samples, size = grad_c.shape
    deltas, packed = torch.empty_like(gates), gates.new_empty(samples, gates.shape[-1])
    g_output = None if project is None else gates.new_empty(samples, size)
    slots = grad_states.unbind(1)
    strides = (size, gates.stride(0), cells.stride(0), (grad_states if g_output is None else g_output).stride(0))
    for time, count, before, after in schedule.step_indices(samples)[::-1]:
        if g_output is not None:
            torch.mm(_first(slots[after], count), project, out=_first(g_output, count))
        library.lstm_back_f32(
            *(count, *strides, _at(gates, time), _at(cells, before), _at(cells, after)),
            *(_at(grad_states, after) if g_output is None else g_output.data_ptr(), grad_c.data_ptr()),
            *(_at(deltas, time), packed.data_ptr()),
        )
        _add_product(_first(slots[before], count), _first(packed, count), weights.hidden_GP)
    return deltas, deltas


def gru_run(
    library: ctypes.CDLL, gates: Tensor, weights: Any, states: Tensor, schedule: Schedule
) -> tuple[Tensor, Tensor]:
    """Computes the states in place. Returns the gates, and the hidden part of the candidate."""
    samples, size = len(gates), states.shape[-1]
    scratch, bias = _scratch(gates, weights)
    weight = weights.hidden_GP.t()
    state = states[schedule.start(states)].clone(memory_format=torch.contiguous_format)
    extra = gates.new_zeros(samples, schedule.steps, size)
    strides = (size, gates.stride(0), states.stride(0), extra.stride(0))
    for time, count, before, after in schedule.step_indices(samples):
        hidden = _product(_first(state, count), weight, scratch)
        library.gru_step_f32(
            *(count, *strides, hidden.data_ptr(), bias.data_ptr(), _at(gates, time), _at(extra, time)),
            *(_at(states, before), _at(states, after), state.data_ptr()),
        )
    return gates, extra


def gru_back(
    library: ctypes.CDLL, trace: Any, weights: Any, schedule: Schedule, grad_states: Tensor
) -> tuple[Tensor, Tensor]:
    """Returns the gradients of the input part and of the hidden part of the pre-activations."""
    gates, states, extra = trace.gates_BTG, trace.states_BSP, trace.extra_BTH
    samples, size = len(gates), states.shape[-1]
    deltas, by_hidden = torch.empty_like(gates), torch.empty_like(gates)
    packed, slots = gates.new_empty(samples, gates.shape[-1]), grad_states.unbind(1)
    strides = (size, gates.stride(0), states.stride(0), extra.stride(0))
    for time, count, before, after in schedule.step_indices(samples)[::-1]:
        library.gru_back_f32(
            *(count, *strides, _at(gates, time), _at(extra, time), _at(states, before), _at(grad_states, after)),
            *(_at(grad_states, before), _at(deltas, time), _at(by_hidden, time), packed.data_ptr()),
        )
        _add_product(_first(slots[before], count), _first(packed, count), weights.hidden_GP)
    return deltas, by_hidden


def _scratch(gates: Tensor, weights: Any) -> tuple[Tensor, Tensor]:
    """Returns scratch memory for the hidden part of the gates in one step, and the bias."""
    width = gates.shape[-1]
    return gates.new_empty(len(gates), width), gates.new_zeros(width) if weights.bias_G is None else weights.bias_G


def _product(left_MK: Tensor, right_KN: Tensor, scratch: Tensor) -> Tensor:
    """Returns the product, which may be in the scratch memory."""
    if onednn.is_faster(left_MK, right_KN):
        return onednn.product(left_MK, right_KN)
    return torch.mm(left_MK, right_KN, out=_first(scratch, len(left_MK)))


def _add_product(out: Tensor, left_MK: Tensor, right_KN: Tensor) -> None:
    if onednn.is_faster(left_MK, right_KN):
        out.add_(onednn.product(left_MK, right_KN))
    else:
        out.addmm_(left_MK, right_KN)


def _first(tensor_B: Tensor, count: int) -> Tensor:
    return tensor_B if count == len(tensor_B) else tensor_B[:count]


def _at(buffer: Tensor, index: int) -> int:
    return buffer.data_ptr() + index * buffer.stride(1) * _BYTES
