"""Stage 2: a forward and a backward pass become LayerCall records."""

from .capture import Capture, CaptureState, Receiver
from .model_state import ModelState
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
    "tensors_in_outputs",
    "turned",
    "watch_list",
]
