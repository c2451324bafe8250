"""Cells of RNN, LSTM and GRU: one step, and all steps with a custom backward pass.

Each cell has two implementations. ``step`` computes one step by ordinary operations, and defines the cell. ``run`` and
``back`` compute all steps in place and outside the autograd graph. In ``back``, the gradient with respect to a
pre-activation is a product of two terms: the derivative of the step, computed for all steps at once, and the gradient
with respect to the state, which the loop updates. ``run`` and ``back`` use compiled code if `native` has it.

Axes: B samples, T time, S = T + 1 slots (see Note [slots]), H hidden, P hidden after projection, G gates times H.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .native import gru_back, gru_run, lstm_back, lstm_run, native_for
from .schedule import Schedule

Elementwise = Callable[[Tensor], Tensor]
Step = tuple[Tensor, "Tensor | None"]
Loop = tuple["Tensor | None", "Tensor | None"]
Deltas = tuple[Tensor, Tensor]


@dataclass(frozen=True, eq=False)
class HiddenWeights:
    """Values of the recurrent weights, outside the autograd graph. ``project_PH`` is ``weight_hr`` of an LSTM."""

    hidden_GP: Tensor
    bias_G: Tensor | None = None
    project_PH: Tensor | None = None


@dataclass(frozen=True, eq=False)
class Trace:
    """Results of a loop over time, for the output and the backward pass. Fields that a cell does not have are None."""

    states_BSP: Tensor
    cells_BSH: Any  # LSTM
    gates_BTG: Any = None  # LSTM, GRU: after the nonlinearity
    extra_BTH: Any = None  # GRU: hidden part of the candidate; LSTM with projection: output before it


@dataclass(frozen=True, eq=False)
class Cell:
    """Type of recurrence.

    Attributes:
        step: ``(input part, hidden part, state, cell state or None) -> (output, cell state or None)`` for one step.
        run: ``(input part (B, T, G), weights, states (B, S, P), cell states (B, S, H) or None, schedule) -> (gates,
            extra)``. Computes all states from the initial states, in place. May overwrite the input part.
        back: ``(trace, weights, schedule, gradient of the states (B, S, P), gradient of the last cell state) ->
            (gradient of the input part, gradient of the hidden part)``. Overwrites the given gradients: the first one
            with the total gradient of every state, the second one with the gradient of the first cell state.
    """

    step: Callable[[Tensor, Tensor, Tensor, Any], Step]
    run: Callable[[Tensor, HiddenWeights, Tensor, Any, Schedule], Loop]
    back: Callable[[Trace, HiddenWeights, Schedule, Tensor, Any], Deltas]


def _rnn(nonlinearity: Elementwise, in_place: Elementwise, derivative: Elementwise) -> Cell:
    def step(inputs: Tensor, hidden: Tensor, _state: Tensor, _cell: Any) -> Step:
        return nonlinearity(inputs + hidden), None

    def run(inputs: Tensor, weights: HiddenWeights, states: Tensor, _cells: Any, schedule: Schedule) -> Loop:
        inputs = inputs if weights.bias_G is None else inputs.add_(weights.bias_G)
        weight = weights.hidden_GP.t()
        for x, h_old, h_new in schedule.steps_of(inputs, schedule.before(states), schedule.after(states)):
            in_place(torch.addmm(x, h_old, weight, out=h_new))
        return None, None

    def back(trace: Trace, weights: HiddenWeights, schedule: Schedule, grad_states: Tensor, _grad_c: Any) -> Deltas:
        deltas = derivative(schedule.after(trace.states_BSP))
        buffers = (deltas, schedule.after(grad_states), schedule.before(grad_states))
        for delta, g_new, g_old in schedule.steps_back(*buffers):
            g_old.addmm_(delta.mul_(g_new), weights.hidden_GP)
        return deltas, deltas

    return Cell(step, run, back)


def _lstm_step(inputs: Tensor, hidden: Tensor, _state: Tensor, cell: Any) -> Step:
    i, f, g, o = (inputs + hidden).chunk(4, dim=-1)
    cell = f.sigmoid() * cell + i.sigmoid() * g.tanh()
    return o.sigmoid() * cell.tanh(), cell


def _lstm_run(inputs: Tensor, weights: HiddenWeights, states: Tensor, cells: Any, schedule: Schedule) -> Loop:
    library = native_for(inputs, states, cells, weights.hidden_GP, weights.bias_G, weights.project_PH)
    if library is not None:
        return lstm_run(library, inputs, weights, states, cells, schedule)
    gates, size = inputs if weights.bias_G is None else inputs.add_(weights.bias_G), cells.shape[-1]
    weight, project = weights.hidden_GP.t(), weights.project_PH
    # Without projection, the output of the cell is the state.
    outputs = schedule.after(states) if project is None else torch.zeros_like(schedule.after(cells))
    hidden_states = (schedule.before(states), schedule.after(states))
    cell_states = (schedule.before(cells), schedule.after(cells))
    buffers = (gates, gates[..., : 2 * size], *gates.split(size, dim=-1), *hidden_states, *cell_states, outputs)
    for all_gates, i_and_f, i, f, g, o, h_old, h_new, c_old, c_new, output in schedule.steps_of(*buffers):
        all_gates.addmm_(h_old, weight)
        i_and_f.sigmoid_()
        g.tanh_()
        o.sigmoid_()
        torch.mul(f, c_old, out=c_new).addcmul_(i, g)
        torch.tanh(c_new, out=output).mul_(o)
        if project is not None:
            torch.mm(output, project.t(), out=h_new)
    return gates, None if project is None else outputs


def _lstm_back(trace: Trace, weights: HiddenWeights, schedule: Schedule, grad_states: Tensor, grad_c: Any) -> Deltas:
    library = native_for(trace.gates_BTG, trace.cells_BSH, weights.hidden_GP, weights.project_PH, grad_states, grad_c)
    if library is not None:
        return lstm_back(library, trace, weights, schedule, grad_states, grad_c)
    size, project = grad_c.shape[-1], weights.project_PH
    c_before, tanh_c = schedule.before(trace.cells_BSH), schedule.after(trace.cells_BSH).tanh()
    i, f, g, o = trace.gates_BTG.split(size, dim=-1)
    # i, f and g change the cell state, and o changes the output.
    deltas = torch.cat([g * i * (1 - i), c_before * f * (1 - f), i * (1 - g * g), tanh_c * o * (1 - o)], dim=-1)
    through_c = o * (1 - tanh_c * tanh_c)
    by_cell, by_output = deltas[..., : 3 * size].unflatten(-1, (3, size)), deltas[..., 3 * size :]
    buffers = (deltas, by_cell, by_output, through_c, f, schedule.after(grad_states), schedule.before(grad_states))
    for delta, delta_ifg, delta_o, to_c, forget, g_new, g_old in schedule.steps_back(*buffers):
        g_output = g_new if project is None else g_new @ project
        g_cell = grad_c[: len(delta)].addcmul_(g_output, to_c)
        delta_ifg.mul_(g_cell.unsqueeze(1))
        delta_o.mul_(g_output)
        g_cell.mul_(forget)
        g_old.addmm_(delta, weights.hidden_GP)
    return deltas, deltas


def _gru_step(inputs: Tensor, hidden: Tensor, state: Tensor, _cell: Any) -> Step:
    (x_r, x_z, x_n), (h_r, h_z, h_n) = inputs.chunk(3, dim=-1), hidden.chunk(3, dim=-1)
    update = (x_z + h_z).sigmoid()
    candidate = (x_n + (x_r + h_r).sigmoid() * h_n).tanh()
    return candidate + update * (state - candidate), None


def _gru_run(gates: Tensor, weights: HiddenWeights, states: Tensor, _cells: Any, schedule: Schedule) -> Loop:
    library = native_for(gates, states, weights.hidden_GP, weights.bias_G)
    if library is not None:
        return gru_run(library, gates, weights, states, schedule)
    size, weight, bias = states.shape[-1], weights.hidden_GP.t(), weights.bias_G
    before, after = schedule.before(states), schedule.after(states)
    extra = torch.zeros_like(after)
    buffers = (gates[..., : 2 * size], *gates.split(size, dim=-1), extra, before, after)
    for r_and_z, r, z, n, hidden_n, h_old, h_new in schedule.steps_of(*buffers):
        hidden = h_old @ weight if bias is None else torch.addmm(bias, h_old, weight)
        r_and_z.add_(hidden[:, : 2 * size]).sigmoid_()
        hidden_n.copy_(hidden[:, 2 * size :])
        n.addcmul_(r, hidden_n).tanh_()
        torch.lerp(n, h_old, z, out=h_new)
    return gates, extra


def _gru_back(trace: Trace, weights: HiddenWeights, schedule: Schedule, grad_states: Tensor, _grad_c: Any) -> Deltas:
    library = native_for(trace.gates_BTG, trace.states_BSP, trace.extra_BTH, weights.hidden_GP, grad_states)
    if library is not None:
        return gru_back(library, trace, weights, schedule, grad_states)
    size = grad_states.shape[-1]
    r, z, n = trace.gates_BTG.split(size, dim=-1)
    by_n = (1 - z) * (1 - n * n)
    by_z = (schedule.before(trace.states_BSP) - n) * z * (1 - z)
    # r scales the hidden part of the candidate, but not its input part.
    deltas = torch.cat([by_n * trace.extra_BTH * r * (1 - r), by_z, by_n * r, by_n], dim=-1)
    hidden = deltas[..., : 3 * size]
    buffers = (deltas.unflatten(-1, (4, size)), hidden, z, schedule.after(grad_states), schedule.before(grad_states))
    for delta, delta_hidden, keep, g_new, g_old in schedule.steps_back(*buffers):
        delta.mul_(g_new.unsqueeze(1))
        g_old.addcmul_(g_new, keep).addmm_(delta_hidden, weights.hidden_GP)
    return torch.cat([deltas[..., : 2 * size], deltas[..., 3 * size :]], dim=-1), hidden


CELLS = {
    "RNN_TANH": _rnn(torch.tanh, torch.tanh_, lambda state: 1 - state * state),
    "RNN_RELU": _rnn(torch.relu, torch.relu_, lambda state: (state > 0).to(state.dtype)),
    "LSTM": Cell(_lstm_step, _lstm_run, _lstm_back),
    "GRU": Cell(_gru_step, _gru_run, _gru_back),
}
