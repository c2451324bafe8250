"""Modules that keep the rows of a batch apart: twins of torch's recurrent and attention layers, and parts of such."""

from .attention import PrivateMultiheadAttention
from .linear_place import linear_place
from .recurrent import PrivateGRU, PrivateLSTM, PrivateRNN, run_cells
from .rnn_linear import RNNLinear
from .sequence_bias import SequenceBias
from .single_step import PrivateGRUCell, PrivateLSTMCell, PrivateRNNCell
from .twins import TWINS, from_twin, is_made_of_operations, to_twin

__all__ = [
    "TWINS",
    "PrivateGRU",
    "PrivateGRUCell",
    "PrivateLSTM",
    "PrivateLSTMCell",
    "PrivateMultiheadAttention",
    "PrivateRNN",
    "PrivateRNNCell",
    "RNNLinear",
    "SequenceBias",
    "from_twin",
    "is_made_of_operations",
    "linear_place",
    "run_cells",
    "to_twin",
]
