"""Checks the loss and the loop of a training script: does the gradient of a sample depend on other samples?

On a probed step the loop is recorded and run again, without the model (see `loop_record`):

1. unchanged, which must give the gradients of the outputs that the backward pass gave;
2. twice with half of the samples kept, the second half in other places, and the data and outputs of the others
   replaced by those of a kept one. In a kept sample neither the input of the model nor the gradient of an output may
   change;
3. with one sample of an earlier batch of another size in place of the first one. The ratio of its gradients tells a
   mean over the samples from a sum, also where the loop computes with ``len(batch)`` or ``.item()``.

A loss that the model computes itself is checked by `IndependenceCheck`.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from dpengine.capture.capture import Capture
from dpengine.capture.replay import Replay
from dpengine.capture.tap import tensors_in
from dpengine.errors import BatchDependentLossError, notice

from .compare_runs import (
    EXACT,
    HALF,
    Kept,
    Rows,
    largest_change,
    mixed_inputs,
    mixed_loss,
    reduction_of,
    refuse_reduction,
)
from .loop_record import Call, LoopRecord, ModelCall, NotRecordedError, Place, Run
from .loop_writes import refuse_written
from .padding_loop import LoopPadding
from .probe import Probe
from .torch_calls import takes_one

_MOST_OPEN = 2  # probed steps after which a loop that numbers leave is reported as not checked
_MOST_LENGTHS = 4  # batches that are recorded because their data have other shapes
_MOST_IN_VAIN = 8  # batches that are recorded in vain: of nearly the same size, or with gradients of 0


class _Sample(NamedTuple):
    """A sample of an earlier batch: its size, data and outputs by place, gradients of outputs, inputs of the model."""

    samples: int
    values: Mapping[Place, Tensor]
    grads: Mapping[Place, Tensor]
    inputs: Mapping[tuple[int, int], Tensor]


class LoopProbe:
    """Records and checks the loop of one model.

    Attributes:
        record: The record of the current batch; None on most steps.
        checked: Number of probed steps in which no mixing was seen.
        why_not: Why the loop of a probed step could not be checked, without numbers of the batch; None if it could.
        wants_other_size: Number of samples of the first record, until a batch of another size told mean from sum.
    """

    def __init__(self, capture: Capture, *, mean_loss: bool):
        self.record: LoopRecord | None = None
        self.checked = 0
        self.why_not: str | None = None
        self.wants_other_size: int | None = None
        self._capture = capture
        self._mean_loss = mean_loss
        self._earlier: _Sample | None = None
        self._open = self._in_vain = 0
        self._doubtful: int | None = None  # samples of a batch in which an error may be a coincidence
        self._padding = LoopPadding()
        self._probe: Probe | None = None
        self._shapes: list[torch.Size] = []  # of the samples of the last record
        self._lengths_left = _MOST_LENGTHS
        self._replay: Replay | None = None  # reports forward passes to the record

    def batch_returned(self, probe: Probe, data: Any, samples: int) -> None:
        """Records the loop over a batch that is returned next, if a check is due or needs a batch of this size."""
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
            return  # the backward pass is that of another batch
        try:
            refuse_written(record, self._capture.model)
            if reason := self._reason_or_raise(record):
                self.why_not = reason.partition(":")[0]  # the message of an error may show data
                notice(
                    "DPE012",
                    f"The loss could not be checked: {reason}. So it is not known whether it keeps the samples of a "
                    "batch independent. dpengine.check_loop(step, batches) decides, for a step that computes the loss.",
                    key="loss",
                    of=self._capture.model,
                )
        finally:
            self.close()

    def _reason_or_raise(self, record: LoopRecord) -> str | None:
        """Returns why the loop could not be checked; None if no mixing was seen, or later batches decide."""
        if record.why_not is not None:
            return record.why_not
        reached = {i: call for i, call in enumerate(_models(record)) if any(g is not None for g in call.recorded.grads)}
        grads = {
            ("output", i, k): grad
            for i, call in reached.items()
            for k, grad in enumerate(call.recorded.grads)
            if grad is not None
        }
        check = _LoopCheck(record, Rows(record.samples, self._capture.batch_to_front))
        if not any(check.rows.of(grad) is not None for grad in grads.values()):
            self.why_not = "the model computes the loss, and its layers alone were probed"
            return None  # or the outputs do not reach the loss
        try:
            whole = record.run(lambda tensor, place: tensor)
            given = [tensors_in((call.recorded.args, call.recorded.kwargs)) for call in _models(record)]
            if check.differ(_of_calls(given, reached), _of_calls(whole.inputs, reached)):
                return "running it again gives the model other inputs, so a part of it is not recorded"
            if check.differ(grads, {place: whole.grads[place] for place in grads if place in whole.grads}):
                return "running it again gives other gradients, so a part of it is not recorded"
            if (error := check.mixing(whole, reached, "data", "output")) is not None:
                if not record.ambiguous:
                    raise error
                return self._at_second_size(error, record.samples, "a list of the batch may hold samples or columns")
            if (error := check.mixing(whole, reached, "data", "output", "random")) is not None:
                reason = (
                    "the gradient of a sample depends on random numbers, as many as samples, perhaps those of others"
                )
                return self._at_second_size(error, record.samples, reason)
        except NotRecordedError as error:
            return str(error)
        tolerance = _tolerance(record)
        if self._padding.check(record, whole, check.rows, tolerance) and self._probe is not None:
            self._probe.wants_other_length = True
        return self._compare_with_earlier(check, record, whole)

    def _at_second_size(self, error: BatchDependentLossError, samples: int, reason: str) -> str:
        """Returns the reason of a doubt about an error, and raises the error if it is seen at a second batch size."""
        if self._doubtful not in (None, samples):
            raise error
        self._doubtful = self.wants_other_size = samples
        return reason

    def _compare_with_earlier(self, check: _LoopCheck, record: LoopRecord, whole: Run) -> str | None:
        earlier, told, compared = self._earlier, None, False
        if earlier is None:
            self._earlier = check.one_sample(whole)
            self.wants_other_size = None if self._earlier is None else record.samples
            told = check.reduction_of_half(whole)
        elif check.can_tell(earlier, whole):
            told, compared = check.reduction(earlier), True
            self.wants_other_size = None
        elif earlier.samples != record.samples:
            self._in_vain += 1
            if self._in_vain < _MOST_IN_VAIN:
                return None
            self.wants_other_size = None
        refuse_reduction(told, "mean" if self._mean_loss else "sum")
        if told == "neither" and record.left:
            raise BatchDependentLossError(
                f"The loss of a sample depends on other samples, through a number that was read from the batch "
                f"({record.left}): between two batches it was scaled by neither their sizes nor 1.",
                fix="Divide by the number of samples only, or use dpengine.validation.per_example(loss_fn).",
            )
        if told == "neither" and not record.drew:
            return (
                "the gradient of a sample in batches of two sizes differs by more than their sizes explain, as if a "
                "weight of the loss followed the step or the number of samples"
            )
        if record.left is None or told in ("mean", "sum"):
            self.checked += 1
            return None
        self._open += 1
        left_open = compared or self._open == _MOST_OPEN
        return f"a number leaves torch by {record.left} before the loss is computed" if left_open else None


class _LoopCheck:
    """The comparisons for one record."""

    def __init__(self, record: LoopRecord, rows: Rows):
        self.rows = rows
        self._record = record
        self._tolerance = _tolerance(record)

    def mixing(self, whole: Run, reached: Collection[int], *kinds: str) -> BatchDependentLossError | None:
        """Returns the error if a kept sample changes when tensors of these kinds change for others."""
        if "random" in kinds and not self._draws_for_samples():
            return None
        moves = not self._has_order() and self.rows.can_move(self._record.data)
        for kept, source_B in self.rows.halves(moves=moves):

            def exchanged(tensor: Tensor, place: Place, source_B: Tensor = source_B) -> Tensor:
                return self.rows.rearranged(tensor, source_B) if place[0] in (*kinds, "list") else tensor

            run = self._record.run(exchanged)
            if self._record.lists and _shapes(run) != _shapes(whole):
                raise NotRecordedError("lists of the batch hold samples of different lengths")
            if self.differ(_of_calls(whole.inputs, reached), _of_calls(run.inputs, reached), kept):
                return mixed_inputs()
            if share := self.differ(whole.grads, run.grads, kept):
                return mixed_loss(share)
        return None

    def differ(self, then: Mapping[Any, Tensor], now: Mapping[Any, Tensor], kept: Kept | None = None) -> float:
        """Returns the largest relative change of a sample; 0 within the tolerance."""
        return largest_change(self.rows, then, now, self._tolerance, kept)

    def _draws_for_samples(self) -> bool:
        """Returns True if a random tensor has an entry for each sample."""
        draws = [call for call in self._record.calls if isinstance(call, Call) and call.random is not None]
        return any(self._record.drawn_for_samples(c.function, t) for c in draws for t in tensors_in(c.result))

    def _has_order(self) -> bool:
        """Returns True if samples may have numbers by their place: random, constant or read ones, or in Python."""
        record = self._record
        if record.left or record.drew:
            return True
        calls = [call for call in record.calls if isinstance(call, Call)]
        return self._has_constants() or any(takes_one(call.function, call.args) for call in calls)

    def _has_constants(self) -> bool:
        """Returns True if a constant of the loop has an entry for each sample."""
        constants = (t for t in tensors_in(self._record.calls) if id(t) not in self._record.dependent)
        return any(self.rows.samples in tensor.shape[:2] for tensor in constants)

    # Mean or sum

    def one_sample(self, whole: Run) -> _Sample | None:
        """Returns the sample with the largest finite gradient, for a later batch; None if all gradients are 0."""
        rows = [self.rows.of(grad) for grad in whole.grads.values()]
        sq_norm_B = sum(some.flatten(1).double().square().sum(dim=1).cpu() for some in rows if some is not None)
        at = int(sq_norm_B.nan_to_num(0, 0, 0).argmax())  # type: ignore[union-attr]
        if not sq_norm_B[at] > 0:  # type: ignore[index]
            return None
        values: dict[Place, Tensor] = {}

        def note(tensor: Tensor, place: Place) -> Tensor:
            if place[0] != "list":
                values.update(self.rows.some({place: tensor}, slice(at, at + 1)))
            return tensor

        self._record.run(note)
        grads, inputs = (self.rows.some(some, slice(at, at + 1)) for some in (whole.grads, _all_inputs(whole)))
        return _Sample(self.rows.samples, values, grads, inputs)

    def can_tell(self, earlier: _Sample, whole: Run) -> bool:
        """Returns True if a mean and a sum over batches of these sizes differ by more than rounding."""
        differ = abs(earlier.samples / self.rows.samples - 1) >= 3 * self._tolerance
        return differ and any(bool(grad.any()) for grad in whole.grads.values())  # 0 if the loss was multiplied by 0

    def reduction(self, earlier: _Sample) -> str | None:
        """Returns "mean", "sum" or "neither", by a sample of an earlier batch; None if it cannot be told."""
        # Elements of a list, and constants with an entry for each sample, were those of another batch.
        if self._record.lists or self._has_constants():
            return None
        comparable = not self._record.drew

        def put(tensor: Tensor, place: Place) -> Tensor:
            nonlocal comparable
            if place[0] == "list":
                return tensor
            rows, old = self.rows.of(tensor), earlier.values.get(place)
            if rows is None or old is None or old.shape[1:] != rows.shape[1:]:
                comparable &= rows is None
                return tensor
            return self.rows.like(tensor, torch.cat([old, rows[1:]]))

        try:
            run = self._record.run(put)
        except NotRecordedError:
            return None
        now, inputs = (self.rows.some(some, slice(1)) for some in (run.grads, _all_inputs(run)))
        if self._record.left and comparable:
            alike = {p: one for p, one in earlier.inputs.items() if p in inputs and inputs[p].shape == one.shape}
            if largest_change(Rows(1, lambda tensor: tensor), alike, inputs, self._tolerance):
                raise mixed_inputs()
        told = reduction_of(now, earlier.grads, earlier.samples / self.rows.samples, self._tolerance)
        return told or ("neither" if comparable and not self._record.left else None)

    def reduction_of_half(self, whole: Run) -> str | None:
        """The same by leaving half of the samples out; None if a number of the loop may follow from the batch size."""
        size, half = self.rows.samples, self.rows.samples // 2
        numbers = {
            number
            for call in self._record.calls
            if not isinstance(call, ModelCall)
            for number in _numbers((call.args, call.kwargs))
        }
        if self._record.left or any(number >= half or number * size == 1 for number in numbers):
            return None
        try:
            grads = self._record.run(lambda tensor, place: self.rows.rearranged(tensor, torch.arange(half))).grads
        except NotRecordedError:
            return None
        now, then = self.rows.some(grads, slice(half), samples=half), self.rows.some(whole.grads, slice(half))
        told = reduction_of(now, then, size / half, self._tolerance)
        return None if told == "neither" else told


def _of_calls(inputs: Sequence[Sequence[Tensor]], reached: Collection[int]) -> dict[tuple[int, int], Tensor]:
    """Returns the inputs of the calls of the model that the backward pass reached."""
    return {(i, k): tensor for i in reached for k, tensor in enumerate(inputs[i])}


def _all_inputs(run: Run) -> dict[tuple[int, int], Tensor]:
    return _of_calls(run.inputs, range(len(run.inputs)))


def _shapes(run: Run) -> list[torch.Size]:
    return [tensor.shape for inputs in run.inputs for tensor in inputs]


def _models(record: LoopRecord) -> list[ModelCall]:
    return [call for call in record.calls if isinstance(call, ModelCall)]


def _tolerance(record: LoopRecord) -> float:
    tensors = [tensor for call in _models(record) for tensor in call.recorded.outputs]
    half = any(tensor.dtype in (torch.float16, torch.bfloat16) for tensor in tensors)
    return HALF if half or any(call.autocast for call in record.calls if not isinstance(call, ModelCall)) else EXACT


def _numbers(tree: Any) -> list[float]:
    found: list[float] = []
    for leaf in pytree.tree_leaves(tree):
        parts = (leaf.start, leaf.stop, leaf.step) if isinstance(leaf, slice) else (leaf,)
        found += [part for part in parts if type(part) in (int, float)]
    return found
