"""Stage 4: the records of a batch become norms, and factors become clipped sums."""

from .flat_buffer import FlatBuffer
from .materialize import forget_grad_samples, show_grad_sample
from .modes import MODES, watch_model
from .strategy import AbstractGradients, common_rows

__all__ = [
    "MODES",
    "AbstractGradients",
    "FlatBuffer",
    "common_rows",
    "forget_grad_samples",
    "show_grad_sample",
    "watch_model",
]
