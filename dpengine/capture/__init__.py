"""Stage 2: a forward and a backward pass become LayerCall records."""

from .batch_statistics import may_normalise_by_constants, normalises_by_constants
from .capture import Capture, CaptureState, Receiver
from .model_state import ModelState, modes_kept
from .outputs import tensors_in_outputs
from .record import LayerCall, Use, turned
from .replay import Pass, Replay
from .watch import Kind, Watch, has_own_parameters, watch_list

__all__ = [
    "Capture",
    "CaptureState",
    "Kind",
    "LayerCall",
    "ModelState",
    "Pass",
    "Receiver",
    "Replay",
    "Use",
    "Watch",
    "has_own_parameters",
    "may_normalise_by_constants",
    "modes_kept",
    "normalises_by_constants",
    "tensors_in_outputs",
    "turned",
    "watch_list",
]
