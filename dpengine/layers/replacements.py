"""Table of replacement layers, and conversion of layers by a change of their class."""

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
"""Replacement of each layer class. Only the exact class matches, because ``forward`` of a subclass may differ."""

_REPLACEMENT_CLASSES = (*REPLACEMENTS.values(), RNNLinear, SequenceBias)


def is_replacement_layer(module: nn.Module) -> bool:
    """Returns True for replacement layers and their subclasses. Capture supports all uses of their parameters."""
    return isinstance(module, _REPLACEMENT_CLASSES)


ORIGINALS = {replacement: original for original, replacement in REPLACEMENTS.items()}


def to_replacement(module: nn.Module) -> nn.Module | None:
    """Converts a module to its replacement layer in place. Keeps parameters and ``state_dict`` keys.

    Returns the module; None if there is no replacement.
    """
    return _change_class(module, REPLACEMENTS)


def to_original(module: nn.Module) -> nn.Module | None:
    """Converts a replacement layer to the original layer in place. Returns the module; None for other modules."""
    return _change_class(module, ORIGINALS)


def _change_class(module: nn.Module, table: dict[type[nn.Module], type[nn.Module]]) -> nn.Module | None:
    new_class = table.get(type(module))
    if new_class is None:
        return None
    module.__class__ = new_class
    return module
