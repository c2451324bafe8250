"""The comparisons of one recorded loop with itself, run again with other data in some samples."""

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
    depends_on_place,
    largest_change,
    mixed_inputs,
    mixed_loss,
    norms,
    reduction_of,
)
from .loop_record import LoopRecord
from .recorded_call import Call, ModelCall, Place
from .run_again import Arrange, BranchError, NotRecordedError, Rerun, Run
from .torch_calls import takes_one

_FAR = 30  # by how many times their size outputs are moved, beyond a bound on a mean of losses
_FAR_CHANGE = 0.05  # least relative change by such outputs; a smaller one may be rounding


class Sample(NamedTuple):
    """A sample of an earlier batch.

    Attributes:
        samples: The size of that batch.
        values: Data and outputs of the sample, by place.
        grads: Gradients of its outputs.
        inputs: Its inputs of the model.
        numbers: Python numbers in the calls of the loop.
    """

    samples: int
    values: Mapping[Place, Tensor]
    grads: Mapping[Place, Tensor]
    inputs: Mapping[tuple[int, int], Tensor]
    numbers: Sequence[float]


class LoopCheck:
    """The comparisons for one record.

    Attributes:
        rows: Finds the samples in tensors.
        rerun: Runs the record again.
        tolerance: Relative tolerance between two runs.
        others: True if the batch holds data that are no tensors, such as texts.
    """

    def __init__(self, record: LoopRecord, rows: Rows, *, settled: bool):
        self.rows, self.rerun, self.tolerance = rows, Rerun(record, settled=settled), _tolerance(record)
        self._settled = settled
        self.others = any(not isinstance(leaf, (Tensor, type(None))) for leaf in pytree.tree_leaves(record.batch))
        self._record = record
        self._refused: set[str] = set()  # kinds of values that the loop refuses if they are far away
        self._sizes: dict[Place, float] = {}  # of outputs

    def mixing(self, whole: Run, reached: Collection[int], *kinds: str) -> BatchDependentLossError | None:
        """Returns the error if a kept sample changes when tensors of these kinds change for others."""
        if "random" in kinds and not self._draws_for_samples():
            return None
        moves = not self._has_order() and self.rows.can_move(self._record.data)
        error = self._mixing_of_halves(whole, reached, kinds, moves=moves)
        if error is not None and moves and self._mixing_of_halves(whole, reached, kinds, moves=False) is None:
            if any(self.rows.samples in shape[:2] for shape, *_ in self._record.foreign):
                raise NotRecordedError("a tensor with an entry for each sample comes from code without a record")
            return depends_on_place()
        return error if error is not None or "random" in kinds else self._mixing_of_one(whole, reached)

    def _mixing_of_halves(
        self, whole: Run, reached: Collection[int], kinds: Collection[str], *, moves: bool
    ) -> BatchDependentLossError | None:
        for kept, source_B in self.rows.halves(moves=moves):

            def exchanged(tensor: Tensor, place: Place, source_B: Tensor = source_B) -> Tensor:
                return self.rows.rearranged(tensor, source_B) if place[0] in (*kinds, "list") else tensor

            far = None if "random" in kinds else self._far(whole, kept, source_B, exchanged)
            if far is not None and self._change(whole, far, reached, kept) is None:
                continue
            error = self._change(whole, self.rerun(exchanged), reached, kept)
            if error is None and far is not None and self.differ(whole.grads, far.grads, kept) > _FAR_CHANGE:
                error = mixed_loss(1.0, by_bound=True)
            if error is not None:
                return error
        return None

    def _mixing_of_one(self, whole: Run, reached: Collection[int]) -> BatchDependentLossError | None:
        """Keeps one sample, with copies of it whose losses are low, or high, or whose data are far away.

        The losses are low beside the largest gradient. Unless the loop was checked before, they are also high beside
        it, so that every output may be wrong, and low beside the smallest gradient, so that every one may be right.
        """
        if self._settled and self.rerun.large:  # each run is a large part of the step
            return None
        sq_norm_B = self._sq_norms(whole.grads)
        largest, smallest = sq_norm_B.argmax(), sq_norm_B.where(sq_norm_B > 0, torch.inf).argmin()
        cases = [("output", largest, -_FAR), ("output", largest, _FAR), ("output", smallest, -_FAR)]
        if any(tensor.is_floating_point() for tensor in self._record.data):
            cases += [("data", largest, -_FAR), ("data", largest, _FAR)]
        for kind, one, times in cases[:1] if self._settled else cases:
            at = one[None]
            kept, source_B = Kept(at, at), at.expand(self.rows.samples)

            def exchanged(tensor: Tensor, place: Place, source_B: Tensor = source_B) -> Tensor:
                return self.rows.rearranged(tensor, source_B) if place[0] != "random" else tensor

            far = self._far(whole, kept, source_B, exchanged, times, kind)
            if far is not None and self.differ(of_calls(whole.inputs, reached), of_calls(far.inputs, reached), kept):
                return mixed_inputs()
            if far is not None and self.differ(whole.grads, far.grads, kept) > _FAR_CHANGE:
                return mixed_loss(1.0, by_bound=True)
        return None

    def _change(self, whole: Run, run: Run, reached: Collection[int], kept: Kept) -> BatchDependentLossError | None:
        if self._record.lists and _shapes(run) != _shapes(whole):
            raise NotRecordedError("lists of the batch hold samples of different lengths")
        if self.differ(of_calls(whole.inputs, reached), of_calls(run.inputs, reached), kept):
            return mixed_inputs()
        share = self.differ(whole.grads, run.grads, kept)
        return mixed_loss(share) if share else None

    def _far(
        self,
        whole: Run,
        kept: Kept,
        source_B: Tensor,
        exchanged: Arrange,
        times: float = _FAR,
        kind: str = "output",
    ) -> Run | None:
        """Runs with outputs or data of the others far away: outputs where losses are high, or low for ``times < 0``.

        Returns None if the loop refuses them, and raises BranchError if it takes another branch.
        """
        others = torch.ones(self.rows.samples, dtype=torch.bool).index_fill(0, kept.now, False).nonzero().flatten()

        def moved(tensor: Tensor, place: Place) -> Tensor:
            grad = torch.ones_like(tensor) if kind == "data" and tensor.is_floating_point() else whole.grads.get(place)
            rows, up = self.rows.of(tensor), None if grad is None else self.rows.of(grad)
            if rows is None or up is None or place[0] != kind:
                return exchanged(tensor, place)
            source, size = source_B.to(rows.device), self._size(tensor, place)
            if not size < torch.inf:
                return self.rows.like(tensor, rows[source])
            if len(kept.now) == 1:  # the others are copies of it, which are moved once
                one = rows[source[:1]]
                away = one + up[source[:1]].sign_().mul_(times * (1 + size))
                copies = away.expand_as(rows).clone()
                return self.rows.like(tensor, copies.index_copy_(0, kept.now.to(rows.device), one))
            above = up[source[others.to(source.device)]].sign_().mul_(times * (1 + size))
            return self.rows.like(tensor, rows[source].index_add_(0, others.to(rows.device), above))

        if kind in self._refused:
            return None
        try:
            return self.rerun(moved)
        except BranchError:
            raise
        except NotRecordedError:  # such as a loss of probabilities
            self._refused.add(kind)
            return None

    def try_other_branches(self, whole: Run) -> None:
        """Runs the loop with all outputs, or all data, far away, where it may take a branch that no batch takes.

        Raises:
            BranchError: If it takes one.
        """
        if not self.rerun.has_branches():
            return
        for kind, times in itertools.product(("output", "data"), (_FAR, -_FAR)):

            def moved(tensor: Tensor, place: Place, kind: str = kind, times: float = times) -> Tensor:
                if place[0] != kind or not tensor.is_floating_point() or not self._size(tensor, place) < torch.inf:
                    return tensor
                grad = whole.grads.get(place)
                away = torch.ones_like(tensor) if grad is None else grad.sign()
                return tensor + away * (times * (1 + self._size(tensor, place)))

            try:
                self.rerun.try_branches(moved)
            except BranchError:
                raise
            except NotRecordedError:  # such as a loss of probabilities
                continue

    def _size(self, output: Tensor, place: Place) -> float:
        """Returns the largest absolute entry of an output or of data; NaN if it has one."""
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

    def _has_order(self) -> bool:
        """Returns True if samples may have numbers by their place: random or read ones, or of data that are no tensors.

        So may inputs of the model that are constant, as positions are.
        """
        record = self._record
        if (
            record.left
            or record.drew
            or record.drew_by_python
            or self._has_constants([call.inputs for call in models(record)])
        ):
            return True
        calls = [call for call in record.calls if isinstance(call, Call)]
        return self.others and (self._has_constants(calls) or any(takes_one(c.function, c.args) for c in calls))

    def _has_constants(self, calls: Any) -> bool:
        """Returns True if a constant in these calls has an entry for each sample."""
        constants = (t for t in tensors_in(calls) if id(t) not in self._record.dependent)
        return any(self.rows.samples in tensor.shape[:2] for tensor in constants)

    # Mean or sum

    def with_sample(self, grads: Mapping[Place, Tensor]) -> tuple[Run, Sample | None]:
        """Runs the loop unchanged. Also returns the sample with the largest finite gradient; None if all are 0."""
        sq_norm_B = self._sq_norms(grads)
        at, size = sq_norm_B.argmax(), sq_norm_B.max()
        one, values = slice(int(at), int(at) + 1), dict[Place, Tensor]()

        def note(tensor: Tensor, place: Place) -> Tensor:
            if place[0] != "list":
                values.update(self.rows.some({place: tensor}, one))
            return tensor

        whole = self.rerun(note)
        kept, inputs = (self.rows.some(some, one) for some in (whole.grads, all_inputs(whole)))
        sample = Sample(self.rows.samples, values, kept, inputs, self.numbers())
        return whole, sample if size > 0 else None

    def _sq_norms(self, grads: Mapping[Place, Tensor]) -> Tensor:
        """Returns the squared norms ``(B,)`` of the gradients of each sample; 0 for those that are not finite."""
        rows = [found for grad in grads.values() if (found := self.rows.of(grad)) is not None]
        return sum((norms(some.flatten(1)).square().cpu() for some in rows), torch.zeros(1)).nan_to_num(0, 0, 0)

    def can_tell(self, earlier: Sample, whole: Run) -> bool:
        """Returns True if a mean and a sum over batches of these sizes differ by more than rounding."""
        differ = abs(earlier.samples / self.rows.samples - 1) >= 3 * self.tolerance
        return differ and any(bool(grad.any()) for grad in whole.grads.values())  # 0 if the loss was multiplied by 0

    def reduction(self, earlier: Sample) -> str | None:
        """Returns "mean", "sum" or "neither", by a sample of an earlier batch; None if it cannot be told."""
        # Elements of a list, and constants with an entry for each sample, were those of another batch.
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
        now, inputs = (self.rows.some(some, slice(1)) for some in (run.grads, all_inputs(run)))
        if self._record.left and comparable and not self._record.drew:
            alike = {p: one for p, one in earlier.inputs.items() if p in inputs and inputs[p].shape == one.shape}
            if largest_change(Rows(1, lambda tensor: tensor), alike, inputs, self.tolerance):
                raise mixed_inputs()
        told = reduction_of(now, earlier.grads, earlier.samples / self.rows.samples, self.tolerance)
        return told or ("neither" if comparable and not self._record.left else None)

    def reduction_of_half(self, whole: Run) -> str | None:
        """The same by leaving half of the samples out; None if a number of the loop may follow from the batch."""
        half = self.rows.samples // 2
        if self._record.left or self.others or any(n >= half or n != int(n) for n in self.numbers()):
            return None
        try:
            grads = self.rerun(lambda tensor, place: self.rows.rearranged(tensor, torch.arange(half))).grads
        except NotRecordedError:
            return None
        now, then = self.rows.some(grads, slice(half), samples=half), self.rows.some(whole.grads, slice(half))
        told = reduction_of(now, then, self.rows.samples / half, self.tolerance)
        return None if told == "neither" else told

    def numbers(self) -> list[float]:
        """Returns the Python numbers in the calls of the loop."""
        calls = [(call.args, call.kwargs) for call in self._record.calls if isinstance(call, Call)]
        leaves = [leaf for call in calls for leaf in pytree.tree_leaves(call)]
        parts = [(n.start, n.stop, n.step) if isinstance(n, slice) else (n,) for n in leaves]
        return [one for part in parts for one in part if type(one) in (int, float)]


def of_calls(inputs: Sequence[Sequence[Tensor]], reached: Collection[int]) -> dict[tuple[int, int], Tensor]:
    """Returns the inputs of the calls of the model that the backward pass reached."""
    return {(i, k): tensor for i in reached for k, tensor in enumerate(inputs[i])}


def all_inputs(run: Run) -> dict[tuple[int, int], Tensor]:
    """Returns the inputs of all calls of the model."""
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
