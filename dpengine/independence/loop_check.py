"""Compares a recorded loop with reruns in which some samples have other data."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from dpengine.capture.tensors import tensors_in
from dpengine.errors import BatchDependentLossError

from .compare_runs import (
    EXACT,
    HALF,
    BatchAxis,
    KeptSamples,
    largest_change,
    mixed_inputs_error,
    mixed_loss_error,
    norms,
    position_error,
    reduction_of,
)
from .loop_record import LoopRecord
from .recorded_call import Call, ModelCall, TensorKey
from .run_again import BranchError, NotRecordedError, ReplaceTensor, Rerun, Run
from .torch_calls import reads_single_samples

_SHIFT = 30  # shift of outputs relative to their size; large enough to exceed a bound on a mean of losses
_MIN_CHANGE = 0.05  # smallest relative change that counts with shifted outputs; a smaller one may be rounding


class Sample(NamedTuple):
    """A sample of an earlier batch.

    Attributes:
        samples: Size of the earlier batch.
        values: Data and model outputs of the sample.
        grads: Gradients of its model outputs.
        inputs: Its model inputs, by index of the call and of the tensor.
        numbers: Python numbers in the calls of the loop.
    """

    samples: int
    values: Mapping[TensorKey, Tensor]
    grads: Mapping[TensorKey, Tensor]
    inputs: Mapping[tuple[int, int], Tensor]
    numbers: Sequence[float]


class RecordedLoopCheck:
    """Compares a recorded loop with reruns of it.

    Attributes:
        batch_axis: Batch axis of the tensors.
        rerun: Runs the record again.
        tolerance: Relative tolerance between two runs.
        other_data: True if the batch holds data other than tensors, such as texts.
    """

    def __init__(self, record: LoopRecord, batch_axis: BatchAxis, *, checked_before: bool):
        self.batch_axis, self.tolerance = batch_axis, _tolerance(record)
        self.rerun = Rerun(record, checked_before=checked_before)
        self._checked_before = checked_before
        self.other_data = any(not isinstance(leaf, (Tensor, type(None))) for leaf in pytree.tree_leaves(record.batch))
        self._record = record
        self._rejected_kinds: set[str] = set()  # kinds of tensors whose shift makes the loop raise an error
        self._sizes: dict[TensorKey, float] = {}  # largest absolute entries

    def find_mixing(self, baseline: Run, reached: Collection[int], *kinds: str) -> BatchDependentLossError | None:
        """Returns the error if other values in the other samples change the inputs or gradients of a kept sample.

        Args:
            baseline: The unchanged run.
            reached: Indices of the model calls that the backward pass reached.
            kinds: Kinds of tensors to change: "data", "output" or "random".
        """
        if "random" in kinds and not self._draws_for_samples():
            return None
        permute = not self._depends_on_position() and self.batch_axis.can_permute(self._record.data)
        error = self._find_mixing_of_halves(baseline, reached, kinds, permute=permute)
        unpermuted = partial(self._find_mixing_of_halves, baseline, reached, kinds, permute=False)
        if error is not None and permute and unpermuted() is None:
            if any(self.batch_axis.samples in shape[:2] for shape, *_ in self._record.constant_digests):
                raise NotRecordedError("a tensor with an entry for each sample comes from code without a record")
            return position_error()
        return error if error is not None or "random" in kinds else self._find_mixing_with_copies(baseline, reached)

    def _find_mixing_of_halves(
        self, baseline: Run, reached: Collection[int], kinds: Collection[str], *, permute: bool
    ) -> BatchDependentLossError | None:
        for kept, source_B in self.batch_axis.halves(permute=permute):

            def replace_others(tensor: Tensor, key: TensorKey, source_B: Tensor = source_B) -> Tensor:
                return self.batch_axis.gather(tensor, source_B) if key[0] in (*kinds, "list") else tensor

            shifted = None if "random" in kinds else self._run_shifted(baseline, kept, source_B, replace_others)
            if shifted is not None and self._error_of_change(baseline, shifted, reached, kept) is None:
                continue
            error = self._error_of_change(baseline, self.rerun(replace_others), reached, kept)
            if error is None and shifted and self.largest_change(baseline.grads, shifted.grads, kept) > _MIN_CHANGE:
                error = mixed_loss_error(1.0, by_bound=True)
            if error is not None:
                return error
        return None

    def _find_mixing_with_copies(self, baseline: Run, reached: Collection[int]) -> BatchDependentLossError | None:
        """Keeps one sample, and replaces all others by copies of it with shifted outputs or data.

        The first run keeps the sample with the largest gradient, and shifts the outputs of the copies to low losses.
        Unless the loop was checked before, further runs shift them to high losses, keep the sample with the smallest
        gradient, and shift data.
        """
        if self._checked_before and self.rerun.has_large_outputs:  # each run takes a large fraction of the step
            return None
        sq_norm_B = self._sq_norms(baseline.grads)
        largest, smallest = sq_norm_B.argmax(), sq_norm_B.where(sq_norm_B > 0, torch.inf).argmin()
        cases = [("output", largest, -_SHIFT), ("output", largest, _SHIFT), ("output", smallest, -_SHIFT)]
        if any(tensor.is_floating_point() for tensor in self._record.data):
            cases += [("data", largest, -_SHIFT), ("data", largest, _SHIFT)]
        for kind, index, shift in cases[:1] if self._checked_before else cases:
            kept, source_B = KeptSamples(index[None], index[None]), index.expand(self.batch_axis.samples)

            def replace_others(tensor: Tensor, key: TensorKey, source_B: Tensor = source_B) -> Tensor:
                return self.batch_axis.gather(tensor, source_B) if key[0] != "random" else tensor

            shifted = self._run_shifted(baseline, kept, source_B, replace_others, shift, kind)
            if shifted is not None and self._inputs_change(baseline, shifted, reached, kept):
                return mixed_inputs_error()
            if shifted is not None and self.largest_change(baseline.grads, shifted.grads, kept) > _MIN_CHANGE:
                return mixed_loss_error(1.0, by_bound=True)
        return None

    def _error_of_change(
        self, baseline: Run, run: Run, reached: Collection[int], kept: KeptSamples
    ) -> BatchDependentLossError | None:
        if self._record.lists and _shapes(run) != _shapes(baseline):
            raise NotRecordedError("lists of the batch hold samples of different lengths")
        if self._inputs_change(baseline, run, reached, kept):
            return mixed_inputs_error()
        change = self.largest_change(baseline.grads, run.grads, kept)
        return mixed_loss_error(change) if change else None

    def _inputs_change(self, baseline: Run, run: Run, reached: Collection[int], kept: KeptSamples) -> bool:
        inputs, new_inputs = (inputs_by_key(tensors, reached) for tensors in (baseline.inputs, run.inputs))
        return self.largest_change(inputs, new_inputs, kept) > 0

    def _run_shifted(
        self,
        baseline: Run,
        kept: KeptSamples,
        source_B: Tensor,
        replace_others: ReplaceTensor,
        shift: float = _SHIFT,
        kind: str = "output",
    ) -> Run | None:
        """Runs the loop with a large shift of the outputs or data of the other samples.

        Outputs are shifted towards high losses, or towards low losses if ``shift < 0``. Returns None if the loop
        raises an error for such values. Raises BranchError if the loop takes another branch.
        """
        is_other_B = torch.ones(self.batch_axis.samples, dtype=torch.bool).index_fill(0, kept.in_rerun, False)
        others = is_other_B.nonzero().flatten()

        def shift_others(tensor: Tensor, key: TensorKey) -> Tensor:
            grad = torch.ones_like(tensor) if kind == "data" and tensor.is_floating_point() else baseline.grads.get(key)
            values_BN, grad_BN = self.batch_axis.split(tensor), None if grad is None else self.batch_axis.split(grad)
            if values_BN is None or grad_BN is None or key[0] != kind:
                return replace_others(tensor, key)
            source, size = source_B.to(values_BN.device), self._size(tensor, key)
            if not size < torch.inf:
                return self.batch_axis.restore(tensor, values_BN[source])
            if len(kept.in_rerun) == 1:  # the others are copies of one sample, which is shifted once
                original = values_BN[source[:1]]
                shifted = original + grad_BN[source[:1]].sign_().mul_(shift * (1 + size))
                copies = shifted.expand_as(values_BN).clone()
                copies.index_copy_(0, kept.in_rerun.to(values_BN.device), original)
                return self.batch_axis.restore(tensor, copies)
            shifts = grad_BN[source[others.to(source.device)]].sign_().mul_(shift * (1 + size))
            return self.batch_axis.restore(tensor, values_BN[source].index_add_(0, others.to(values_BN.device), shifts))

        if kind in self._rejected_kinds:
            return None
        try:
            return self.rerun(shift_others)
        except BranchError:
            raise
        except NotRecordedError:  # for example a loss that accepts probabilities only
            self._rejected_kinds.add(kind)
            return None

    def try_other_branches(self, baseline: Run) -> None:
        """Runs the loop with a large shift of all outputs or all data, to reach branches that ordinary batches do not.

        Raises:
            BranchError: If the loop takes another branch.
        """
        if not self.rerun.has_branches():
            return
        for kind, shift in itertools.product(("output", "data"), (_SHIFT, -_SHIFT)):

            def shift_all(tensor: Tensor, key: TensorKey, kind: str = kind, shift: float = shift) -> Tensor:
                if key[0] != kind or not tensor.is_floating_point() or not self._size(tensor, key) < torch.inf:
                    return tensor
                grad = baseline.grads.get(key)
                direction = torch.ones_like(tensor) if grad is None else grad.sign()
                return tensor + direction * (shift * (1 + self._size(tensor, key)))

            try:
                self.rerun.try_branches(shift_all)
            except BranchError:
                raise
            except NotRecordedError:  # for example a loss that accepts probabilities only
                continue

    def _size(self, output: Tensor, key: TensorKey) -> float:
        """Returns the largest absolute entry of an output or of data; NaN if an entry is NaN."""
        if key not in self._sizes:
            self._sizes[key] = float(output.abs().max())
        return self._sizes[key]

    def largest_change(
        self, expected: Mapping[Any, Tensor], actual: Mapping[Any, Tensor], kept: KeptSamples | None = None
    ) -> float:
        """Returns the largest relative change of a sample; 0 within the tolerance."""
        return largest_change(self.batch_axis, expected, actual, self.tolerance, kept)

    def _draws_for_samples(self) -> bool:
        """Returns True if a random tensor has one entry per sample."""
        draws = [call for call in self._record.calls if isinstance(call, Call) and call.random is not None]
        return any(self._record.drawn_for_samples(c.function, t) for c in draws for t in tensors_in(c.result))

    def _depends_on_position(self) -> bool:
        """Returns True if values may depend on the position of a sample in the batch.

        Such values are random numbers, numbers that were read from the batch, and constant inputs of the model, such as
        positions. If the batch holds data other than tensors, constants in other calls count as well.
        """
        record = self._record
        if (
            record.first_conversion
            or record.drew_random
            or record.drew_in_python
            or self._has_constants([call.inputs for call in model_calls(record)])
        ):
            return True
        calls = [call for call in record.calls if isinstance(call, Call)]
        return self.other_data and (
            self._has_constants(calls) or any(reads_single_samples(c.function, c.args) for c in calls)
        )

    def _has_constants(self, calls: Any) -> bool:
        """Returns True if a constant in these calls has one entry per sample."""
        constants = (t for t in tensors_in(calls) if id(t) not in self._record.dependent)
        return any(self.batch_axis.samples in tensor.shape[:2] for tensor in constants)

    # Mean or sum

    def run_with_sample(self, grads: Mapping[TensorKey, Tensor]) -> tuple[Run, Sample | None]:
        """Runs the loop unchanged.

        Returns:
            The run, and the sample with the largest finite gradient; None instead of the sample if all are 0.
        """
        sq_norm_B = self._sq_norms(grads)
        position, size = int(sq_norm_B.argmax()), sq_norm_B.max()
        index, values = slice(position, position + 1), dict[TensorKey, Tensor]()

        def store(tensor: Tensor, key: TensorKey) -> Tensor:
            if key[0] != "list":
                values.update(self.batch_axis.select({key: tensor}, index))
            return tensor

        baseline = self.rerun(store)
        own_grads, inputs = (self.batch_axis.select(t, index) for t in (baseline.grads, all_inputs(baseline)))
        sample = Sample(self.batch_axis.samples, values, own_grads, inputs, self.numbers())
        return baseline, sample if size > 0 else None

    def _sq_norms(self, grads: Mapping[TensorKey, Tensor]) -> Tensor:
        """Returns the squared gradient norms ``(B,)`` of the samples; 0 instead of a value that is not finite."""
        grads_B = [grad_B for grad in grads.values() if (grad_B := self.batch_axis.split(grad)) is not None]
        return sum((norms(grad_B.flatten(1)).square().cpu() for grad_B in grads_B), torch.zeros(1)).nan_to_num(0, 0, 0)

    def can_distinguish(self, earlier: Sample, baseline: Run) -> bool:
        """Returns True if this batch and the earlier one differ enough in size to distinguish a mean from a sum."""
        differ = abs(earlier.samples / self.batch_axis.samples - 1) >= 3 * self.tolerance
        return differ and any(bool(grad.any()) for grad in baseline.grads.values())  # 0 if the loss was multiplied by 0

    def reduction(self, earlier: Sample) -> str | None:
        """Returns "mean", "sum" or "neither", based on a sample of an earlier batch; None if it cannot be decided."""
        # Elements of a list, and constants with one entry per sample, cannot be replaced by those of the earlier batch.
        if self._record.lists or self._has_constants(self._record.calls):
            return None
        comparable = not self._record.drew_for_loss

        def insert_sample(tensor: Tensor, key: TensorKey) -> Tensor:
            nonlocal comparable
            if key[0] == "list":
                return tensor
            values_BN, inserted = self.batch_axis.split(tensor), earlier.values.get(key)
            if values_BN is None or inserted is None or inserted.shape[1:] != values_BN.shape[1:]:
                comparable &= values_BN is None
                return tensor
            return self.batch_axis.restore(tensor, torch.cat([inserted, values_BN[1:]]))

        try:
            run = self.rerun(insert_sample)
        except NotRecordedError:
            return None
        grads, inputs = (self.batch_axis.select(tensors, slice(1)) for tensors in (run.grads, all_inputs(run)))
        if self._record.first_conversion and comparable and not self._record.drew_random:
            shared = {
                p: tensor for p, tensor in earlier.inputs.items() if p in inputs and inputs[p].shape == tensor.shape
            }
            if largest_change(BatchAxis(1, lambda tensor: tensor), shared, inputs, self.tolerance):
                raise mixed_inputs_error()
        reduction = reduction_of(grads, earlier.grads, earlier.samples / self.batch_axis.samples, self.tolerance)
        return reduction or ("neither" if comparable and not self._record.first_conversion else None)

    def reduction_of_half(self, baseline: Run) -> str | None:
        """Returns "mean" or "sum", based on a rerun with half of the samples.

        Returns None if it cannot be decided, for example because a number in the loop may depend on the batch.
        """
        half = self.batch_axis.samples // 2
        if self._record.first_conversion or self.other_data or any(n >= half or n != int(n) for n in self.numbers()):
            return None
        try:
            grads = self.rerun(lambda tensor, key: self.batch_axis.gather(tensor, torch.arange(half))).grads
        except NotRecordedError:
            return None
        half_grads = self.batch_axis.select(grads, slice(half), samples=half)
        full_grads = self.batch_axis.select(baseline.grads, slice(half))
        reduction = reduction_of(half_grads, full_grads, self.batch_axis.samples / half, self.tolerance)
        return None if reduction == "neither" else reduction

    def numbers(self) -> list[float]:
        """Returns the Python numbers in the calls of the loop."""
        calls = [(call.args, call.kwargs) for call in self._record.calls if isinstance(call, Call)]
        leaves = [leaf for call in calls for leaf in pytree.tree_leaves(call)]
        parts = [(n.start, n.stop, n.step) if isinstance(n, slice) else (n,) for n in leaves]
        return [number for part in parts for number in part if type(number) in (int, float)]


def inputs_by_key(inputs: Sequence[Sequence[Tensor]], reached: Collection[int]) -> dict[tuple[int, int], Tensor]:
    """Returns the inputs of the model calls with the indices ``reached``, by index of the call and of the tensor."""
    return {(i, k): tensor for i in reached for k, tensor in enumerate(inputs[i])}


def all_inputs(run: Run) -> dict[tuple[int, int], Tensor]:
    """Returns the inputs of all model calls, by index of the call and of the tensor."""
    return inputs_by_key(run.inputs, range(len(run.inputs)))


def model_calls(record: LoopRecord) -> list[ModelCall]:
    """Returns the calls of the model."""
    return [call for call in record.calls if isinstance(call, ModelCall)]


def _shapes(run: Run) -> list[torch.Size]:
    return [tensor.shape for inputs in run.inputs for tensor in inputs]


def _tolerance(record: LoopRecord) -> float:
    tensors = [tensor for call in model_calls(record) for tensor in call.recorded.outputs]
    tensors += [t for call in record.calls if isinstance(call, Call) for t in tensors_in(call.result)]
    is_half = any(tensor.dtype in (torch.float16, torch.bfloat16) for tensor in tensors)
    return HALF if is_half or any(call.autocast for call in record.calls if isinstance(call, Call)) else EXACT
