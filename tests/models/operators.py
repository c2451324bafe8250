"""Declares the operators that torchvision needs for its import; transformers imports torchvision if it is installed.

The compiled extension of torchvision does not load with every build of torch.
"""

import importlib
import sys

import torch

OPERATORS = [
    "nms(Tensor boxes, Tensor scores, float iou_threshold) -> Tensor",
    "qnms(Tensor boxes, Tensor scores, float iou_threshold) -> Tensor",
]
_library = None  # the operators exist as long as this object


def define_operators():
    """Imports torchvision, with declared operators in place of compiled ones if these do not load."""
    global _library
    try:
        importlib.import_module("torchvision")
    except RuntimeError:
        _library = torch.library.Library("torchvision", "FRAGMENT")
        for operator in OPERATORS:
            _library.define(operator)
        for name in [name for name in sys.modules if name.partition(".")[0] == "torchvision"]:
            del sys.modules[name]
        importlib.import_module("torchvision")
