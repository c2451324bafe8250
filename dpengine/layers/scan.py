"""Recurrence over time that uses each weight once.

Note [two passes]: autograd through a loop over time would use the hidden weight in every step, and capture would record
every use. Here the loop runs outside the autograd graph. Then `linear_node` adds one node to the graph. Its inputs are
the previous states of all steps and the hidden weight. It has the gradients of ``F.linear``, but does not compute its
output. The output gradient of this node is the gradient with respect to the pre-activations of all steps, which
``Scan`` computes by backpropagation through time. Time is thus an ordinary axis of one use of the weight.

Axes: B samples, T time, S slots of states (see Note [slots]), H hidden, P hidden after projection, G gates times H.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .cells import Cell, HiddenWeights, Trace
from .schedule import Schedule

Results = tuple[Tensor, Tensor, "Tensor | None"]
Linear = Callable[[Tensor], Tensor]


def scan(
    cell: Cell,
    inputs_BTG: Tensor,
    start: tuple[Tensor, Tensor | None],
    schedule: Schedule,
    *,
    values: HiddenWeights,
    hidden: Linear,
    project: Linear | None,
) -> Results:
    """Runs a cell over time. Overwrites ``inputs_BTG``. ``values`` are the recurrent weights, outside the graph."""
    trace = _trace(cell, inputs_BTG, start, schedule, values)
    hidden_BTG = hidden(schedule.for_caller(schedule.before(trace.states_BSP)))
    projected_BTP = None if project is None else project(schedule.for_caller(trace.extra_BTH))
    return Scan.apply(inputs_BTG, hidden_BTG, projected_BTP, *start, cell, schedule, values, trace)


def unroll(
    cell: Cell,
    inputs_BTG: Tensor,
    start: tuple[Tensor, Tensor | None],
    schedule: Schedule,
    *,
    hidden: Linear,
    project: Linear | None,
) -> Results:
    """Runs a cell over time with ordinary operations, for ``torch.func`` transforms, which ``scan`` rejects."""
    # All sequences have equal length, because torch does not support packed sequences in these transforms.
    state, memory = start
    outputs = []
    for (inputs,) in schedule.steps_of(inputs_BTG):
        state, memory = cell.step(inputs, hidden(state), state, memory)
        state = state if project is None else project(state)
        outputs.append(state)
    return torch.stack(outputs[::-1] if schedule.reverse else outputs, dim=1), state, memory


def _trace(
    cell: Cell, inputs_BTG: Tensor, start: tuple[Tensor, Tensor | None], schedule: Schedule, values: HiddenWeights
) -> Trace:
    with torch.no_grad():
        states = _slots(start[0], schedule)
        cells = None if start[1] is None else _slots(start[1], schedule)
        gates, extra = cell.run(schedule.ordered(inputs_BTG.detach()).contiguous(), values, states, cells, schedule)
    return Trace(states, cells, gates, extra)


def _slots(first_B: Tensor, schedule: Schedule) -> Tensor:
    # If sequences have different lengths, slots after the end of a sequence are not written. They are masked.
    buffer = first_B.new_empty((len(first_B), schedule.steps + 1, *first_B.shape[1:]))
    buffer[schedule.start(buffer)] = schedule.ordered(first_B)
    return buffer


def _results(trace: Trace, schedule: Schedule) -> Results:
    # Copied, because the caller may modify the results in place.
    output_BTP = schedule.for_caller(schedule.after(trace.states_BSP)).clone(memory_format=torch.contiguous_format)
    last_cell = None if trace.cells_BSH is None else _last(trace.cells_BSH, schedule)
    return output_BTP, _last(trace.states_BSP, schedule), last_cell


def _last(buffer_BS: Tensor, schedule: Schedule) -> Tensor:
    return schedule.restored(buffer_BS[schedule.end(buffer_BS)]).clone(memory_format=torch.contiguous_format)


class Scan(torch.autograd.Function):
    """Adds the results of a loop over time to the autograd graph. See Note [two passes]."""

    @staticmethod
    def forward(ctx: Any, inputs, hidden, projected, h0, c0, cell, schedule, values, trace) -> Results:  # type: ignore[no-untyped-def,override]
        ctx.set_materialize_grads(False)
        ctx.cell, ctx.schedule = cell, schedule
        ctx.save_for_backward(
            *(trace.states_BSP, trace.cells_BSH, trace.gates_BTG, trace.extra_BTH),
            *(values.hidden_GP, values.bias_G, values.project_PH),
        )
        return _results(trace, schedule)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        if torch.is_grad_enabled():
            # The states are constants in the graph, so a second derivative would silently lack terms.
            raise RuntimeError(
                "The backward pass of a private recurrent layer cannot be differentiated (create_graph=True). Convert "
                "the layer with dpengine.layers.replacements.to_original(layer), or exclude it from the penalty."
            )
        grad_output, grad_h, grad_c = grads
        saved = ctx.saved_tensors
        trace, values = Trace(*saved[:4]), HiddenWeights(*saved[4:])
        schedule = ctx.schedule
        grad_states = torch.zeros_like(trace.states_BSP)
        if grad_output is not None:
            schedule.after(grad_states).copy_(schedule.ordered(grad_output))
        if grad_h is not None:
            grad_states[schedule.end(grad_states)] += schedule.ordered(grad_h)
        if trace.cells_BSH is not None:
            shape = trace.cells_BSH[:, 0].shape
            grad_c = grad_states.new_zeros(shape) if grad_c is None else schedule.ordered(grad_c)
            grad_c = grad_c.clone(memory_format=torch.contiguous_format)
        by_inputs, by_hidden = ctx.cell.back(trace, values, schedule, grad_states, grad_c)
        grad_inputs = schedule.for_caller(by_inputs)
        # One tensor if both gradients are equal, so that computations on it can be shared.
        grad_hidden = grad_inputs if by_hidden is by_inputs else schedule.for_caller(by_hidden)
        grad_projected = None
        if values.project_PH is not None:
            grad_projected = schedule.for_caller(schedule.after(grad_states))
        grad_h0 = schedule.restored(grad_states[schedule.start(grad_states)])
        grad_c0 = None if grad_c is None else schedule.restored(grad_c)
        return grad_inputs, grad_hidden, grad_projected, grad_h0, grad_c0, None, None, None, None
