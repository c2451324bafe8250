"""Checks the loss and the loop of a training script: does the gradient of a sample depend on other samples?

On a probed step the loop is recorded and run again, without the model (see `loop_record`):

1. unchanged, which must give the gradients of the outputs that the backward pass gave;
2. twice with half of the samples kept, and the data and outputs of the others replaced by those of a kept one. In a
   kept sample neither the input of the model nor the gradient of an output may change;
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
from dpengine.errors import BatchDependentLossError, ReductionError, notice

from .loop_record import LoopRecord, ModelCall, NotRecordedError, Place, Run
from .probe import Probe

_EXACT, _HALF = 1e-4, 2e-2  # relative tolerance between two runs, in float32 and in half precision
_MOST_OPEN = 4  # probed steps after which a loop that numbers leave is reported as not checked


class _Sample(NamedTuple):
    """A sample of an earlier batch: size of the batch, data and outputs by place, gradients of outputs."""

    samples: int
    values: Mapping[Place, Tensor]
    grads: Mapping[Place, Tensor]


class LoopProbe:
    """Records and checks the loop of one model.

    Attributes:
        record: The record of the current batch; None on most steps.
        checked: Number of probed steps in which no mixing was seen.
        wants_other_size: Number of samples of the first record, until a batch of another size told mean from sum.
    """

    def __init__(self, capture: Capture, *, mean_loss: bool):
        self.record: LoopRecord | None = None
        self.checked = 0
        self.wants_other_size: int | None = None
        self._capture = capture
        self._mean_loss = mean_loss
        self._earlier: _Sample | None = None
        self._open = 0
        self._replay: Replay | None = None  # reports forward passes to the record

    def batch_returned(self, probe: Probe, data: Any, samples: int) -> None:
        """Records the loop over a batch that is returned next, if a check is due or needs a batch of this size."""
        self.close()
        if data is None or probe.every is None:
            return
        if not probe.armed:
            if self.wants_other_size in (None, samples):
                return
            probe.record_next()
        self._replay = self._capture.replay
        if samples > 1 and self._replay is not None:
            self.record = self._replay.loop = LoopRecord(data, samples)

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
            ReductionError: If the loss is a sum and was declared as a mean, or vice versa.
        """  # noqa: DOC502 - the comparisons raise
        record = self.record
        if record is None or not (record.roots or record.why_not):
            return  # the backward pass is that of another batch
        try:
            if reason := self._reason_or_raise(record):
                notice(
                    "DPE012",
                    f"The loss could not be checked: {reason}. So it is not known whether it keeps the samples of a "
                    "batch independent. Check it with dpengine.check(model, loss_fn, batch).",
                    key=f"loss: {reason}",
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
        if not any(self._rows(grad, record.samples) is not None for grad in grads.values()):
            return None  # a loss inside the model, or one that the outputs do not reach
        check = _LoopCheck(self, record, _tolerance(record))
        try:
            whole = record.run(lambda tensor, place: tensor)
            given = [tensors_in((call.recorded.args, call.recorded.kwargs)) for call in _models(record)]
            if check.differ(_of_calls(given, reached), _of_calls(whole.inputs, reached)):
                return "running it again gives the model other inputs, so a part of it is not recorded"
            if check.differ(grads, {place: whole.grads[place] for place in grads if place in whole.grads}):
                return "running it again gives other gradients, so a part of it is not recorded"
            check.refuse_mixing(whole, reached)
        except NotRecordedError as error:
            return str(error)
        return self._compare_with_earlier(check, record, whole)

    def _compare_with_earlier(self, check: _LoopCheck, record: LoopRecord, whole: Run) -> str | None:
        earlier, told = self._earlier, None
        if earlier is None:
            self._earlier = check.one_sample(whole)
            self.wants_other_size = None if self._earlier is None else record.samples
            told = check.reduction_of_half(whole)
        elif earlier.samples != record.samples:
            told = check.reduction(earlier)
            self.wants_other_size = None
        if told in ("mean", "sum") and told != ("mean" if self._mean_loss else "sum"):
            declared = "mean" if self._mean_loss else "sum"
            found = "a sum over the samples, or a sum that is divided by a constant" if told == "sum" else "a mean"
            raise ReductionError(
                f"The loss is {found}, and a {declared} was declared.",
                fix=f'Pass loss_reduction="{told}" to make_private.',
            )
        if told == "neither" and record.left:
            raise BatchDependentLossError(
                f"The loss of a sample depends on other samples, through a number that was read from the batch "
                f"({record.left}): between two batches it was scaled by neither their sizes nor 1.",
                fix="Divide by the number of samples only, or use dpengine.validation.per_example(loss_fn).",
            )
        if record.left is None or told in ("mean", "sum"):
            self.checked += 1
            return None
        self._open += 1
        return (
            f"a number leaves torch by {record.left} before the loss is computed" if self._open == _MOST_OPEN else None
        )

    def _rows(self, tensor: Tensor, samples: int) -> Tensor | None:
        """Returns a tensor as ``(B, n, ...)``, with n entries for each sample; None if axis 0 is not the batch."""
        front = self._capture.batch_to_front(tensor)
        if front.dim() == 0 or len(front) == 0 or len(front) % samples:
            return None
        return front.unflatten(0, (samples, -1))


class _LoopCheck:
    """The comparisons for one record."""

    def __init__(self, probe: LoopProbe, record: LoopRecord, tolerance: float):
        self._probe = probe
        self._record = record
        self._samples = record.samples
        self._tolerance = tolerance

    def refuse_mixing(self, whole: Run, reached: Collection[int]) -> None:
        """Raises BatchDependentLossError if a kept sample changes with others."""
        order = torch.randperm(self._samples, generator=torch.Generator().manual_seed(self._samples))
        for kept in order.tensor_split(2):
            source = torch.arange(self._samples)
            others_B = torch.ones(self._samples, dtype=torch.bool).index_fill(0, kept, False)
            source[others_B] = kept[0]
            run = self._record.run(lambda tensor, place, source=source: self._rearranged(tensor, source))  # type: ignore[misc]
            if self.differ(_of_calls(whole.inputs, reached), _of_calls(run.inputs, reached), kept):
                raise BatchDependentLossError(
                    "The input of the model for a sample changed when other samples of the batch had other data: the "
                    "loop repeats, mixes or reorders samples, or normalizes over the batch, before the model.",
                    fix="Give the model the batch as the loader returned it. Augment single samples in the data set.",
                )
            if share := self.differ(whole.grads, run.grads, kept):
                raise BatchDependentLossError(
                    f"The loss mixes samples: the gradient of a sample changed by {100 * share:.2g} % when other "
                    "samples had other data. Typical causes are a mean over the tokens of the batch, class weights, "
                    "and a loss between samples.",
                    fix="Use dpengine.validation.per_example(loss_fn); for tokens "
                    "dpengine.losses.per_token_mean(logits, labels), after import dpengine.losses.",
                )

    def _rearranged(self, tensor: Tensor, source: Tensor) -> Tensor:
        rows = self._probe._rows(tensor, self._samples)
        if rows is None:
            return tensor
        return self._probe._capture.batch_to_front(rows[source.to(rows.device)].flatten(0, 1))

    def differ(self, then: Mapping[Any, Tensor], now: Mapping[Any, Tensor], kept: Tensor | None = None) -> float:
        """Returns the largest relative change of a sample; 0 within the tolerance."""
        worst = 0.0
        for place, one in then.items():
            other = now.get(place)
            if other is None or one.shape != other.shape:
                return 1.0
            a, b = (self._probe._rows(tensor, self._samples) for tensor in (one, other))
            if a is None or b is None:
                a, b = one.reshape(1, -1), other.reshape(1, -1)
            elif kept is not None:
                a, b = a[kept.to(a.device)], b[kept.to(b.device)]
            a, b = (tensor.flatten(1).double().nan_to_num(0, 0, 0) for tensor in (a, b))
            size_B, moved_B = a.norm(dim=1), (a - b).norm(dim=1)
            if moved_B.max() > 1e-12 * max(1.0, float(size_B.max())):
                worst = max(worst, float((moved_B / (size_B + 1e-3 * size_B.mean() + 1e-30)).max()))
        return worst if worst > self._tolerance else 0.0

    # Mean or sum

    def one_sample(self, whole: Run) -> _Sample | None:
        """Returns the sample with the largest finite gradient, for a later batch; None if all gradients are 0."""
        rows = [self._probe._rows(grad, self._samples) for grad in whole.grads.values()]
        sq_norm_B = sum(some.flatten(1).double().square().sum(dim=1).cpu() for some in rows if some is not None)
        at = int(sq_norm_B.nan_to_num(0, 0, 0).argmax())  # type: ignore[union-attr]
        grads = self._first_rows(whole.grads, at)
        if not sq_norm_B[at] > 0:  # type: ignore[index]
            return None
        values: dict[Place, Tensor] = {}

        def note(tensor: Tensor, place: Place) -> Tensor:
            if (rows := self._probe._rows(tensor, self._samples)) is not None:
                values[place] = rows[at : at + 1].clone()
            return tensor

        self._record.run(note)
        return _Sample(self._samples, values, grads)

    def _first_rows(self, grads: Mapping[Place, Tensor], at: int = 0) -> dict[Place, Tensor]:
        rows = {place: self._probe._rows(grad, self._samples) for place, grad in grads.items()}
        return {place: some[at : at + 1].clone() for place, some in rows.items() if some is not None}

    def reduction(self, earlier: _Sample) -> str | None:
        """Returns "mean", "sum" or "neither", by a sample of an earlier batch; None if it cannot be told."""

        def put(tensor: Tensor, place: Place) -> Tensor:
            rows, old = self._probe._rows(tensor, self._samples), earlier.values.get(place)
            if rows is None or old is None or old.shape[1:] != rows.shape[1:]:
                return tensor
            return self._probe._capture.batch_to_front(torch.cat([old, rows[1:]]).flatten(0, 1))

        try:
            now = self._first_rows(self._record.run(put).grads)
        except NotRecordedError:
            return None
        return self._told(now, earlier.grads, earlier.samples / self._samples)

    def reduction_of_half(self, whole: Run) -> str | None:
        """The same by leaving half of the samples out; None if a number of the loop may follow from the batch size."""
        size, half = self._samples, self._samples // 2
        numbers = {
            number
            for call in self._record.calls
            if not isinstance(call, ModelCall)
            for number in _numbers((call.args, call.kwargs))
        }
        if self._record.left or any(number >= half or number * size == 1 for number in numbers):
            return None

        def cut(tensor: Tensor, place: Place) -> Tensor:
            rows = self._probe._rows(tensor, size)
            return tensor if rows is None else self._probe._capture.batch_to_front(rows[:half].flatten(0, 1))

        try:
            grads = self._record.run(cut).grads
        except NotRecordedError:
            return None
        now = {place: rows[:1] for place, grad in grads.items() if (rows := self._probe._rows(grad, half)) is not None}
        told = self._told(now, self._first_rows(whole.grads), size / half)
        return None if told == "neither" else told

    def _told(self, now: Mapping[Place, Tensor], then: Mapping[Place, Tensor], by_mean: float) -> str | None:
        places = [place for place in then if place in now and now[place].shape == then[place].shape]
        a, b = (
            torch.cat([grads[place].flatten().double().cpu() for place in places] or [torch.zeros(1)])
            for grads in (now, then)
        )
        scale = float(b.square().sum())
        ratio = float((a * b).sum()) / scale if scale else 0.0
        if (
            not ratio
            or not 0 < scale < torch.inf
            or float((a - ratio * b).norm()) > 10 * self._tolerance * abs(ratio) * scale**0.5
        ):
            return None  # the loop is another one, or draws random numbers
        for told, expected in (("mean", by_mean), ("sum", 1.0)):
            if abs(ratio / expected - 1) < max(10 * self._tolerance, 1e-3):
                return told
        return "neither"


def _of_calls(inputs: Sequence[Sequence[Tensor]], reached: Collection[int]) -> dict[tuple[int, int], Tensor]:
    """Returns the inputs of the calls of the model that the backward pass reached."""
    return {(i, k): tensor for i in reached for k, tensor in enumerate(inputs[i])}


def _models(record: LoopRecord) -> list[ModelCall]:
    return [call for call in record.calls if isinstance(call, ModelCall)]


def _tolerance(record: LoopRecord) -> float:
    tensors = [tensor for call in _models(record) for tensor in call.recorded.outputs]
    half = any(tensor.dtype in (torch.float16, torch.bfloat16) for tensor in tensors)
    return _HALF if half or any(call.autocast for call in record.calls if not isinstance(call, ModelCall)) else _EXACT


def _numbers(tree: Any) -> list[float]:
    found: list[float] = []
    for leaf in pytree.tree_leaves(tree):
        parts = (leaf.start, leaf.stop, leaf.step) if isinstance(leaf, slice) else (leaf,)
        found += [part for part in parts if type(part) in (int, float)]
    return found
