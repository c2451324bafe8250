"""Checks whether a model stores data of a batch in attributes, and reads them in a later batch.

On a probed step the forward passes run again, unchanged and with other data for some samples. Attributes that differ
between these runs hold data of the batch. If such an attribute still has its value when the next batch runs, that
batch runs again with the value of the other run. If its output changes, it depends on the previous batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from dpengine.capture.capture import Capture
from dpengine.capture.model_state import ModelState, Slot
from dpengine.capture.replay import ForwardPass, Replay
from dpengine.capture.tensors import tensors_in_outputs
from dpengine.errors import BufferUpdateError, notice

from .compare_runs import EXACT, HALF, BatchAxis


class StoredAttributes(NamedTuple):
    """Attributes of a model that hold data of a batch.

    Attributes:
        slots: Locations of the attributes.
        state: Model state after the batch.
        other_state: Model state after the same pass with other data in some samples.
    """

    slots: list[Slot]
    state: ModelState
    other_state: ModelState


class MemoryCheck:
    """Checks the recorded forward passes of a batch."""

    def __init__(self, capture: Capture, replay: Replay):
        self._capture = capture
        self._replay = replay

    def stored_attributes(self, samples: int) -> list[StoredAttributes]:
        """Returns attributes that hold data of the batch."""
        stored: list[StoredAttributes] = []
        with self._capture.paused():
            for forward_pass in self._replay.reached:
                try:
                    stored += self._of_pass(forward_pass, BatchAxis(samples, self._capture.batch_to_front))
                except Exception as error:
                    message = str(error).split("\n", maxsplit=1)[0][:100]
                    self._warn_unknown(f"running a batch again raised {type(error).__name__}: {message}")
        return stored

    def _of_pass(self, forward_pass: ForwardPass, batch_axis: BatchAxis) -> Iterator[StoredAttributes]:
        state = self._state_after(forward_pass, lambda tensor: tensor)
        changed = state.changed_since(forward_pass.state)
        if not changed or batch_axis.samples < 2:
            return
        state, completed = state.detached(), 0
        for _, source_B in batch_axis.halves(permute=False):
            try:
                other_state = self._state_after(forward_pass, partial(batch_axis.gather, source_B=source_B)).detached()
            except Exception:  # for example if a tensor without a batch axis has the length of the batch
                continue
            completed += 1
            slots = [slot for slot in changed if not _agree(state.value_of(slot), other_state.value_of(slot), 0.0)]
            if slots:
                yield StoredAttributes(slots, state, other_state)
        if not completed:
            self._warn_unknown("it could not run with other data")

    def _state_after(self, forward_pass: ForwardPass, replace: Callable[[Tensor], Tensor]) -> ModelState:
        """Returns the state of the model after the pass with replaced inputs."""
        args, kwargs = pytree.tree_map_only(Tensor, replace, (forward_pass.args, forward_pass.kwargs))
        with forward_pass.in_initial_state(self._capture.model):
            forward_pass.forward(self._capture.model, args, kwargs)
            return ModelState.of(self._capture.model)

    def check_read(self, stored: Sequence[StoredAttributes]) -> None:
        """Raises BufferUpdateError if a pass reads an attribute that an earlier batch wrote."""
        with self._capture.paused():
            for forward_pass in self._replay.reached:
                for attributes in stored:
                    self._check_pass(forward_pass, attributes)

    def _check_pass(self, forward_pass: ForwardPass, attributes: StoredAttributes) -> None:
        state = forward_pass.state
        written = attributes.state
        unchanged = [slot for slot in attributes.slots if _agree(state.value_of(slot), written.value_of(slot), EXACT)]
        if not unchanged or not self._reads(forward_pass, attributes, unchanged):
            return
        used = (slot for slot in unchanged if self._reads(forward_pass, attributes, [slot]))
        module_index, attribute = next(used, unchanged[0])
        name, module = list(self._capture.model.named_modules())[module_index]
        where = f"of layer '{name}' ({type(module).__name__})" if name else f"of the model ({type(module).__name__})"
        raise BufferUpdateError(
            f"Attribute '{attribute}' {where} holds data of a batch, and the forward pass of the next batch read it. "
            "So a sample changes the gradients of later batches, which clipping does not bound.",
            fix="Recompute it in each forward pass, or reset it before the next batch. An average of weights may "
            "be kept, if it is updated after optimizer.step().",
        )

    def _reads(self, forward_pass: ForwardPass, attributes: StoredAttributes, slots: Sequence[Slot]) -> bool:
        """Returns True if the outputs of a pass change when these attributes have the values of the other run."""
        model, runs = self._capture.model, []
        for state in (attributes.state, attributes.other_state):
            with forward_pass.in_initial_state(model):
                state.put(slots)
                runs.append([output.detach() for output in forward_pass.forward(model)])
        a, b = ([t for t, g in zip(run, forward_pass.grads, strict=False) if g is not None] for run in runs)
        half = forward_pass.initial.autocast_enabled or any(t.dtype in (torch.float16, torch.bfloat16) for t in a)
        return not _agree(a, b, HALF if half else EXACT)

    def _warn_unknown(self, reason: str) -> None:
        notice(
            "DPE012",
            f"An attribute of the model changed in a forward pass, and {reason}. So it is not known whether later "
            "batches read data of this one. Reset the attribute before each batch.",
            key="memory",
            of=self._capture.model,
        )


def _agree(a: Any, b: Any, tolerance: float) -> bool:
    """Returns True if the tensors and numbers in two objects are equal within a tolerance. Ignores other leaves."""
    leaves, others = _leaves(a), _leaves(b)
    return len(leaves) == len(others) and all(_close(x, y, tolerance) for x, y in zip(leaves, others, strict=True))


def _leaves(value: Any) -> list[Any]:
    leaves: list[Any] = []
    for leaf in pytree.tree_leaves(sorted(value, key=repr) if isinstance(value, set) else value):
        if isinstance(leaf, (np.ndarray, np.generic)):
            leaves.append(torch.as_tensor(leaf) if leaf.dtype.kind in "biuf" else str(leaf))
        elif leaf is None or isinstance(leaf, (bool, int, float, str)):
            leaves.append(leaf)
        elif not isinstance(leaf, nn.Module):
            leaves += tensors_in_outputs(leaf)
    return leaves


def _close(a: Any, b: Any, tolerance: float) -> bool:
    if isinstance(a, float) and isinstance(b, float):
        a, b = torch.tensor(a), torch.tensor(b)
    if not isinstance(a, Tensor) or not isinstance(b, Tensor):
        return type(a) is type(b) and bool(a == b)
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    if a.layout is not torch.strided:
        a, b = a.to_dense(), b.to_dense()
    if not (a.is_floating_point() or a.is_complex()):
        return torch.equal(a, b)
    b = b.to(a.device)
    finite = a.isfinite()
    size = torch.where(finite, a.abs(), 0)
    scale = size.max() if size.numel() else 0.0
    near = (a - b).abs() <= tolerance * (size + scale)
    return bool((near | ~finite).all()) and torch.equal(finite, b.isfinite())
