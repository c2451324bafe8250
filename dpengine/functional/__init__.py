"""Clipped gradients of plain functions, on ``torch.func``: the same guarantee without modules and hooks."""

from .bounded import AuxiliaryOutput, BoundedSensitivityCallable
from .clip_gradient import clip_gradient
from .clip_tree import clip_tree
from .clipped_grad import clipped_fun, clipped_grad
from .compiled import compiled

__all__ = [
    "AuxiliaryOutput",
    "BoundedSensitivityCallable",
    "clip_gradient",
    "clip_tree",
    "clipped_fun",
    "clipped_grad",
    "compiled",
]
