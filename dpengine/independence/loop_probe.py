"""Checks whether the loss or the training loop makes the gradient of a sample depend on other samples.

On a probed step the loop is recorded and run again, without the model (see `loop_record` and `run_again`):

1. Unchanged. The gradients of the outputs must be those of the backward pass.
2. Once for each half of the samples. That half is kept, and the data and outputs of the others are replaced by those of
   a kept sample. The second half is also moved to other positions. Neither the model inputs nor the output gradients of
   a kept sample may change.
3. With the first sample replaced by a sample of an earlier batch of another size. The ratio of its gradients
   distinguishes a mean over the samples from a sum, even if the loop uses ``len(batch)`` or ``.item()``.

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

from .compare_runs import Rows, check_reduction
from .loop_check import LoopCheck, Sample, models, of_calls
from .loop_record import FOLLOWS, TESTS, LoopRecord
from .loop_writes import check_model_not_written
from .model_inputs import Digest
from .padding_loop import LoopPadding
from .probe import Probe
from .recorded_call import Place
from .run_again import BRANCH, NotRecordedError, OutOfTimeError, Run
from .watch_step import CHECKED_LOOPS

_MOST_OPEN = 2  # undecided steps (a number was read, or time ran out) after which a loop is reported as not checked
_SLOW = "running its calls again takes too long"
OTHER_BATCHES = (
    "a tensor in it changes from batch to batch, and comes from an earlier batch or from code without a record"
)
_CHECK_LOOP = "dpengine.check_loop(step, batches) decides, for a step that computes the loss."
_CHOOSE = "Choose by single samples, as torch.where does, or by numbers that do not follow from the batch."
_REMEDIES = {  # for effects that check_loop may not see
    BRANCH: _CHOOSE,
    TESTS: _CHOOSE,
    FOLLOWS: "Compute with tensors of single samples, or with numbers that do not follow from the batch.",
    OTHER_BATCHES: "Use no values of other batches, as a running mean or a queue of outputs has, and compute what is "
    "needed of a sample by calls of torch.",
}
_MOST_LENGTHS = 4  # largest number of batches that are recorded because their data have other shapes
_MOST_IN_VAIN = 8  # largest number of recorded batches that decide nothing: of similar size, or with gradients of 0


class LoopProbe:
    """Records and checks the loop of one model.

    Attributes:
        record: The record of the current batch; None on most steps.
        checked: Number of probed steps in which no mixing was seen.
        why_not: Reason why the loop of a probed step could not be checked, without numbers of the batch; None if it
            was checked.
        for_check_loop: Whether `check_loop` can decide if the loop could not be checked.
        wants_other_size: Number of samples of the first record, until a batch of another size distinguishes a mean
            from a sum; None afterwards.
    """

    def __init__(self, capture: Capture, *, mean_loss: bool):
        self.record: LoopRecord | None = None
        self.checked = 0
        self.why_not: str | None = None
        self.for_check_loop = True
        self.wants_other_size: int | None = None
        self._capture = capture
        self._mean_loss = mean_loss
        self._earlier: Sample | None = None
        self._open = self._in_vain = 0
        self._undeclared_seen = False  # whether a batch with texts showed a reduction that was not declared
        self._digests: set[Digest] | None = None  # digests of constants in earlier records
        self._doubtful: int | None = None  # size of a batch in which an error may be a coincidence
        self._padding = LoopPadding()
        self._probe: Probe | None = None
        self._shapes: list[torch.Size] = []  # shapes of the samples in the last record
        self._lengths_left = _MOST_LENGTHS
        self._replay: Replay | None = None  # reports forward passes to the record

    def batch_returned(self, probe: Probe, data: Any, samples: int) -> None:
        """Records the loop over a batch that the loader is about to return, if a check is due or needs its size."""
        self.close()
        if data is None or probe.every is None:
            return
        shapes = [tensor.shape[1:] for tensor in tensors_in(data)]
        if not probe.armed:
            other_length = probe.wants_other_length and shapes != self._shapes and self._lengths_left > 0
            if not other_length and self.wants_other_size in (None, samples):
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
        if record is None or not (record.roots or record.why_not):
            return  # the backward pass belongs to another batch
        try:
            check_model_not_written(record, self._capture.model)
            if reason := self._reason_or_raise(record):
                self.why_not = reason.partition(":")[0]  # the message of an error may show data
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
        """Returns the reason why the loop could not be checked; None if it was, or if later batches decide."""
        if record.why_not is not None:
            return record.why_not
        reached = {i: call for i, call in enumerate(models(record)) if any(g is not None for g in call.recorded.grads)}
        grads = {
            ("output", i, k): grad
            for i, call in reached.items()
            for k, grad in enumerate(call.recorded.grads)
            if grad is not None
        }
        settled = self.checked > 0 and self.wants_other_size is None and record.first_conversion is None
        rows = Rows(record.samples, self._capture.batch_to_front)
        check = LoopCheck(record, rows, settled=settled)
        if not any(check.rows.of(grad) is not None for grad in grads.values()):
            self.why_not = "the model computes the loss, and its layers alone were probed"
            return None
        try:
            return self._compare(check, record, reached, grads)
        except NotRecordedError as error:
            return str(error)
        except OutOfTimeError:
            if settled:  # the next checked step may have more time
                return None
            self._open, self.why_not, self.wants_other_size = self._open + 1, _SLOW, record.samples
            return _SLOW if self._open == _MOST_OPEN else None

    def _compare(
        self, check: LoopCheck, record: LoopRecord, reached: Collection[int], grads: Mapping[Place, Tensor]
    ) -> str | None:
        baseline, one = check.run_with_sample(grads)
        inputs = [tensors_in((call.recorded.args, call.recorded.kwargs)) for call in models(record)]
        if check.differ(of_calls(inputs, reached), of_calls(baseline.inputs, reached)):
            return "running it again gives the model other inputs, so a part of it is not recorded"
        if check.differ(grads, {place: baseline.grads[place] for place in grads if place in baseline.grads}):
            return "running it again gives other gradients, so a part of it is not recorded"
        if (error := check.find_mixing(baseline, reached, "data", "output")) is not None:
            if check.rows.are_ambiguous(record.data):
                first = self._doubtful is None
                reason = "two axes of a tensor have as many entries as the batch has samples"
                reason = self._at_second_size(error, record.samples, reason)
                return None if first else reason  # another batch may decide
            if not record.ambiguous:
                raise error
            return self._at_second_size(error, record.samples, "a list of the batch may hold samples or columns")
        if (error := check.find_mixing(baseline, reached, "data", "output", "random")) is not None:
            reason = "the gradient of a sample depends on random numbers, as many as samples, perhaps those of others"
            return self._at_second_size(error, record.samples, reason)
        check.try_other_branches(baseline)
        if self._padding.check(check.rerun, baseline, check.rows, check.tolerance) and self._probe is not None:
            self._probe.wants_other_length = True
        return self._compare_with_earlier(check, record, baseline, one)

    def _doubt_of_constants(self, record: LoopRecord) -> str | None:
        """Returns a reason if a constant of the loop has other values than in earlier records; else None."""
        before, self._digests = self._digests, (self._digests or set()) | record.constant_digests
        return None if before is None or record.drew_by_python or record.constant_digests <= before else OTHER_BATCHES

    def _at_second_size(self, error: BatchDependentLossError, samples: int, reason: str) -> str:
        """Raises the error if it was seen at another batch size before; else requests one and returns the reason."""
        if self._doubtful not in (None, samples):
            raise error
        self._doubtful = self.wants_other_size = samples
        return reason

    def _compare_with_earlier(
        self, check: LoopCheck, record: LoopRecord, baseline: Run, one: Sample | None
    ) -> str | None:
        earlier, reduction, compared = self._earlier, None, False
        if earlier is None:
            self._earlier = one
            self.wants_other_size = None if one is None else record.samples
            reduction = check.reduction_of_half(baseline)
        elif check.can_distinguish(earlier, baseline):
            reduction, compared = check.reduction(earlier), True
            self.wants_other_size = None
        elif earlier.samples != record.samples:
            self._in_vain += 1
            if self._in_vain < _MOST_IN_VAIN:
                return None
            self.wants_other_size = None
        declared = "mean" if self._mean_loss else "sum"
        if reduction not in (None, "neither", declared) and check.other_data and not self._undeclared_seen:
            self._undeclared_seen, self.wants_other_size = True, record.samples  # counts in texts may agree by chance
            return None
        check_reduction(reduction, declared)
        if reduction == "neither" and record.first_conversion:
            raise BatchDependentLossError(
                f"The loss of a sample depends on other samples, through a number that was read from the batch "
                f"({record.first_conversion}): between two batches it was scaled by neither their sizes nor 1.",
                fix="Divide by the number of samples only, or use dpengine.validation.per_example(loss_fn).",
            )
        if (doubt := record.doubt or self._doubt_of_constants(record)) is not None:
            return doubt
        if reduction == "neither" and not record.drew_for_loss:
            if earlier is not None and earlier.numbers != check.numbers():
                return (
                    "a number in the loss changed between batches of two sizes, by more than they explain: it may "
                    "follow the step, as a warm-up does, be random, or follow data of the batch, as a count of words "
                    "does"
                )
            return (
                "the gradient of a sample in batches of two sizes differs by more than their sizes explain, as if a "
                "weight of the loss followed the step or the number of samples"
            )
        if record.first_conversion is None or reduction in ("mean", "sum"):
            self.checked += 1
            if self.why_not == _SLOW and self._open < _MOST_OPEN:
                self.why_not = None  # another step had more time
            return None
        self._open += 1
        undecided = compared or self._open == _MOST_OPEN
        return f"a number leaves torch by {record.first_conversion} before the loss is computed" if undecided else None
