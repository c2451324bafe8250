"""Replacements of torch's recurrent and attention layers, with per-sample gradients."""

from typing import TYPE_CHECKING

from dpengine import lazy_exports

if TYPE_CHECKING:
    from .attention import PrivateMultiheadAttention as PrivateMultiheadAttention
    from .attention import SequenceBias as SequenceBias
    from .recurrent import PrivateGRU as PrivateGRU
    from .recurrent import PrivateGRUCell as PrivateGRUCell
    from .recurrent import PrivateLSTM as PrivateLSTM
    from .recurrent import PrivateLSTMCell as PrivateLSTMCell
    from .recurrent import PrivateRNN as PrivateRNN
    from .recurrent import PrivateRNNCell as PrivateRNNCell
    from .recurrent import RNNLinear as RNNLinear
else:
    __getattr__, __dir__, __all__ = lazy_exports(
        __name__,
        {
            "attention": ["PrivateMultiheadAttention", "SequenceBias"],
            "recurrent": [
                "PrivateGRU",
                "PrivateGRUCell",
                "PrivateLSTM",
                "PrivateLSTMCell",
                "PrivateRNN",
                "PrivateRNNCell",
                "RNNLinear",
            ],
        },
    )
