"""Tells positions that all samples share from one index for each sample, by a forward pass with one sample less."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from .model_state import ModelState

if TYPE_CHECKING:
    from .capture import Capture

_WITHOUT_STATE = (Tensor, bool, int, float, str, type(None), torch.dtype, torch.device)
_logger = logging.getLogger(__name__)


def is_in_inputs(capture: Capture, tensor: Tensor) -> bool:
    """Returns True if a tensor is an input of the running forward pass with a batch axis, or a view of one."""
    leaves = () if capture.inputs is None else pytree.tree_leaves(capture.inputs)
    inputs = [leaf for leaf in leaves if type(leaf) is Tensor and leaf.layout is torch.strided and not leaf.is_nested]
    batched = [leaf for leaf in inputs if leaf.dim() and len(leaf) == capture.rows]
    return any(leaf.untyped_storage().data_ptr() == tensor.untyped_storage().data_ptr() for leaf in batched)


def run_with_fewer_samples(capture: Capture) -> None:
    """Runs the running forward pass without its last sample. Does nothing if that fails.

    Restores the random state of torch, buffers, and the attributes of modules.
    """
    leaves = pytree.tree_leaves(capture.inputs)
    known = all(isinstance(leaf, _WITHOUT_STATE) for leaf in leaves)  # others may hold samples that are not cut
    if capture.inputs is None or capture.rows is None or capture.sharded or not known:
        return

    def cut(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        return (leaf[:-1] if leaf.dim() and len(leaf) == capture.rows else leaf).clone()

    model = capture.model
    devices = sorted({str(p.device) for p in model.parameters() if p.device.type == "cuda"})
    state = ModelState.of(model)
    replaced = [(owner, name, owner._parameters[name]) for owner, name, _ in capture.swapped]
    try:
        for owner, name, parameter in reversed(capture.swapped):  # modules that follow their own parameters
            owner._parameters[name] = parameter
        args, kwargs = pytree.tree_map(cut, capture.inputs)
        with capture.paused(), torch.no_grad(), torch.random.fork_rng(devices):
            model(*args, **kwargs)
    except Exception:
        _logger.debug("The model does not run with one sample less.", exc_info=True)
    finally:
        for owner, name, stand_in in replaced:
            owner._parameters[name] = stand_in
        state.restore()
