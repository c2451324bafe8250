"""Checks whether the loss or the training loop makes the gradient of a sample depend on other samples.

On a probed step the loop is recorded and run again, without the model (see `loop_record` and `run_again`):

1. Without changes. The gradients of the outputs must be those of the backward pass.
2. Once for each half of the samples. That half is kept, and the data and outputs of the other samples are replaced by
   those of a kept sample. The samples of the second half also move to other positions. Neither the model inputs nor the
   output gradients of a kept sample may change.
3. With the first sample replaced by a sample of an earlier batch of another size. The ratio of its gradients in both
   batches distinguishes a mean over the samples from a sum, even if the loop uses ``len(batch)`` or ``.item()``.

A loss that the model computes itself is checked by `IndependenceCheck`.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import Tensor

from dpengine.capture.capture import Capture
from dpengine.capture.replay import Replay
from dpengine.capture.tensors import tensors_in
from dpengine.errors import BatchDependentLossError, notice

from .compare_runs import BatchAxis, check_reduction
from .loop_check import RecordedLoopCheck, Sample, inputs_by_key, model_calls
from .loop_record import NUMBER_IN_LOSS, NUMBER_TESTED, LoopRecord
from .loop_writes import check_model_not_written
from .model_inputs import Digest
from .padding_loop import LoopPadding
from .probe import Probe
from .recorded_call import TensorKey
from .run_again import BRANCH, NotRecordedError, OutOfTimeError, Run
from .watch_step import CHECKED_LOOPS

_MAX_UNDECIDED = 2  # undecided steps (a number was read, or time ran out) before a loop is reported as not checked
_SLOW = "rerunning the calls of the loop takes too long"
OTHER_BATCHES = (
    "a tensor in the loop changes from batch to batch, and comes from an earlier batch or from code without a record"
)
_CHECK_LOOP = "Call dpengine.check_loop(step, batches), where step computes the loss."
_CHOOSE = "Select per sample, as torch.where does, or use numbers that do not depend on the batch."
_REMEDIES = {  # for effects that check_loop may not see
    BRANCH: _CHOOSE,
    NUMBER_TESTED: _CHOOSE,
    NUMBER_IN_LOSS: "Compute with tensors per sample, or with numbers that do not depend on the batch.",
    OTHER_BATCHES: "Use no values of other batches, such as a running mean or a queue of outputs, and compute values "
    "of a sample with torch functions.",
}
_MAX_LENGTHS = 4  # largest number of batches that are recorded because their data have other shapes
_MAX_INCONCLUSIVE = 8  # largest number of recorded batches that decide nothing: of similar size, or with gradients of 0


class LoopProbe:
    """Records and checks the loop of one model.

    Attributes:
        record: The record of the current batch; None on most steps.
        checked: Number of probed steps in which no mixing was seen.
        unchecked_reason: Reason why the loop of a probed step could not be checked; None if it was checked. Contains no
            numbers of the batch.
        for_check_loop: Whether `check_loop` can check a loop that could not be checked here.
        needs_other_size: Number of samples of the first record, until a batch of another size distinguishes a mean
            from a sum; None afterwards.
    """

    def __init__(self, capture: Capture, *, mean_loss: bool):
        self.record: LoopRecord | None = None
        self.checked = 0
        self.unchecked_reason: str | None = None
        self.for_check_loop = True
        self.needs_other_size: int | None = None
        self._capture = capture
        self._mean_loss = mean_loss
        self._earlier: Sample | None = None
        self._undecided_steps = self._inconclusive = 0
        self._undeclared_seen = False  # whether a batch with data other than tensors showed another reduction
        self._digests: set[Digest] | None = None  # digests of constants in earlier records
        self._ambiguous_size: int | None = None  # size of a batch in which an error may be a coincidence
        self._padding = LoopPadding()
        self._probe: Probe | None = None
        self._shapes: list[torch.Size] = []  # shapes of the samples in the last record
        self._lengths_left = _MAX_LENGTHS
        self._replay: Replay | None = None  # reports forward passes to the record

    def batch_returned(self, probe: Probe, data: Any, samples: int) -> None:
        """Records the loop over a batch that the loader is about to return, if it is needed for a check."""
        self.close()
        if data is None or probe.every is None:
            return
        shapes = [tensor.shape[1:] for tensor in tensors_in(data)]
        if not probe.armed:
            other_length = probe.needs_other_length and shapes != self._shapes and self._lengths_left > 0
            if not other_length and self.needs_other_size in (None, samples):
                return
            self._lengths_left -= other_length
            probe.record_next()
        self._shapes, self._probe = shapes, probe
        self._replay = self._capture.replay
        if samples > 1 and self._replay is not None:
            self.record = self._replay.loop = LoopRecord(data, samples, self._capture.model)

    def close(self) -> None:
        """Ends the record of a batch that is not checked."""
        record, self.record = self.record, None
        if record is not None:
            record.close()
            record.clear()
        if self._replay is not None:
            self._replay.loop = None

    def check(self) -> None:
        """Checks the recorded loop after its backward pass.

        Raises:
            BatchDependentLossError: If the gradient of a sample depends on other samples.
            BufferUpdateError: If the loop writes data of the batch to the model.
            ReductionError: If the loss is a sum and was declared as a mean, or vice versa.
        """  # noqa: DOC502 - the comparisons raise
        record = self.record
        if record is None or not (record.roots or record.failure_reason):
            return  # the backward pass belongs to another batch
        try:
            check_model_not_written(record, self._capture.model)
            if reason := self._reason_or_raise(record):
                self.unchecked_reason = reason.partition(":")[0]  # the message of an error may show data
                remedy = next((text for start, text in _REMEDIES.items() if reason.startswith(start)), None)
                self.for_check_loop = remedy is None
                if self._capture.model in CHECKED_LOOPS and self.for_check_loop:
                    return
                notice(
                    "DPE012",
                    f"The loss could not be checked: {reason}. So it is not known whether it keeps the samples of a "
                    f"batch independent. {remedy or _CHECK_LOOP}",
                    key="loss",
                    of=self._capture.model,
                )
        finally:
            self.close()

    def _reason_or_raise(self, record: LoopRecord) -> str | None:
        """Returns the reason why the loop could not be checked; None if it was checked, or if later batches decide."""
        if record.failure_reason is not None:
            return record.failure_reason
        calls = enumerate(model_calls(record))
        reached = {i: call for i, call in calls if any(grad is not None for grad in call.recorded.grads)}
        grads = {
            ("output", i, k): grad
            for i, call in reached.items()
            for k, grad in enumerate(call.recorded.grads)
            if grad is not None
        }
        checked_before = self.checked > 0 and self.needs_other_size is None and record.first_conversion is None
        batch_axis = BatchAxis(record.samples, self._capture.batch_to_front)
        check = RecordedLoopCheck(record, batch_axis, checked_before=checked_before)
        if not any(batch_axis.split(grad) is not None for grad in grads.values()):
            self.unchecked_reason = "the model computes the loss, so only its layers were checked"
            return None
        try:
            return self._compare(check, record, reached, grads)
        except NotRecordedError as error:
            return str(error)
        except OutOfTimeError:
            if checked_before:  # the next checked step may have more time
                return None
            self._undecided_steps += 1
            self.unchecked_reason, self.needs_other_size = _SLOW, record.samples
            return _SLOW if self._undecided_steps == _MAX_UNDECIDED else None

    def _compare(
        self, check: RecordedLoopCheck, record: LoopRecord, reached: Collection[int], grads: Mapping[TensorKey, Tensor]
    ) -> str | None:
        baseline, sample = check.run_with_sample(grads)
        inputs = [tensors_in((call.recorded.args, call.recorded.kwargs)) for call in model_calls(record)]
        if check.largest_change(inputs_by_key(inputs, reached), inputs_by_key(baseline.inputs, reached)):
            return "a rerun gives the model other inputs, so a part of the loop is not recorded"
        if check.largest_change(grads, {key: baseline.grads[key] for key in grads if key in baseline.grads}):
            return "a rerun gives other gradients, so a part of the loop is not recorded"
        if (error := check.find_mixing(baseline, reached, "data", "output")) is not None:
            if check.batch_axis.is_ambiguous_in(record.data):
                is_first = self._ambiguous_size is None
                reason = "two axes of a tensor have as many entries as the batch has samples"
                reason = self._at_second_size(error, record.samples, reason)
                return None if is_first else reason  # another batch may decide
            if not record.ambiguous:
                raise error
            return self._at_second_size(error, record.samples, "a list of the batch may hold samples or columns")
        if (error := check.find_mixing(baseline, reached, "data", "output", "random")) is not None:
            reason = "the gradient of a sample depends on a random tensor, and perhaps on its entries for other samples"
            return self._at_second_size(error, record.samples, reason)
        check.try_other_branches(baseline)
        if self._padding.check(check.rerun, baseline, check.batch_axis, check.tolerance) and self._probe is not None:
            self._probe.needs_other_length = True
        return self._compare_with_earlier(check, record, baseline, sample)

    def _changed_constants(self, record: LoopRecord) -> str | None:
        """Returns a reason if a constant of the loop differs from those in earlier records; else None."""
        before, self._digests = self._digests, (self._digests or set()) | record.constant_digests
        return None if before is None or record.drew_in_python or record.constant_digests <= before else OTHER_BATCHES

    def _at_second_size(self, error: BatchDependentLossError, samples: int, reason: str) -> str:
        """Raises the error if a batch of another size caused one before; else requests one and returns the reason."""
        if self._ambiguous_size not in (None, samples):
            raise error
        self._ambiguous_size = self.needs_other_size = samples
        return reason

    def _compare_with_earlier(
        self, check: RecordedLoopCheck, record: LoopRecord, baseline: Run, sample: Sample | None
    ) -> str | None:
        earlier, reduction, compared = self._earlier, None, False
        if earlier is None:
            self._earlier = sample
            self.needs_other_size = None if sample is None else record.samples
            reduction = check.reduction_of_half(baseline)
        elif check.can_distinguish(earlier, baseline):
            reduction, compared = check.reduction(earlier), True
            self.needs_other_size = None
        elif earlier.samples != record.samples:
            self._inconclusive += 1
            if self._inconclusive < _MAX_INCONCLUSIVE:
                return None
            self.needs_other_size = None
        declared = "mean" if self._mean_loss else "sum"
        if reduction not in (None, "neither", declared) and check.other_data and not self._undeclared_seen:
            self._undeclared_seen, self.needs_other_size = True, record.samples  # numbers of words may agree by chance
            return None
        check_reduction(reduction, declared)
        if reduction == "neither" and record.first_conversion:
            raise BatchDependentLossError(
                f"The loss of a sample depends on other samples, through a number that was read from the batch "
                f"({record.first_conversion}): between two batches it was scaled by neither their sizes nor 1.",
                fix="Divide by the number of samples only, or use dpengine.validation.per_example(loss_fn).",
            )
        if (reason := record.undecided_reason or self._changed_constants(record)) is not None:
            return reason
        if reduction == "neither" and not record.drew_for_loss:
            if earlier is not None and earlier.numbers != check.numbers():
                return (
                    "a number in the loss changed between batches of two sizes by more than the sizes explain: it may "
                    "be random, or depend on the step, as a warm-up does, or on data, as a number of words does"
                )
            return (
                "the gradient of a sample in batches of two sizes differs by more than the sizes explain, as if a "
                "weight of the loss depended on the step or the number of samples"
            )
        if record.first_conversion is None or reduction in ("mean", "sum"):
            self.checked += 1
            if self.unchecked_reason == _SLOW and self._undecided_steps < _MAX_UNDECIDED:
                self.unchecked_reason = None  # another step had more time
            return None
        self._undecided_steps += 1
        undecided = compared or self._undecided_steps == _MAX_UNDECIDED
        reason = f"{record.first_conversion} converts data of the batch before the loss is computed"
        return reason if undecided else None
