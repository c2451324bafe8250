"""Checks a training step: runs it with other data in some samples, and compares the results of the others."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from dpengine.capture.record import swap_batch_axis
from dpengine.capture.tensors import tensors_in_outputs
from dpengine.errors import BatchDependentLossError, keyword_hints
from dpengine.independence.compare_runs import (
    EXACT,
    HALF,
    BatchAxis,
    KeptSamples,
    check_reduction,
    is_ambiguous,
    largest_change,
    map_batch,
    mixed_inputs_error,
    mixed_loss_error,
    mixed_outputs_error,
    number_of_samples,
    reduction_of,
)
from dpengine.independence.random_states import restored_random_states
from dpengine.independence.watch_step import CHECKED_LOOPS, ReplaceOutput, StepTensors, StepWatch, TensorKey
from dpengine.sampling.collate import restored_generators
from dpengine.sampling.loader import PrivateIteration

from .loss import note_checked

Step = Callable[[Any], Any]


@dataclass(frozen=True)
class LoopCheck:
    """Result of `check_loop`.

    Attributes:
        batches: Number of batches on which no mixing of samples was seen.
        reduction: Detected reduction of the loss, ``"mean"`` or ``"sum"``; None if it is unknown.
        undecided: Reasons why other batches could not be checked.
    """

    batches: int
    reduction: str | None
    undecided: tuple[str, ...] = ()

    @property
    def ok(self) -> bool:
        """True if every batch was checked."""
        return self.batches > 0 and not self.undecided


@keyword_hints
def check_loop(
    step: Step, batches: Iterable[Any], *, loss_reduction: str = "mean", batch_first: bool = True
) -> LoopCheck:
    """Checks that a training step does not mix the samples of a batch.

    Runs the step with other data in some samples, and compares the results of the other samples. Their model inputs and
    output gradients must not change, except for a constant factor if half of the samples are left out. If the model
    computes the loss, the gradients of the outputs of its layers are compared.

    The check during training runs recorded calls again. This check calls ``step`` itself, about eight times for each
    batch. It therefore supports losses that branch on values, use NumPy or scripted functions, or are computed in a
    ``torch.autograd.Function``.

    Gradients and buffers of the model, random states, and the engine and ledger of a private model do not change.
    During the check, ``backward()`` computes no gradients of parameters, and ``zero_grad()`` does nothing. Other
    changes by ``step``, such as to a counter or a queue, are not restored.

    Example:
        >>> import torch.nn.functional as F
        >>> from dpengine import check_loop
        >>> model = torch.nn.Linear(4, 3)
        >>> batch = torch.randn(8, 4), torch.arange(8) % 3
        >>> check_loop(lambda batch: F.cross_entropy(model(batch[0]), batch[1]), [batch])
        LoopCheck(batches=1, reduction='mean', undecided=())

    Args:
        step: Called with one batch. It must call the model, which may be private, compute the loss, and call
            ``backward()`` or return the loss. It must not call ``optimizer.step()``.
        batches: Batches of at least two samples each, from an ordinary loader of the data set, not a private loader.
            The number of samples is the size of the first tensor. Without tensors, it is the size of the arrays, or
            the length of the lists in a dict or of a list of samples, such as texts.
        loss_reduction: Same value as for ``make_private``: ``"mean"`` or ``"sum"``.
        batch_first: Same value as for ``make_private``: False if the batch is on axis 1.

    Returns:
        The number of batches without mixing, and the reasons why others could not be checked.

    Raises:
        BatchDependentLossError: If the model inputs, outputs or output gradients of a sample depend on other samples.
        ReductionError: If the loss is a sum but ``loss_reduction`` is ``"mean"``, or vice versa.
        BatchStateError: If ``step`` calls ``optimizer.step()``.
        TypeError: If ``step`` is not callable, or the number of samples of a batch is ambiguous.
        ValueError: If there is no batch, a batch has fewer than two samples, ``batches`` is a private loader,
            ``loss_reduction`` is unknown, or ``step`` calls no model with trainable parameters or computes no loss.
    """  # noqa: DOC502 - raised by called functions
    if not callable(step):
        raise TypeError(
            f"check_loop: step is {torch.typename(step)}, which is not callable. Pass a function of a batch."
        )
    if loss_reduction not in ("mean", "sum"):
        raise ValueError(f"loss_reduction={loss_reduction!r} is not known. Choose one of: 'mean', 'sum'.")
    if isinstance(batches, PrivateIteration):
        raise ValueError("check_loop: batches is a private loader, whose batches are charged. Pass a DataLoader.")
    checked, undecided, reductions = 0, dict[str, None](), set[str | None]()
    models: set[nn.Module] = set()
    passed = False
    try:
        with restored_generators(), restored_random_states():
            for batch in batches:
                try:
                    check = _BatchCheck(step, batch, batch_first=batch_first, models=models)
                    reductions.add(check.run(loss_reduction))
                    checked += 1
                except _UndecidedError as error:
                    undecided[str(error)] = None
        if not (checked or undecided):
            raise ValueError("check_loop: batches is empty. Pass at least one batch.")
        passed = not undecided
    finally:
        note_checked(models, passed=passed)
        CHECKED_LOOPS.update(models) if passed else CHECKED_LOOPS.difference_update(models)
    reductions.discard(None)
    return LoopCheck(checked, reductions.pop() if len(reductions) == 1 else None, tuple(undecided))


class _UndecidedError(Exception):
    """Raised if a batch cannot be checked. The message is the reason."""


class _BatchCheck:
    """Check of a step with one batch. Adds the models that the step calls to ``models``."""

    def __init__(self, step: Step, batch: Any, *, batch_first: bool, models: set[nn.Module]):
        to_front = (lambda tensor: tensor) if batch_first else swap_batch_axis
        samples = number_of_samples(batch, to_front)
        if samples is None:
            raise TypeError(
                f"check_loop: the number of samples of a batch ({torch.typename(batch)}) is unknown. Pass a dict of "
                "lists, a list of samples, or a batch with a tensor or array that has an entry for each sample."
            )
        if samples < 2:
            raise ValueError(f"check_loop: a batch has {samples} samples. Pass at least two samples.")
        self._step, self._batch, self._models = step, batch, models
        self._batch_axis = BatchAxis(samples, to_front)

    def run(self, declared: str) -> str | None:
        """Raises an error if samples are mixed. Returns the detected reduction; None if it is unknown."""
        baseline = self._run_step(lambda tensor: tensor, lambda key, output: output)
        tolerance = HALF if baseline.half else EXACT
        again = self._try(lambda tensor: tensor, lambda key, output: baseline.outputs.get(key, output))
        if largest_change(self._batch_axis, baseline.inputs, again.inputs, tolerance) or largest_change(
            self._batch_axis, baseline.grads, again.grads, tolerance
        ):
            raise _UndecidedError("step gives other gradients when it runs again with the same batch")
        if not any(self._batch_axis.split(grad) is not None for grad in baseline.grads.values()):
            raise _UndecidedError("no gradient has the batch on its axis, so samples cannot be compared")
        if (error := self._mixing(baseline, tolerance)) is not None:
            if is_ambiguous(self._batch, self._batch_axis.samples):
                raise _UndecidedError("a list of the batch may hold samples or columns: pass a batch of another size")
            raise error
        reduction = self._reduction(baseline, tolerance)
        check_reduction(reduction, declared)
        return reduction

    def _mixing(self, baseline: StepTensors, tolerance: float) -> BatchDependentLossError | None:
        """Returns the error if a sample changes when other samples get other data; else None."""
        only_tensors = all(isinstance(leaf, Tensor) for leaf in pytree.tree_leaves(self._batch))
        data = tensors_in_outputs(self._batch)
        permute = not baseline.drew_random and only_tensors and self._batch_axis.can_permute(data)
        for kept, source_B in self._batch_axis.halves(permute=permute):
            rerun = self._try(*self._replacements(baseline, source_B))
            if largest_change(self._batch_axis, baseline.inputs, rerun.inputs, tolerance, kept):
                return mixed_inputs_error()
            batched = {
                key: output for key, output in baseline.original.items() if self._batch_axis.split(output) is not None
            }
            if largest_change(self._batch_axis, batched, rerun.original, tolerance, kept):
                return mixed_outputs_error()
            if change := largest_change(
                self._batch_axis, *self._comparable(baseline, rerun, kept, tolerance), tolerance, kept
            ):
                return mixed_loss_error(change)
        return None

    def _reduction(self, baseline: StepTensors, tolerance: float) -> str | None:
        """Returns the reduction, from a run with half of the samples; None if it is unknown."""
        half = self._batch_axis.samples // 2
        try:
            half_run = self._run_step(*self._replacements(baseline, torch.arange(half)))
        except Exception:  # for example if the loop requires a fixed batch size
            return None
        half_grads = self._batch_axis.select(half_run.grads, slice(half), samples=half)
        full_grads = self._batch_axis.select(baseline.grads, slice(half))
        reduction = reduction_of(half_grads, full_grads, self._batch_axis.samples / half, tolerance)
        if reduction == "neither" and not baseline.drew_random:
            raise BatchDependentLossError(
                f"The loss depends on the number of samples as neither a mean nor a sum does: with {half} instead of "
                f"{self._batch_axis.samples} samples, the gradient of a sample changed by another factor.",
                fix="Divide the sum over the samples by the number of samples only.",
            )
        return None if reduction == "neither" else reduction

    def _replacements(
        self, baseline: StepTensors, source_B: Tensor
    ) -> tuple[Callable[[Tensor], Tensor], ReplaceOutput]:
        """Returns functions that select the samples ``source_B`` in a batch, and in the outputs of the baseline run."""

        def replace_outputs(key: TensorKey, output: Tensor) -> Tensor:
            original = baseline.outputs.get(key)
            return output if original is None else self._batch_axis.gather(original, source_B)

        return lambda tensor: self._batch_axis.gather(tensor, source_B), replace_outputs

    def _comparable(
        self, baseline: StepTensors, rerun: StepTensors, kept: KeptSamples, tolerance: float
    ) -> tuple[Mapping[TensorKey, Tensor], Mapping[TensorKey, Tensor]]:
        """Returns the gradients of both runs, without those of layers whose axis 0 is not the batch.

        A change of the outputs at the indices of kept samples shows that axis 0 is not the batch.
        """
        usable = {
            key: grad
            for key, grad in baseline.grads.items()
            if key not in baseline.layers
            or (
                key in rerun.layers
                and self._batch_axis.split(grad) is not None
                and not largest_change(
                    self._batch_axis, {key: baseline.layers[key]}, {key: rerun.layers[key]}, tolerance, kept
                )
            )
        }
        if not usable:
            raise _UndecidedError("the model computes the loss, and none of its layers has the batch on axis 0")
        return usable, rerun.grads

    def _try(self, replace_data: Callable[[Tensor], Tensor], replace_outputs: ReplaceOutput) -> StepTensors:
        try:
            return self._run_step(replace_data, replace_outputs)
        except Exception as error:
            message = str(error).split("\n", maxsplit=1)[0][:100]
            raise _UndecidedError(f"running step again raised {type(error).__name__}: {message}") from error

    def _run_step(self, replace_data: Callable[[Tensor], Tensor], replace_outputs: ReplaceOutput) -> StepTensors:
        watch = StepWatch(replace_outputs)
        batch = map_batch(self._batch, self._batch_axis.samples, lambda tensor: replace_data(tensor.detach()).clone())
        with restored_generators(), restored_random_states(), watch.active():
            returned = self._step(batch)
            if not watch.differentiated and isinstance(returned, Tensor) and returned.requires_grad:
                watch.backward([returned], [None])
        if not watch.models:
            raise ValueError("check_loop: step called no model with trainable parameters.")
        if not watch.differentiated:
            raise ValueError("check_loop: step called no backward(), and returned no loss. Return the loss.")
        self._models.update(watch.models)
        return watch.tensors()
