"""Replacements of torch's recurrent layers and cells that use each weight once, in ``F.linear``.

A replacement has no additional state, so ``module.__class__ = PrivateLSTM`` converts an ``nn.LSTM`` in place, and
``module.__class__ = nn.LSTM`` converts it back. Outputs and gradients are equal to those of the original. Capture
records the uses of the weights, from which per-sample gradients are computed.

Axes: B samples, T time, F features, G gates, H hidden, P hidden after projection, L layers times directions.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence

from .cells import CELLS, HiddenWeights
from .linear_node import linear_node
from .scan import Results, scan, unroll
from .schedule import Ragged, Schedule

State = tuple[Tensor, "Tensor | None"]
Direction = Callable[[Any, Tensor, int, State, Schedule], Results]
CustomCell = Callable[[Tensor, Any], Any]


class PrivateRNN(nn.RNN):
    """``nn.RNN`` with per-sample gradients. Takes batched (3-D) or packed input."""

    def forward(self, input: Any, hx: Any = None) -> Any:
        """See ``nn.RNN.forward``. Raises ValueError for input without a batch axis."""
        output, (h_n, _) = _forward(self, input, None if hx is None else (hx, None))
        return output, h_n


class PrivateGRU(nn.GRU):
    """``nn.GRU`` with per-sample gradients. Takes batched (3-D) or packed input."""

    def forward(self, input: Any, hx: Any = None) -> Any:
        """See ``nn.GRU.forward``. Raises ValueError for input without a batch axis."""
        output, (h_n, _) = _forward(self, input, None if hx is None else (hx, None))
        return output, h_n


class PrivateLSTM(nn.LSTM):
    """``nn.LSTM`` with per-sample gradients. Takes batched (3-D) or packed input."""

    def forward(self, input: Any, hx: Any = None) -> Any:
        """See ``nn.LSTM.forward``. Raises ValueError for input without a batch axis."""
        return _forward(self, input, hx)


def run_cells(module: Any, cells: Sequence[CustomCell], inputs: Any, hx: State | None) -> tuple[Any, State]:
    """Runs custom cells over time, in layers and directions, like ``nn.RNN``.

    ``cells`` has one cell, ``(input (B, F), state) -> state``, for each layer and direction. A state is a tensor
    ``(B, H)``, or a pair of such tensors if ``module.has_cell_state``. The first tensor is the output. ``hx`` has shape
    ``(L, B, H)``; None means zeros. Each call of a cell gets all samples of the batch, in order. If sequences have
    different lengths, outputs of a cell after the end of a sequence are discarded.
    """
    directions = 2 if module.bidirectional else 1

    def direction(module: Any, inputs_BTF: Tensor, layer: int, start: State, schedule: Schedule) -> Results:
        cell = cells[directions * layer + int(schedule.reverse)]
        return _over_time(cell, inputs_BTF, start, schedule)

    return _forward(module, inputs, hx, direction)


def _over_time(cell: CustomCell, inputs_BTF: Tensor, start: State, schedule: Schedule) -> Results:
    ended_BT1 = None if schedule.ragged is None else schedule.restored(schedule.ragged.padding_BT1)
    state: tuple[Any, ...] = start[:1] if start[1] is None else start
    outputs_B: list[Any] = [None] * schedule.steps
    for time in reversed(range(schedule.steps)) if schedule.reverse else range(schedule.steps):
        result = cell(inputs_BTF[:, time], state[0] if len(state) == 1 else state)
        new = (result,) if isinstance(result, Tensor) else tuple(result)
        if ended_BT1 is not None:
            new = tuple(torch.where(ended_BT1[:, time], x, y) for x, y in zip(state, new, strict=True))
        state, outputs_B[time] = new, new[0]
    return torch.stack(outputs_B, dim=1), state[0], state[1] if len(state) > 1 else None


def _forward(
    module: Any, inputs: Tensor | PackedSequence, hx: State | None, direction: Direction | None = None
) -> tuple[Any, State]:
    # Without gradients, the kernels of torch are used.
    native = direction is None and not torch.is_grad_enabled() and not torch._C._are_functorch_transforms_active()
    direction = direction or _run_direction
    if isinstance(inputs, PackedSequence):
        _check(module, inputs.data, int(inputs.batch_sizes[0]), len(inputs.batch_sizes), hx)
        return _native_packed(module, inputs, hx) if native else _packed(module, inputs, hx, direction)
    if inputs.dim() != 3:
        raise ValueError(
            f"{type(module).__name__} needs batched input with 3 dimensions, or a packed sequence, for per-sample "
            f"gradients; got {inputs.dim()} dimensions. Add the batch axis: "
            f"input.unsqueeze({0 if module.batch_first else 1})."
        )
    inputs_BTF = inputs if module.batch_first else inputs.transpose(0, 1)
    batch_size, steps = inputs_BTF.shape[:2]
    _check(module, inputs, batch_size, steps, hx)
    if native:
        return _native(module, (inputs,), _start(module, inputs, batch_size, hx), (module.batch_first,))
    output_BTP, last = _layers(module, inputs_BTF, hx, None, direction)
    return output_BTP if module.batch_first else output_BTP.transpose(0, 1), last


def _packed(
    module: Any, inputs: PackedSequence, hx: State | None, direction: Direction
) -> tuple[PackedSequence, State]:
    padded_BTF, _ = pad_packed_sequence(inputs, batch_first=True)
    ragged = Ragged.of(inputs)
    output_BTP, last = _layers(module, padded_BTF, hx, ragged, direction)
    longest_first_BTP = output_BTP if ragged.order_B is None else output_BTP.index_select(0, ragged.order_B)
    packed = pack_padded_sequence(longest_first_BTP, ragged.lengths_B.cpu(), batch_first=True)
    return inputs._replace(data=packed.data), last


def _native_packed(module: nn.RNNBase, inputs: PackedSequence, hx: State | None) -> tuple[PackedSequence, State]:
    first = _start(module, inputs.data, int(inputs.batch_sizes[0]), hx)
    if inputs.sorted_indices is not None:
        first = [_select(state, inputs.sorted_indices) for state in first]
    data, last = _native(module, (inputs.data, inputs.batch_sizes), first, ())
    if inputs.unsorted_indices is not None:
        last = _select(last, inputs.unsorted_indices, dim=1)
    return inputs._replace(data=data), last


def _select(state: State, index_B: Tensor, dim: int = 0) -> State:
    return state[0].index_select(dim, index_B), None if state[1] is None else state[1].index_select(dim, index_B)


def _native(
    module: nn.RNNBase, inputs: tuple[Tensor, ...], first: list[State], layout: tuple[bool, ...]
) -> tuple[Tensor, State]:
    h0 = torch.stack([state for state, _ in first])
    c0 = [cell for _, cell in first if cell is not None]
    weights = [_value(getattr(module, name)) for names in module._all_weights for name in names]
    settings = (weights, module.bias, module.num_layers, module.dropout, module.training, module.bidirectional)
    kernel = getattr(torch, module.mode.lower())
    output, *last = kernel(*inputs, [h0, torch.stack(c0)] if c0 else h0, *settings, *layout)
    return output, (last[0], last[1] if c0 else None)


def _layers(
    module: Any, inputs_BTF: Tensor, hx: State | None, ragged: Ragged | None, direction: Direction
) -> tuple[Tensor, State]:
    batch_size, steps = inputs_BTF.shape[:2]
    directions = 2 if module.bidirectional else 1
    first = iter(_start(module, inputs_BTF, batch_size, hx))
    last: list[Results] = []
    output = inputs_BTF
    for layer in range(module.num_layers):
        if layer > 0 and module.dropout > 0 and module.training:
            output = F.dropout(output, module.dropout, training=True)
        schedules = [Schedule(steps, reverse, ragged) for reverse in (False, True)[:directions]]
        results = [direction(module, output, layer, next(first), schedule) for schedule in schedules]
        output = results[0][0] if directions == 1 else torch.cat([result[0] for result in results], dim=-1)
        last.extend(results)
    cells = [cell for _, _, cell in last if cell is not None]
    return output, (torch.stack([state for _, state, _ in last]), torch.stack(cells) if cells else None)


def _run_direction(module: nn.RNNBase, inputs_BTF: Tensor, layer: int, start: State, schedule: Schedule) -> Results:
    suffix = f"l{layer}_reverse" if schedule.reverse else f"l{layer}"

    def weight(kind: str) -> Any:
        # Read at every use, because capture may replace the attribute between uses.
        return getattr(module, f"{kind}_{suffix}", None)

    def hidden(states: Tensor) -> Tensor:
        return hidden_linear(states, weight("weight_hh"), weight("bias_hh"))

    def project(outputs: Tensor) -> Tensor:
        return hidden_linear(outputs, weight("weight_hr"))

    transformed = torch._C._are_functorch_transforms_active()
    hidden_linear: Callable[..., Tensor] = F.linear if transformed else linear_node
    gates_BTG = F.linear(inputs_BTF, weight("weight_ih"), weight("bias_ih"))
    cell = CELLS[module.mode]
    dtype = gates_BTG.dtype  # differs from that of the weights under autocast
    start = (start[0].to(dtype), None if start[1] is None else start[1].to(dtype))
    projection = project if module.proj_size > 0 else None
    if transformed:
        return unroll(cell, gates_BTG, start, schedule, hidden=hidden, project=projection)
    kinds = ("weight_hh", "bias_hh", "weight_hr")
    values = HiddenWeights(*(_value(weight(kind), dtype) for kind in kinds))
    return scan(cell, gates_BTG, start, schedule, values=values, hidden=hidden, project=projection)


def _value(weight: Any, dtype: torch.dtype | None = None) -> Any:
    """Returns the value of a weight as an ordinary tensor, neither tracked by autograd nor a `WatchedParameter`."""
    if weight is None:
        return None
    with torch._C.DisableTorchFunctionSubclass():
        value = weight.detach().as_subclass(Tensor)
    return value if dtype is None else value.to(dtype)


def _start(module: Any, like: Tensor, batch_size: int, hx: State | None) -> list[State]:
    """Returns the initial states of each layer and direction. The default is zeros."""
    count = module.num_layers * (2 if module.bidirectional else 1)
    hidden, cell = (None, None) if hx is None else hx
    if hidden is None:
        states = [like.new_zeros(batch_size, module.proj_size or module.hidden_size)] * count
    else:
        states = list(hidden.unbind(0))
    has_cell_state = module.mode == "LSTM" if isinstance(module, nn.RNNBase) else module.has_cell_state
    if cell is None:
        cells = [like.new_zeros(batch_size, module.hidden_size) if has_cell_state else None] * count
    else:
        cells = list(cell.unbind(0))
    return list(zip(states, cells, strict=True))


def _check(module: Any, data: Tensor, batch_size: int, steps: int, hx: State | None) -> None:
    """Checks shapes, with the error messages of torch. Unlike the check of torch, it does not access the weights."""
    if steps == 0:
        raise RuntimeError("Expected sequence length to be larger than 0 in RNN")
    if data.shape[-1] != module.input_size:
        raise RuntimeError(
            f"input.size(-1) must be equal to input_size. Expected {module.input_size}, got {data.shape[-1]}"
        )
    layers = module.num_layers * (2 if module.bidirectional else 1)
    sizes = (module.proj_size or module.hidden_size, module.hidden_size)
    for index, state in enumerate(hx or ()):
        expected = (layers, batch_size, sizes[index])
        if state is not None and tuple(state.shape) != expected:
            raise RuntimeError(f"Expected hidden[{index}] size {expected}, got {tuple(state.shape)}")


class PrivateRNNCell(nn.RNNCell):
    """``nn.RNNCell`` with per-sample gradients. Takes batched (2-D) input."""

    def forward(self, input: Tensor, hx: Any = None) -> Any:
        """See ``nn.RNNCell.forward``. Raises ValueError for input without a batch axis."""
        return _step(self, f"RNN_{self.nonlinearity.upper()}", input, hx, None)[0]


class PrivateGRUCell(nn.GRUCell):
    """``nn.GRUCell`` with per-sample gradients. Takes batched (2-D) input."""

    def forward(self, input: Tensor, hx: Any = None) -> Any:
        """See ``nn.GRUCell.forward``. Raises ValueError for input without a batch axis."""
        return _step(self, "GRU", input, hx, None)[0]


class PrivateLSTMCell(nn.LSTMCell):
    """``nn.LSTMCell`` with per-sample gradients. Takes batched (2-D) input."""

    def forward(self, input: Tensor, hx: Any = None) -> Any:
        """See ``nn.LSTMCell.forward``. Raises ValueError for input without a batch axis."""
        h0, c0 = (None, None) if hx is None else hx
        return _step(self, "LSTM", input, h0, c0)


def _step(
    module: nn.RNNCellBase, mode: str, inputs_BF: Tensor, h0_BH: Tensor | None, c0_BH: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    for tensor in (inputs_BF, h0_BH, c0_BH):
        if tensor is not None and tensor.dim() != 2:
            raise ValueError(
                f"{type(module).__name__} needs batched input with 2 dimensions for per-sample gradients; "
                f"got {tensor.dim()}. Add the batch axis: input.unsqueeze(0)."
            )
    gates_BG = F.linear(inputs_BF, module.weight_ih, module.bias_ih)
    zeros_BH = inputs_BF.new_zeros(inputs_BF.shape[0], module.hidden_size)
    state, cell = (zeros_BH if initial is None else initial for initial in (h0_BH, c0_BH))
    return CELLS[mode].step(gates_BG, F.linear(state, module.weight_hh, module.bias_hh), state, cell)


class RNNLinear(nn.Linear):
    """``nn.Linear`` for the steps of a recurrence, in which late steps may have fewer samples than the batch.

    Row i of the input belongs to sample i of the batch. If sequences have ended, the active sequences must come first,
    and ``max_batch_len`` must be the batch size. The gradients of the missing samples are zero.

    Args:
        in_features: Size of each input sample.
        out_features: Size of each output sample.
        bias: Whether a bias is added.
    """

    max_batch_len: int | None = None
    """Batch size if calls may have fewer samples; None if each call has all samples."""

    def forward(self, input: Tensor) -> Tensor:
        """See ``nn.Linear.forward``. Raises ValueError for more samples than ``max_batch_len``."""
        num_samples, missing = len(input), 0 if self.max_batch_len is None else self.max_batch_len - len(input)
        if missing < 0:
            raise ValueError(
                f"RNNLinear: the input has {num_samples} rows, which exceeds max_batch_len={self.max_batch_len}. Set "
                "max_batch_len to the size of the batch, or to None."
            )
        if missing == 0:
            return F.linear(input, self.weight, self.bias)
        # The input is padded to the batch size, so that each sample has a per-sample gradient.
        padded = F.pad(input, (*[0] * (2 * input.dim() - 1), missing))
        return F.linear(padded, self.weight, self.bias)[:num_samples]
