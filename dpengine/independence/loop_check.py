"""Compares a recorded loop with reruns in which some samples have other data."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from dpengine.capture.tensors import tensors_in
from dpengine.errors import BatchDependentLossError

from .compare_runs import (
    EXACT,
    HALF,
    Kept,
    Rows,
    depends_on_position,
    largest_change,
    mixed_inputs,
    mixed_loss,
    norms,
    reduction_of,
)
from .loop_record import LoopRecord
from .recorded_call import Call, ModelCall, Place
from .run_again import Arrange, BranchError, NotRecordedError, Rerun, Run
from .torch_calls import reads_single_samples

_FAR = 30  # shift of outputs relative to their size, which exceeds a bound on a mean of losses
_FAR_CHANGE = 0.05  # smallest relative change that counts with shifted outputs; a smaller one may be rounding


class Sample(NamedTuple):
    """A sample of an earlier batch.

    Attributes:
        samples: Size of the earlier batch.
        values: Data and outputs of the sample, by place.
        grads: Gradients of the outputs of the sample.
        inputs: Inputs of the model for the sample.
        numbers: Python numbers in the calls of the loop.
    """

    samples: int
    values: Mapping[Place, Tensor]
    grads: Mapping[Place, Tensor]
    inputs: Mapping[tuple[int, int], Tensor]
    numbers: Sequence[float]


class LoopCheck:
    """Comparisons of a recorded loop with its reruns.

    Attributes:
        rows: Finds the samples in tensors.
        rerun: Runs the record again.
        tolerance: Relative tolerance between two runs.
        other_data: True if the batch holds data other than tensors, such as texts.
    """

    def __init__(self, record: LoopRecord, rows: Rows, *, settled: bool):
        self.rows, self.rerun, self.tolerance = rows, Rerun(record, settled=settled), _tolerance(record)
        self._settled = settled
        self.other_data = any(not isinstance(leaf, (Tensor, type(None))) for leaf in pytree.tree_leaves(record.batch))
        self._record = record
        self._rejected_kinds: set[str] = set()  # kinds of values for which the loop raises if they are shifted far
        self._sizes: dict[Place, float] = {}  # largest absolute entries

    def find_mixing(self, baseline: Run, reached: Collection[int], *kinds: str) -> BatchDependentLossError | None:
        """Returns the error if a kept sample changes when tensors of these kinds change for the other samples."""
        if "random" in kinds and not self._draws_for_samples():
            return None
        moves = not self._depends_on_position() and self.rows.can_move(self._record.data)
        error = self._find_mixing_of_halves(baseline, reached, kinds, moves=moves)
        if error is not None and moves and self._find_mixing_of_halves(baseline, reached, kinds, moves=False) is None:
            if any(self.rows.samples in shape[:2] for shape, *_ in self._record.constant_digests):
                raise NotRecordedError("a tensor with an entry for each sample comes from code without a record")
            return depends_on_position()
        return error if error is not None or "random" in kinds else self._find_mixing_with_copies(baseline, reached)

    def _find_mixing_of_halves(
        self, baseline: Run, reached: Collection[int], kinds: Collection[str], *, moves: bool
    ) -> BatchDependentLossError | None:
        for kept, source_B in self.rows.halves(moves=moves):

            def exchanged(tensor: Tensor, place: Place, source_B: Tensor = source_B) -> Tensor:
                return self.rows.rearranged(tensor, source_B) if place[0] in (*kinds, "list") else tensor

            far = None if "random" in kinds else self._run_shifted(baseline, kept, source_B, exchanged)
            if far is not None and self._error_of_change(baseline, far, reached, kept) is None:
                continue
            error = self._error_of_change(baseline, self.rerun(exchanged), reached, kept)
            if error is None and far is not None and self.differ(baseline.grads, far.grads, kept) > _FAR_CHANGE:
                error = mixed_loss(1.0, by_bound=True)
            if error is not None:
                return error
        return None

    def _find_mixing_with_copies(self, baseline: Run, reached: Collection[int]) -> BatchDependentLossError | None:
        """Keeps one sample, and replaces all others by copies of it with shifted outputs or data.

        For the sample with the largest gradient the copies get low losses. Unless the loop was checked before, they
        also get high losses, as if all outputs were wrong. For the sample with the smallest gradient they get low
        losses, as if all outputs were right.
        """
        if self._settled and self.rerun.large:  # each run takes a large fraction of the step
            return None
        sq_norm_B = self._sq_norms(baseline.grads)
        largest, smallest = sq_norm_B.argmax(), sq_norm_B.where(sq_norm_B > 0, torch.inf).argmin()
        cases = [("output", largest, -_FAR), ("output", largest, _FAR), ("output", smallest, -_FAR)]
        if any(tensor.is_floating_point() for tensor in self._record.data):
            cases += [("data", largest, -_FAR), ("data", largest, _FAR)]
        for kind, index, times in cases[:1] if self._settled else cases:
            kept, source_B = Kept(index[None], index[None]), index.expand(self.rows.samples)

            def exchanged(tensor: Tensor, place: Place, source_B: Tensor = source_B) -> Tensor:
                return self.rows.rearranged(tensor, source_B) if place[0] != "random" else tensor

            far = self._run_shifted(baseline, kept, source_B, exchanged, times, kind)
            if far is not None and self.differ(of_calls(baseline.inputs, reached), of_calls(far.inputs, reached), kept):
                return mixed_inputs()
            if far is not None and self.differ(baseline.grads, far.grads, kept) > _FAR_CHANGE:
                return mixed_loss(1.0, by_bound=True)
        return None

    def _error_of_change(
        self, baseline: Run, run: Run, reached: Collection[int], kept: Kept
    ) -> BatchDependentLossError | None:
        if self._record.lists and _shapes(run) != _shapes(baseline):
            raise NotRecordedError("lists of the batch hold samples of different lengths")
        if self.differ(of_calls(baseline.inputs, reached), of_calls(run.inputs, reached), kept):
            return mixed_inputs()
        share = self.differ(baseline.grads, run.grads, kept)
        return mixed_loss(share) if share else None

    def _run_shifted(
        self,
        baseline: Run,
        kept: Kept,
        source_B: Tensor,
        exchanged: Arrange,
        times: float = _FAR,
        kind: str = "output",
    ) -> Run | None:
        """Runs the loop with outputs or data of the other samples shifted far away.

        Outputs are shifted towards high losses, or towards low losses if ``times < 0``. Returns None if the loop
        raises an error for such values. Raises BranchError if the loop takes another branch.
        """
        others = torch.ones(self.rows.samples, dtype=torch.bool).index_fill(0, kept.now, False).nonzero().flatten()

        def moved(tensor: Tensor, place: Place) -> Tensor:
            grad = (
                torch.ones_like(tensor) if kind == "data" and tensor.is_floating_point() else baseline.grads.get(place)
            )
            rows, ascent = self.rows.of(tensor), None if grad is None else self.rows.of(grad)
            if rows is None or ascent is None or place[0] != kind:
                return exchanged(tensor, place)
            source, size = source_B.to(rows.device), self._size(tensor, place)
            if not size < torch.inf:
                return self.rows.like(tensor, rows[source])
            if len(kept.now) == 1:  # the others are copies of one sample, which is shifted once
                original = rows[source[:1]]
                shifted = original + ascent[source[:1]].sign_().mul_(times * (1 + size))
                copies = shifted.expand_as(rows).clone()
                return self.rows.like(tensor, copies.index_copy_(0, kept.now.to(rows.device), original))
            shift = ascent[source[others.to(source.device)]].sign_().mul_(times * (1 + size))
            return self.rows.like(tensor, rows[source].index_add_(0, others.to(rows.device), shift))

        if kind in self._rejected_kinds:
            return None
        try:
            return self.rerun(moved)
        except BranchError:
            raise
        except NotRecordedError:  # for example a loss that accepts probabilities only
            self._rejected_kinds.add(kind)
            return None

    def try_other_branches(self, baseline: Run) -> None:
        """Runs the loop with all outputs or all data shifted far away, to reach branches that ordinary batches do not.

        Raises:
            BranchError: If the loop takes another branch.
        """
        if not self.rerun.has_branches():
            return
        for kind, times in itertools.product(("output", "data"), (_FAR, -_FAR)):

            def moved(tensor: Tensor, place: Place, kind: str = kind, times: float = times) -> Tensor:
                if place[0] != kind or not tensor.is_floating_point() or not self._size(tensor, place) < torch.inf:
                    return tensor
                grad = baseline.grads.get(place)
                ascent = torch.ones_like(tensor) if grad is None else grad.sign()
                return tensor + ascent * (times * (1 + self._size(tensor, place)))

            try:
                self.rerun.try_branches(moved)
            except BranchError:
                raise
            except NotRecordedError:  # for example a loss that accepts probabilities only
                continue

    def _size(self, output: Tensor, place: Place) -> float:
        """Returns the largest absolute entry of an output or of data; NaN if an entry is NaN."""
        if place not in self._sizes:
            self._sizes[place] = float(output.abs().max())
        return self._sizes[place]

    def differ(self, then: Mapping[Any, Tensor], now: Mapping[Any, Tensor], kept: Kept | None = None) -> float:
        """Returns the largest relative change of a sample; 0 within the tolerance."""
        return largest_change(self.rows, then, now, self.tolerance, kept)

    def _draws_for_samples(self) -> bool:
        """Returns True if a random tensor has an entry for each sample."""
        draws = [call for call in self._record.calls if isinstance(call, Call) and call.random is not None]
        return any(self._record.drawn_for_samples(c.function, t) for c in draws for t in tensors_in(c.result))

    def _depends_on_position(self) -> bool:
        """Returns True if values may depend on the position of a sample in the batch.

        Such values are random numbers, numbers that were read from the batch, data other than tensors, and constant
        inputs of the model, such as positions.
        """
        record = self._record
        if (
            record.first_conversion
            or record.drew
            or record.drew_by_python
            or self._has_constants([call.inputs for call in models(record)])
        ):
            return True
        calls = [call for call in record.calls if isinstance(call, Call)]
        return self.other_data and (
            self._has_constants(calls) or any(reads_single_samples(c.function, c.args) for c in calls)
        )

    def _has_constants(self, calls: Any) -> bool:
        """Returns True if a constant in these calls has an entry for each sample."""
        constants = (t for t in tensors_in(calls) if id(t) not in self._record.dependent)
        return any(self.rows.samples in tensor.shape[:2] for tensor in constants)

    # Mean or sum

    def run_with_sample(self, grads: Mapping[Place, Tensor]) -> tuple[Run, Sample | None]:
        """Runs the loop unchanged.

        Returns:
            The run, and the sample with the largest finite gradient; None instead of the sample if all are 0.
        """
        sq_norm_B = self._sq_norms(grads)
        at, size = sq_norm_B.argmax(), sq_norm_B.max()
        index, values = slice(int(at), int(at) + 1), dict[Place, Tensor]()

        def store(tensor: Tensor, place: Place) -> Tensor:
            if place[0] != "list":
                values.update(self.rows.select({place: tensor}, index))
            return tensor

        baseline = self.rerun(store)
        kept, inputs = (self.rows.select(tensors, index) for tensors in (baseline.grads, all_inputs(baseline)))
        sample = Sample(self.rows.samples, values, kept, inputs, self.numbers())
        return baseline, sample if size > 0 else None

    def _sq_norms(self, grads: Mapping[Place, Tensor]) -> Tensor:
        """Returns the squared norms ``(B,)`` of the gradients of each sample; 0 for those that are not finite."""
        grads_B = [grad_B for grad in grads.values() if (grad_B := self.rows.of(grad)) is not None]
        return sum((norms(grad_B.flatten(1)).square().cpu() for grad_B in grads_B), torch.zeros(1)).nan_to_num(0, 0, 0)

    def can_distinguish(self, earlier: Sample, baseline: Run) -> bool:
        """Returns True if this batch and the earlier one can distinguish a mean from a sum despite rounding."""
        differ = abs(earlier.samples / self.rows.samples - 1) >= 3 * self.tolerance
        return differ and any(bool(grad.any()) for grad in baseline.grads.values())  # 0 if the loss was multiplied by 0

    def reduction(self, earlier: Sample) -> str | None:
        """Returns "mean", "sum" or "neither", based on a sample of an earlier batch; None if it cannot be decided."""
        # Elements of a list, and constants with an entry for each sample, would be those of another batch.
        if self._record.lists or self._has_constants(self._record.calls):
            return None
        comparable = not self._record.drew_for_loss

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
            run = self.rerun(put)
        except NotRecordedError:
            return None
        now, inputs = (self.rows.select(tensors, slice(1)) for tensors in (run.grads, all_inputs(run)))
        if self._record.first_conversion and comparable and not self._record.drew:
            shared = {
                p: tensor for p, tensor in earlier.inputs.items() if p in inputs and inputs[p].shape == tensor.shape
            }
            if largest_change(Rows(1, lambda tensor: tensor), shared, inputs, self.tolerance):
                raise mixed_inputs()
        reduction = reduction_of(now, earlier.grads, earlier.samples / self.rows.samples, self.tolerance)
        return reduction or ("neither" if comparable and not self._record.first_conversion else None)

    def reduction_of_half(self, baseline: Run) -> str | None:
        """Returns "mean" or "sum", based on a rerun with half of the samples.

        Returns None if it cannot be decided, for example because a number in the loop may depend on the batch.
        """
        half = self.rows.samples // 2
        if self._record.first_conversion or self.other_data or any(n >= half or n != int(n) for n in self.numbers()):
            return None
        try:
            grads = self.rerun(lambda tensor, place: self.rows.rearranged(tensor, torch.arange(half))).grads
        except NotRecordedError:
            return None
        now, then = self.rows.select(grads, slice(half), samples=half), self.rows.select(baseline.grads, slice(half))
        reduction = reduction_of(now, then, self.rows.samples / half, self.tolerance)
        return None if reduction == "neither" else reduction

    def numbers(self) -> list[float]:
        """Returns the Python numbers in the calls of the loop."""
        calls = [(call.args, call.kwargs) for call in self._record.calls if isinstance(call, Call)]
        leaves = [leaf for call in calls for leaf in pytree.tree_leaves(call)]
        parts = [(n.start, n.stop, n.step) if isinstance(n, slice) else (n,) for n in leaves]
        return [number for part in parts for number in part if type(number) in (int, float)]


def of_calls(inputs: Sequence[Sequence[Tensor]], reached: Collection[int]) -> dict[tuple[int, int], Tensor]:
    """Returns the inputs of the model calls with the indices ``reached``, by index of the call and of the tensor."""
    return {(i, k): tensor for i in reached for k, tensor in enumerate(inputs[i])}


def all_inputs(run: Run) -> dict[tuple[int, int], Tensor]:
    """Returns the inputs of all model calls, by index of the call and of the tensor."""
    return of_calls(run.inputs, range(len(run.inputs)))


def models(record: LoopRecord) -> list[ModelCall]:
    """Returns the calls of the model."""
    return [call for call in record.calls if isinstance(call, ModelCall)]


def _shapes(run: Run) -> list[torch.Size]:
    return [tensor.shape for inputs in run.inputs for tensor in inputs]


def _tolerance(record: LoopRecord) -> float:
    tensors = [tensor for call in models(record) for tensor in call.recorded.outputs]
    tensors += [t for call in record.calls if isinstance(call, Call) for t in tensors_in(call.result)]
    half = any(tensor.dtype in (torch.float16, torch.bfloat16) for tensor in tensors)
    return HALF if half or any(call.autocast for call in record.calls if isinstance(call, Call)) else EXACT
