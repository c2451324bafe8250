"""Distinguishes position indices that all samples share from one index per sample.

Reruns the forward pass with one sample fewer: the number of shared positions does not change.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from dpengine.distributed.local_shards import local_part
from dpengine.errors import UnsupportedLayerError

from .model_state import ModelState
from .tensors import tensors_in
from .watch import Watch

if TYPE_CHECKING:
    from .capture import Capture

_WITHOUT_STATE = (Tensor, bool, int, float, str, type(None), torch.dtype, torch.device)
_logger = logging.getLogger(__name__)


class SharedPositions:
    """Decides for each call of an embedding whether all samples share its entries."""

    def __init__(self, capture: Capture, watch: Watch):
        self._capture, self._watch = capture, watch
        self._shared = False  # True once the number of indices differed from that of samples
        self._compared = False  # True once a pass with one sample fewer was run

    def are_shared(self, args: Any, kwargs: Any) -> bool:
        """Returns True if all samples share the entries: indices ``(1, T)``, ``(T,)`` or ``(T, T)``."""
        capture = self._capture
        if capture.rows is None or not capture.batch_first:
            return False
        indices = local_part(tensors_in((args, kwargs))[0])
        if indices.dim() == 1 or (indices.dim() == 2 and indices.shape[0] == indices.shape[1]):
            # A later batch may have as many samples as positions, so the decision of an earlier call stays.
            self._shared = self._shared or len(indices) != capture.rows
            if not (self._shared or self._compared or len(indices) < 2 or self._is_in_inputs(indices)):
                self._compared = True
                if capture.sharded:
                    self._reject_consecutive(indices)
                self._shared = indices.shape in self._shapes_with_fewer_samples()
            return self._shared
        return indices.dim() > 1 and indices.shape[0] == 1 != capture.rows

    def _is_in_inputs(self, indices: Tensor) -> bool:
        """Returns True if a tensor is, or is a view of, an input of the running forward pass with a batch axis."""
        leaves = () if self._capture.inputs is None else pytree.tree_leaves(self._capture.inputs)
        inputs = [
            leaf for leaf in leaves if type(leaf) is Tensor and leaf.layout is torch.strided and not leaf.is_nested
        ]
        batched = [leaf for leaf in inputs if leaf.dim() and len(leaf) == self._capture.rows]
        return any(leaf.untyped_storage().data_ptr() == indices.untyped_storage().data_ptr() for leaf in batched)

    def _reject_consecutive(self, indices: Tensor) -> None:
        if indices.dim() == 2:
            consecutive = torch.equal(indices[1:, 1:], indices[:-1, :-1])  # like relative positions
        else:
            consecutive = torch.equal(indices, indices[0] + torch.arange(len(indices), device=indices.device))
        if consecutive:
            raise UnsupportedLayerError(
                f"Embedding '{self._watch.name}' got {len(indices)} consecutive indices for as many samples. They may "
                "be positions that all samples share.",
                fix="Give positions an axis of length 1: torch.arange(T).unsqueeze(0).",
                where=self._watch.name,
            )

    def _shapes_with_fewer_samples(self) -> set[torch.Size]:
        """Returns the shapes of the indices of this layer in a rerun of the current pass with one sample fewer."""
        shapes: set[torch.Size] = set()

        def note(module: Any, args: Any, kwargs: Any) -> None:
            shapes.update(indices.shape for indices in tensors_in((args, kwargs))[:1])

        handle = self._watch.module.register_forward_pre_hook(note, with_kwargs=True)
        try:
            _run_with_fewer_samples(self._capture)
        finally:
            handle.remove()
        return shapes


def _run_with_fewer_samples(capture: Capture) -> None:
    """Runs the current forward pass again without its last sample. Ignores errors of the model.

    Restores the random state of torch, buffers, and the attributes of modules.
    """
    leaves = pytree.tree_leaves(capture.inputs)
    can_cut = all(isinstance(leaf, _WITHOUT_STATE) for leaf in leaves)  # other objects may hold samples
    if capture.inputs is None or capture.rows is None or capture.sharded or not can_cut:
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
        for owner, name, parameter in reversed(capture.swapped):  # restores tracked parameters
            owner._parameters[name] = parameter
        args, kwargs = pytree.tree_map(cut, capture.inputs)
        with capture.paused(), torch.no_grad(), torch.random.fork_rng(devices):
            model(*args, **kwargs)
    except Exception:
        _logger.debug("The model does not run with one sample fewer.", exc_info=True)
    finally:
        for owner, name, stand_in in replaced:
            owner._parameters[name] = stand_in
        state.restore()
