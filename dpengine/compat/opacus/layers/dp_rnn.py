"""Recurrent layers under Opacus's names, and base classes of custom cells."""

from __future__ import annotations

import abc
import math
import re
import warnings
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from dpengine.layers.recurrent import PrivateGRU, PrivateLSTM, PrivateRNN, RNNLinear, run_cells

from .param_rename import RenameParamsMixin

__all__ = [
    "DPGRU",
    "DPLSTM",
    "DPRNN",
    "RNN_CELL_TYPES",
    "DPGRUCell",
    "DPLSTMCell",
    "DPRNNBase",
    "DPRNNCell",
    "DPRNNCellBase",
    "RNNLinear",
]

_OPACUS_NAME = re.compile(r"(l\d+(?:_reverse)?)\.(ih|hh)\.(weight|bias)")


def apply_permutation(tensor: Tensor, dim: int, permutation: Tensor | None) -> Tensor:
    """Returns the tensor with the entries along ``dim`` permuted; the tensor itself for None."""
    return tensor if permutation is None else tensor.index_select(dim, permutation)


class DPRNNCellBase(nn.Module):
    """Base class of cells: a subclass defines ``forward(input, hx)`` with ``self.ih(input)`` and ``self.hh(h)``.

    Args:
        input_size: Number of input features.
        hidden_size: Number of features of a state.
        bias: Whether ``ih`` and ``hh`` have biases.
        num_chunks: Output size of ``ih`` and ``hh``, in units of ``hidden_size``.
    """

    has_cell_state: bool = False

    def __init__(self, input_size: int, hidden_size: int, bias: bool, num_chunks: int) -> None:
        super().__init__()
        self.input_size, self.hidden_size, self.bias = input_size, hidden_size, bias
        self.ih = RNNLinear(input_size, num_chunks * hidden_size, bias)
        self.hh = RNNLinear(hidden_size, num_chunks * hidden_size, bias)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initializes all weights, as torch's recurrent layers do."""
        bound = 1.0 / math.sqrt(self.hidden_size)
        for weight in self.parameters():
            nn.init.uniform_(weight, -bound, bound)

    def set_max_batch_length(self, max_batch_length: int) -> None:
        """Sets the batch size of a packed sequence. Later calls may contain only the first samples of the batch."""
        self.ih.max_batch_len = self.hh.max_batch_len = max_batch_length

    def _zeros(self, input: Tensor) -> Tensor:
        return input.new_zeros(len(input), self.hidden_size)


class DPRNNCell(DPRNNCellBase):
    """``nn.RNNCell`` with per-sample gradients. Takes the arguments of ``nn.RNNCell``."""

    def __init__(self, input_size: int, hidden_size: int, bias: bool, nonlinearity: str = "tanh") -> None:
        super().__init__(input_size, hidden_size, bias, num_chunks=1)
        if nonlinearity not in _NONLINEARITIES:
            raise ValueError(f"nonlinearity={nonlinearity!r} is unknown. Choose one of: 'tanh', 'relu'.")
        self.nonlinearity = nonlinearity

    def forward(self, input: Tensor, hx: Tensor | None = None, batch_size_t: int | None = None) -> Tensor:
        """Returns the next state ``(B, H)`` of the first ``batch_size_t`` samples."""
        state = (self._zeros(input) if hx is None else hx)[:batch_size_t]
        return _NONLINEARITIES[self.nonlinearity](self.ih(input) + self.hh(state))


class DPGRUCell(DPRNNCellBase):
    """``nn.GRUCell`` with per-sample gradients. Takes the arguments of ``nn.GRUCell``."""

    def __init__(self, input_size: int, hidden_size: int, bias: bool) -> None:
        super().__init__(input_size, hidden_size, bias, num_chunks=3)

    def forward(self, input: Tensor, hx: Tensor | None = None, batch_size_t: int | None = None) -> Tensor:
        """Returns the next state ``(B, H)`` of the first ``batch_size_t`` samples."""
        state = (self._zeros(input) if hx is None else hx)[:batch_size_t]
        reset, update, candidate = self.ih(input).chunk(3, dim=-1)
        reset_h, update_h, candidate_h = self.hh(state).chunk(3, dim=-1)
        candidate = (candidate + (reset + reset_h).sigmoid() * candidate_h).tanh()
        return torch.lerp(candidate, state, (update + update_h).sigmoid())


class DPLSTMCell(DPRNNCellBase):
    """``nn.LSTMCell`` with per-sample gradients. Takes the arguments of ``nn.LSTMCell``."""

    has_cell_state = True

    def __init__(self, input_size: int, hidden_size: int, bias: bool) -> None:
        super().__init__(input_size, hidden_size, bias, num_chunks=4)

    def forward(
        self, input: Tensor, hx: tuple[Tensor, Tensor] | None = None, batch_size_t: int | None = None
    ) -> tuple[Tensor, Tensor]:
        """Returns the next hidden and cell state ``(B, H)`` of the first ``batch_size_t`` samples."""
        hidden, memory = (self._zeros(input),) * 2 if hx is None else hx
        i, f, g, o = (self.ih(input) + self.hh(hidden[:batch_size_t])).chunk(4, dim=-1)
        memory = f.sigmoid() * memory[:batch_size_t] + i.sigmoid() * g.tanh()
        return o.sigmoid() * memory.tanh(), memory


_NONLINEARITIES = {"tanh": torch.tanh, "relu": torch.relu}

RNN_CELL_TYPES: dict[str, tuple[type[DPRNNCellBase], dict[str, Any]]] = {
    "RNN_TANH": (DPRNNCell, {"nonlinearity": "tanh"}),
    "RNN_RELU": (DPRNNCell, {"nonlinearity": "relu"}),
    "GRU": (DPGRUCell, {}),
    "LSTM": (DPLSTMCell, {}),
}


class DPRNNBase(RenameParamsMixin, nn.Module, metaclass=abc.ABCMeta):
    """Multi-layer recurrent layer of custom cells, in one or two directions, with torch's keys in its state dict.

    ``DPRNN``, ``DPGRU`` and ``DPLSTM`` are registered as virtual subclasses. They have no cells and are much faster.

    Args:
        mode: A subclass of ``DPRNNCellBase``, or a key of ``RNN_CELL_TYPES``.
        input_size: Number of input features.
        hidden_size: Number of features of a state.
        num_layers: Number of layers.
        bias: Whether there are biases.
        batch_first: Whether inputs are ``(batch, time, size)``; else ``(time, batch, size)``.
        dropout: Dropout probability between layers.
        bidirectional: Whether a second set of cells runs backwards.
        proj_size: Must be 0; ``DPLSTM`` supports projections.
        cell_params: Further keywords for each cell.

    Raises:
        ValueError: If the mode is unknown, ``dropout`` is not a probability, or ``proj_size`` is negative.
        NotImplementedError: If ``proj_size`` is positive.
    """

    def __init__(
        self,
        mode: str | type[DPRNNCellBase],
        input_size: int,
        hidden_size: int,
        num_layers: int = 1,
        bias: bool = True,
        batch_first: bool = False,
        dropout: float = 0.0,
        bidirectional: bool = False,
        proj_size: int = 0,
        cell_params: dict[str, Any] | None = None,
    ) -> None:
        super().__init__()
        if isinstance(mode, str) and mode not in RNN_CELL_TYPES:
            raise ValueError(f"mode={mode!r} is unknown. Choose one of: {', '.join(map(repr, RNN_CELL_TYPES))}.")
        _check_settings(dropout, num_layers, proj_size)
        self.cell_type, defaults = RNN_CELL_TYPES[mode] if isinstance(mode, str) else (mode, {})
        self.cell_params = {**defaults, **(cell_params or {})}
        self.has_cell_state = self.cell_type.has_cell_state
        self.input_size, self.hidden_size, self.num_layers = input_size, hidden_size, num_layers
        self.bias, self.batch_first, self.dropout = bias, batch_first, float(dropout)
        self.bidirectional, self.proj_size = bidirectional, proj_size
        self.num_directions = 2 if bidirectional else 1
        self.cells = self.initialize_cells()

    def initialize_cells(self) -> list[DPRNNCellBase]:
        """Creates the cells ``l0``, ``l0_reverse``, ``l1`` and so on."""
        cells: list[DPRNNCellBase] = []
        names: dict[str, str] = {}
        for name, layer, _ in self._cell_names():
            size = self.input_size if layer == 0 else self.hidden_size * self.num_directions
            cell = self.cell_type(size, self.hidden_size, bias=self.bias, **self.cell_params)  # type: ignore[call-arg]
            self.add_module(name, cell)
            cells.append(cell)
            kinds = ("weight", "bias") if self.bias else ("weight",)
            names |= {f"{name}.{part}.{kind}": f"{kind}_{part}_{name}" for kind in kinds for part in ("ih", "hh")}
        self.set_rename_map(names)
        return cells

    def _cell_names(self) -> Iterator[tuple[str, int, int]]:
        for layer in range(self.num_layers):
            for direction in range(self.num_directions):
                yield f"l{layer}_reverse" if direction else f"l{layer}", layer, direction

    def forward(self, input: Tensor | PackedSequence, state_init: Any = None) -> Any:
        """Runs the layer as ``nn.RNN``, or as ``nn.LSTM`` if the cells have a cell state."""
        hx = state_init if self.has_cell_state else None if state_init is None else (state_init, None)
        output, (hidden, memory) = run_cells(self, self.cells, input, hx)
        return output, (hidden, memory) if self.has_cell_state else hidden


def _check_settings(dropout: Any, num_layers: int, proj_size: int) -> None:
    if isinstance(dropout, bool) or not isinstance(dropout, (int, float)) or not 0 <= dropout <= 1:
        raise ValueError(f"dropout={dropout!r} must be a probability from 0 to 1.")
    if proj_size < 0:
        raise ValueError(f"proj_size={proj_size} must be at least 0, where 0 means no projection.")
    if proj_size > 0:
        raise NotImplementedError(f"proj_size={proj_size}: custom cells have no projection. Use DPLSTM.")
    if dropout > 0 and num_layers == 1:
        message = f"dropout={dropout} has no effect: it acts between layers, but there is only one layer."
        warnings.warn(message, UserWarning, stacklevel=3)


class _OpacusLayer(RenameParamsMixin):
    """Mixin with Opacus's argument ``state_init``, which also loads state dicts with Opacus's keys."""

    def forward(self, input: Tensor | PackedSequence, state_init: Any = None) -> Any:
        """Runs the layer as in torch. Raises ValueError for input without a batch axis."""
        return super().forward(input, state_init)  # type: ignore[misc]

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *rest: Any) -> None:
        for key in list(state_dict):
            match = _OPACUS_NAME.fullmatch(key.removeprefix(prefix)) if key.startswith(prefix) else None
            if match is not None:
                layer, gates, kind = match.groups()
                state_dict.setdefault(f"{prefix}{kind}_{gates}_{layer}", state_dict.pop(key))
        super()._load_from_state_dict(state_dict, prefix, *rest)


class DPRNN(_OpacusLayer, PrivateRNN):
    """``nn.RNN`` with per-sample gradients, for batched (3-D) or packed input.

    Takes the arguments of ``nn.RNN`` and has its state dict. ``proj_size`` must be 0.
    """

    has_cell_state = False

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        num_layers: int = 1,
        bias: bool = True,
        batch_first: bool = False,
        dropout: float = 0,
        bidirectional: bool = False,
        proj_size: int = 0,
        nonlinearity: str = "tanh",
    ) -> None:
        settings = (num_layers, nonlinearity, bias, batch_first, dropout, bidirectional)
        if proj_size != 0:
            raise ValueError(f"proj_size={proj_size}: only an LSTM has a projection; use DPLSTM.")
        super().__init__(input_size, hidden_size, *settings)


class DPGRU(_OpacusLayer, PrivateGRU):
    """``nn.GRU`` with per-sample gradients, for batched (3-D) or packed input.

    Takes the arguments of ``nn.GRU`` and has its state dict. ``proj_size`` must be 0.
    """

    has_cell_state = False

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        num_layers: int = 1,
        bias: bool = True,
        batch_first: bool = False,
        dropout: float = 0,
        bidirectional: bool = False,
        proj_size: int = 0,
    ) -> None:
        if proj_size != 0:
            raise ValueError(f"proj_size={proj_size}: only an LSTM has a projection; use DPLSTM.")
        super().__init__(input_size, hidden_size, num_layers, bias, batch_first, dropout, bidirectional)


class DPLSTM(_OpacusLayer, PrivateLSTM):
    """``nn.LSTM`` with per-sample gradients, for batched (3-D) or packed input.

    Takes the arguments of ``nn.LSTM`` and has its state dict.
    """

    has_cell_state = True

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        num_layers: int = 1,
        bias: bool = True,
        batch_first: bool = False,
        dropout: float = 0,
        bidirectional: bool = False,
        proj_size: int = 0,
    ) -> None:
        settings = (num_layers, bias, batch_first, dropout, bidirectional, proj_size)
        super().__init__(input_size, hidden_size, *settings)


for _kind in (DPRNN, DPGRU, DPLSTM):
    DPRNNBase.register(_kind)
