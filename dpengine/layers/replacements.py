"""Table of batch-first replacement layers, and conversion by a change of class."""

from __future__ import annotations

from torch import nn

from .attention import PrivateMultiheadAttention, SequenceBias
from .recurrent import PrivateGRU, PrivateGRUCell, PrivateLSTM, PrivateLSTMCell, PrivateRNN, PrivateRNNCell, RNNLinear

REPLACEMENTS: dict[type[nn.Module], type[nn.Module]] = {
    nn.RNN: PrivateRNN,
    nn.GRU: PrivateGRU,
    nn.LSTM: PrivateLSTM,
    nn.RNNCell: PrivateRNNCell,
    nn.GRUCell: PrivateGRUCell,
    nn.LSTMCell: PrivateLSTMCell,
    nn.MultiheadAttention: PrivateMultiheadAttention,
}
"""Maps original layers to their replacements, by exact type, because a subclass may have another ``forward``."""

_BY_OPERATIONS = (*REPLACEMENTS.values(), RNNLinear, SequenceBias)


def is_made_of_operations(module: nn.Module) -> bool:
    """Returns True for modules whose parameter uses can all be captured: replacement layers and their subclasses."""
    return isinstance(module, _BY_OPERATIONS)


ORIGINALS = {replacement: original for original, replacement in REPLACEMENTS.items()}


def to_replacement(module: nn.Module) -> nn.Module | None:
    """Converts a module to its replacement in place. Keeps parameters and ``state_dict`` keys.

    Returns the module; None if it has no replacement.
    """
    return _change(module, REPLACEMENTS)


def to_original(module: nn.Module) -> nn.Module | None:
    """Converts a replacement layer to the original in place. Returns it; None for other modules."""
    return _change(module, ORIGINALS)


def _change(module: nn.Module, table: dict[type[nn.Module], type[nn.Module]]) -> nn.Module | None:
    other = table.get(type(module))
    if other is None:
        return None
    module.__class__ = other
    return module
