"""Checks whether the weight of an example in the loss depends on the length to which its batch is padded.

The recorded loop runs again with the batch and the model outputs truncated to the length of the shorter examples.
`padding_probe` checks the model itself.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .compare_runs import Kept, Rows, largest_change
from .padding_probe import Padding, depends_on_padding, narrowed, paddings, shorter
from .recorded_call import Call, Place
from .run_again import NotRecordedError, Rerun, Run


class LoopPadding:
    """Checks the recorded loops of one model."""

    def __init__(self) -> None:
        self._changed_at: dict[tuple[int, int], set[int]] = {}  # lengths at which the loss changed, by tensor and axis

    def check(self, rerun: Rerun, baseline: Run, rows: Rows, tolerance: float) -> bool:
        """Returns True if the loss changed at one length so far. Raises an error if it changed at two lengths."""
        record = rerun.record
        draws = any(isinstance(call, Call) and call.random is not None for call in record.calls)
        if not (draws or record.lists):
            for padding in paddings([rows.to_front(tensor) for tensor in record.data], rows.samples):
                if any(_changes(rerun, baseline, rows, padding, length, tolerance) for length in shorter(padding)):
                    self._changed_at.setdefault((padding.leaf, padding.axis), set()).add(padding.length)
        if any(len(lengths) > 1 for lengths in self._changed_at.values()):
            raise depends_on_padding()
        return bool(self._changed_at)


def _changes(rerun: Rerun, baseline: Run, rows: Rows, padding: Padding, length: int, tolerance: float) -> bool:
    """Returns True if the gradient of a shorter sample changes when the batch is truncated."""
    kept_B = padding.lengths_B <= length
    source_B = torch.where(kept_B, torch.arange(len(kept_B)), int(kept_B.nonzero()[0]))

    def cut(tensor: Tensor, place: Place) -> Tensor:
        front = rows.to_front(tensor)
        if front.dim() == 0 or len(front) != rows.samples:
            return tensor
        front = front[source_B.to(front.device)]
        is_padded = place[0] == "data" and place[2] in padding.padded
        for axis in (padding.axis,) if is_padded else range(1, front.dim()):
            if front.shape[axis] == padding.length:
                front = narrowed(front, axis, length, padding.at_end)
        return rows.to_front(front)

    try:
        run = rerun(cut)
    except NotRecordedError:  # the loop computes with the length
        return False
    then = {}
    for place, grad in baseline.grads.items():
        for axis, size in enumerate(run.grads[place].shape if grad.dim() == run.grads[place].dim() else ()):
            grad = narrowed(grad, axis, size, padding.at_end)
        then[place] = grad
    kept = kept_B.nonzero().flatten()
    return bool(largest_change(rows, then, run.grads, tolerance, Kept(kept, kept)))
