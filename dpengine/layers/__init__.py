"""Modules that keep the rows of a batch apart: twins of torch's recurrent and attention layers."""

from .attention import PrivateMultiheadAttention
from .linear_place import linear_place
from .recurrent import PrivateGRU, PrivateLSTM, PrivateRNN
from .single_step import PrivateGRUCell, PrivateLSTMCell, PrivateRNNCell
from .twins import TWINS, from_twin, to_twin

__all__ = [
    "TWINS",
    "PrivateGRU",
    "PrivateGRUCell",
    "PrivateLSTM",
    "PrivateLSTMCell",
    "PrivateMultiheadAttention",
    "PrivateRNN",
    "PrivateRNNCell",
    "from_twin",
    "linear_place",
    "to_twin",
]
