"""Checks whether the gradients of a sample in the training loop depend on the length to which its batch is padded.

The recorded loop runs again with the batch and the model outputs truncated to the length of the shorter samples.
`padding_probe` checks the model itself.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .compare_runs import BatchAxis, KeptSamples, largest_change
from .padding_probe import Padding, narrowed, padding_error, paddings, shorter_lengths
from .recorded_call import Call, TensorKey
from .run_again import NotRecordedError, Rerun, Run


class LoopPadding:
    """Checks the recorded loops of one model."""

    def __init__(self) -> None:
        self._changed_at: dict[tuple[int, int], set[int]] = {}  # lengths at which gradients changed, by tensor and axis

    def check(self, rerun: Rerun, baseline: Run, batch_axis: BatchAxis, tolerance: float) -> bool:
        """Returns True if gradients changed at one length so far. Raises BatchDependentLossError if at two lengths."""
        record = rerun.record
        draws = any(isinstance(call, Call) and call.random is not None for call in record.calls)
        if not (draws or record.lists):
            for padding in paddings([batch_axis.to_front(tensor) for tensor in record.data], batch_axis.samples):
                if any(_changes(rerun, baseline, batch_axis, padding, n, tolerance) for n in shorter_lengths(padding)):
                    self._changed_at.setdefault((padding.leaf, padding.axis), set()).add(padding.length)
        if any(len(lengths) > 1 for lengths in self._changed_at.values()):
            raise padding_error()
        return bool(self._changed_at)


def _changes(
    rerun: Rerun, baseline: Run, batch_axis: BatchAxis, padding: Padding, length: int, tolerance: float
) -> bool:
    """Returns True if the gradient of a shorter sample changes when the batch is truncated."""
    kept_B = padding.lengths_B <= length
    source_B = torch.where(kept_B, torch.arange(len(kept_B)), int(kept_B.nonzero()[0]))

    def truncate(tensor: Tensor, key: TensorKey) -> Tensor:
        front = batch_axis.to_front(tensor)
        if front.dim() == 0 or len(front) != batch_axis.samples:
            return tensor
        front = front[source_B.to(front.device)]
        is_padded = key[0] == "data" and key[2] in padding.padded
        for axis in (padding.axis,) if is_padded else range(1, front.dim()):
            if front.shape[axis] == padding.length:
                front = narrowed(front, axis, length, padding.at_end)
        return batch_axis.to_front(front)

    try:
        run = rerun(truncate)
    except NotRecordedError:  # for example if the loop requires the full length
        return False
    expected = {}
    for key, grad in baseline.grads.items():
        for axis, size in enumerate(run.grads[key].shape if grad.dim() == run.grads[key].dim() else ()):
            grad = narrowed(grad, axis, size, padding.at_end)
        expected[key] = grad
    kept = kept_B.nonzero().flatten()
    return bool(largest_change(batch_axis, expected, run.grads, tolerance, KeptSamples(kept, kept)))
