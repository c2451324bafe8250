"""Which layers have a twin, and the change of class that turns one into the other."""

from __future__ import annotations

from torch import nn

from .attention import PrivateMultiheadAttention, SequenceBias
from .recurrent import PrivateGRU, PrivateGRUCell, PrivateLSTM, PrivateLSTMCell, PrivateRNN, PrivateRNNCell, RNNLinear

TWINS: dict[type[nn.Module], type[nn.Module]] = {
    nn.RNN: PrivateRNN,
    nn.GRU: PrivateGRU,
    nn.LSTM: PrivateLSTM,
    nn.RNNCell: PrivateRNNCell,
    nn.GRUCell: PrivateGRUCell,
    nn.LSTMCell: PrivateLSTMCell,
    nn.MultiheadAttention: PrivateMultiheadAttention,
}
"""Original to twin, by exact type: a subclass may have changed ``forward``."""

_BY_OPERATIONS = (*TWINS.values(), RNNLinear, SequenceBias)


def is_made_of_operations(module: nn.Module) -> bool:
    """Whether each use that the module makes of its own parameters can be followed: a twin, or a subclass of one."""
    return isinstance(module, _BY_OPERATIONS)


_ORIGINALS = {twin: original for original, twin in TWINS.items()}


def to_twin(module: nn.Module) -> nn.Module | None:
    """Turns a module into its twin, in place: parameters, buffers and ``state_dict`` keys stay what they are."""
    return _change(module, TWINS)


def from_twin(module: nn.Module) -> nn.Module | None:
    """Turns a twin into the original, in place."""
    return _change(module, _ORIGINALS)


def _change(module: nn.Module, table: dict[type[nn.Module], type[nn.Module]]) -> nn.Module | None:
    other = table.get(type(module))
    if other is None:
        return None
    module.__class__ = other
    return module
