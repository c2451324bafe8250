"""Independence check of a training pass: reruns a batch with other data in some samples and compares the results.

Clipping bounds the contribution of a sample only if the model keeps samples independent and in order. A layer that
sorts the batch, averages over it or has time on axis 0 mixes the gradients of several samples. The capture of layer
calls cannot detect this. The check therefore reruns the model, forward and backward, with the same random numbers:

1. unchanged, with the output gradients multiplied by a random weight for each sample;
2. with half of the samples kept, and other data and zero output gradients for the others;
3. like 2, with the other half kept.

The norms of run 1 must be those of the training pass times the weights; otherwise samples exchange gradients. In runs 2
and 3, a kept sample must have the output and the norm of run 1, and the other samples must have no gradient. The
gradient sums of runs 2 and 3 must add up to that of run 1. If a condition does not hold, for example because a layer
sorts samples or a hook changes gradients, further runs decide. They keep the data of the other samples and set only
their output gradients to zero. This separates the effect of other samples' data from that of their gradients.

Axes: B samples, P parameters.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from dpengine.capture.capture import Capture
from dpengine.capture.record import LayerCall, TensorCall, Use
from dpengine.capture.replay import ForwardPass, Replay
from dpengine.errors import BatchDependentLossError, UnsupportedLayerError, notice
from dpengine.grad_modes.bookkeep import BookKeeping
from dpengine.grad_modes.choose_method import MethodTable

from .compare_runs import EXACT, HALF, Sketches, norm_of_sketch
from .copy_probe import graph_note

_HALVES = 4  # number of additional random halves, for which only gradients are compared
_WEIGHT_RANGE = 650.0  # ratio of the largest to the smallest squared weight of a sample
_NORM_TOLERANCE = 0.05  # relative tolerance between squared norms that two methods computed
_NO_GRADIENT = 1e-8  # fraction of the largest squared norm below which a gradient counts as zero


@dataclass(frozen=True, eq=False)
class _Run:
    """Results of a run.

    Attributes:
        outputs: Outputs of the model.
        norms_BP: Squared gradient norms by sample and parameter.
        parameters: Parameters of the columns of ``norms_BP``.
        sums: Sketch of the gradient sum of each parameter.
        shapes: Shapes of the output gradients of layers.
        random: States of the random generators after the forward passes.
    """

    outputs: list[Tensor]
    norms_BP: Tensor
    parameters: list[nn.Parameter]
    sums: dict[nn.Parameter, Tensor]
    shapes: list[tuple[str, torch.Size]]
    random: list[Tensor]

    @property
    def norms_B(self) -> Tensor:
        return self.norms_BP.sum(dim=1)


def _halves(usable_B: Tensor, seed: int) -> list[Tensor]:
    """Returns masks ``(B,)`` of usable samples: a random half, the other half, and further random halves."""
    usable = usable_B.nonzero().flatten()
    generator = torch.Generator().manual_seed(seed)
    orders = [torch.randperm(len(usable), generator=generator).to(usable.device) for _ in range(1 + _HALVES)]
    halves = [*usable[orders[0]].tensor_split(2), *(usable[order].tensor_split(2)[0] for order in orders[1:])]
    false_B = torch.zeros_like(usable_B)
    return [false_B.index_fill(0, half, True) for half in halves if 0 < len(half) < len(usable_B)]


class IndependenceCheck:
    """Independence check of one batch. Samples without a finite norm are not kept."""

    def __init__(self, capture: Capture, replay: Replay, sq_norms_B: Tensor, seed: int):
        self._capture = capture
        self._replay = replay
        self._sq_norms_B = sq_norms_B
        self._usable_B = sq_norms_B.isfinite()
        self._halves = _halves(self._usable_B, seed)
        self._seed = seed
        self._keep_B = torch.ones_like(self._usable_B)
        self._weight_B: Tensor | None = None  # factors of output gradients
        self._first_inputs = [t for p in replay.reached for t in _tensors_with_axes((p.args, p.kwargs))[:1]]
        self._outputs = [output for forward_pass in replay.reached for output in forward_pass.outputs]
        self._grads = [grad for forward_pass in replay.reached for grad in forward_pass.grads]
        self._all_masked = all(self._front(grad) is not None for grad in self._grads if grad is not None)
        is_half_precision = any(output.dtype in {torch.float16, torch.bfloat16} for output in self._outputs)
        is_half_precision |= any(forward_pass.initial.autocast_enabled for forward_pass in replay.reached)
        self._tolerance = HALF if is_half_precision else EXACT

    def run(self) -> None:
        """Raises UnsupportedLayerError if samples are not independent."""
        if self._passes_quick_check():
            return
        self._keep_B, self._weight_B = torch.ones_like(self._usable_B), None
        baseline = self._try(_unchanged_input) if self._replay.reached else None
        if baseline is None or not self._outputs_agree(self._outputs, baseline.outputs, self._keep_B):
            if self._replay.reached:
                self._warn_unknown(
                    "The forward pass returned a different output when it was run again",
                    "Use only the random generators of torch, Python and NumPy, and keep no state between batches.",
                )
            else:
                self._warn_unknown(
                    "The loss does not depend on the returned outputs of the model",
                    "Call the model, not its forward or its parts: model(x) or self(x), not self.forward(x) or "
                    "model[0](x). Its forward may return the outputs of several networks.",
                )
            return
        if not self._all_gradients_seen(baseline):
            self._warn_unknown(
                "Some gradients do not come through the outputs that the model returns",
                "Return all tensors that the loss depends on.",
            )
        for i, keep_B in enumerate(self._halves):
            self._keep_B = keep_B
            self._check_half(baseline, replaces_others=i < 2)

    def _passes_quick_check(self) -> bool:
        """Returns True if three runs show that samples are independent; False if further runs must decide."""
        if not self._replay.reached or len(self._halves) < 2:
            return False
        square_B = torch.ones_like(self._sq_norms_B)
        if self._all_masked:
            generator = torch.Generator().manual_seed(self._seed)
            rank_B = torch.randperm(len(square_B), generator=generator).to(square_B)
            square_B = _WEIGHT_RANGE ** (-rank_B / len(square_B))
            self._weight_B = square_B.sqrt()
        self._keep_B = self._usable_B
        baseline = self._try(_unchanged_input)
        if baseline is None or not self._outputs_agree(self._outputs, baseline.outputs, self._usable_B):
            return False
        expected_B = (square_B * self._sq_norms_B).to(baseline.norms_B)
        if not _close(baseline.norms_B[self._usable_B], expected_B[self._usable_B], 10 * self._tolerance):
            return False
        remainders = dict(baseline.sums)  # sums of the baseline minus those of both halves
        for keep_B in self._halves[:2]:
            self._keep_B = keep_B
            half = self._try(self._others_replaced)
            if half is None or not (self._comparable(baseline, half) and self._kept_agree(baseline, half)):
                return False
            for parameter, sketch in half.sums.items():
                remainders[parameter] = remainders.get(parameter, torch.zeros_like(sketch)) - sketch
        return all(self._is_small(remainder, baseline) for remainder in remainders.values())

    def _kept_agree(self, baseline: _Run, half: _Run) -> bool:
        """Returns True if kept samples have the outputs and norms of the unchanged run, and others have no gradient."""
        expected_B, actual_B = baseline.norms_B, half.norms_B
        if self._all_masked:
            expected_B = torch.where(self._keep_B, expected_B, 0)
        else:
            expected_B, actual_B = expected_B[self._keep_B], actual_B[self._keep_B]
        same_outputs = self._outputs_agree(self._outputs, half.outputs, self._keep_B)
        return _close(actual_B, expected_B, self._tolerance) and same_outputs

    def _is_small(self, sketch: Tensor, run: _Run) -> bool:
        """Returns True if a difference of sums is a rounding error. An overflow (NaN) counts as small."""
        size = float(run.norms_B.sqrt().nan_to_num(0, 0, 0).sum())
        return not bool(norm_of_sketch(sketch) > 10 * self._tolerance * size)

    def _check_half(self, baseline: _Run, *, replaces_others: bool) -> None:
        same = self._try(_unchanged_input)
        if same is None:  # for example without enough memory
            self._warn_unknown("A batch could not be run again", "Make sure that there is enough memory.")
            return
        changed = self._try(self._others_replaced) if replaces_others else same
        if changed is None or not self._comparable(same, changed):
            changed = same
        if self._not_mixed(baseline, same) and self._unchanged(baseline, same, changed):
            return
        if not self._all_masked:
            self._check_weights(same, changed)
        first_changed = self._try(self._first_replaced) if replaces_others else None
        if (
            first_changed is not None
            and self._comparable(same, first_changed)
            and self._not_mixed(baseline, same)
            and self._unchanged(baseline, same, first_changed)
        ):
            self._warn_unknown(
                "An input has the length of the batch, but may not have a batch axis",
                "Register data that all samples share as a buffer of the model.",
            )
            return
        self._raise(same, changed)

    def _check_weights(self, same: _Run, changed: _Run) -> None:
        """Raises if a loss inside the model rescaled the gradients of all kept samples, as a mean over tokens does."""
        expected, actual = (run.norms_B[self._keep_B] for run in (same, changed))
        ratios = (actual / expected)[expected > _NO_GRADIENT * expected.max()].sqrt()
        if len(ratios) < 2:
            return
        low, high = float(ratios.min()), float(ratios.max())
        if high - low <= 10 * self._tolerance * high < abs(high - 1):
            raise BatchDependentLossError(
                "The loss that the model computes mixes the samples of a batch: with other data in some samples, the "
                f"gradients of all others were {high:.3g} times as large. Typical causes are a mean over the tokens of "
                "the batch, and class weights.",
                fix="Compute the loss outside the model as a mean over samples; for tokens that is "
                "dpengine.losses.per_token_mean(logits, labels), after import dpengine.losses.",
            )

    def _comparable(self, run: _Run, other: _Run) -> bool:
        """Returns True if both runs used the same random numbers for the same elements.

        Dropout masks differ if shapes depend on the data, as with padding to the longest sample.
        """
        none_drawn = _equal(run.random, [state for p in self._replay.reached for _, state in p.initial.random])
        return _equal(run.random, other.random) and (none_drawn or run.shapes == other.shapes)

    def _all_gradients_seen(self, baseline: _Run) -> bool:
        """Returns True if the rerun computed the gradients that the grad mode received."""
        expected = self._sq_norms_B[self._usable_B].sum()
        return bool((baseline.norms_B[self._usable_B].sum() - expected).abs() <= _NORM_TOLERANCE * expected)

    # Runs

    def _try(self, transform: Callable[[Tensor], Tensor]) -> _Run | None:
        try:
            return self._run(transform)
        except Exception:
            return None

    def _run(self, transform: Callable[[Tensor], Tensor]) -> _Run:
        recorder = _Recorder(self._capture)
        outputs: list[Tensor] = []
        with self._capture.redirected(recorder, self._capture.rows):
            for forward_pass in self._replay.reached:
                outputs += self._rerun(forward_pass, transform)
        columns = {parameter: i for i, parameter in enumerate(recorder.mode.parameters)}
        norms_BP = recorder.mode.sq_norms(columns, len(columns), 1.0).to(self._keep_B.device)
        sums = Sketches()
        finite_B = norms_BP.sum(dim=1).isfinite()
        if not finite_B.all():
            recorder.mode.drop(~finite_B)  # their data may be copies of those of other samples
        counted_B = finite_B if self._all_masked else finite_B & self._keep_B
        recorder.mode.add_sums(columns, counted_B.unsqueeze(1).expand_as(norms_BP).to(norms_BP.dtype), 1.0, sums)
        random = [state for forward_pass in self._replay.reached for _, state in forward_pass.random_after]
        return _Run(outputs, norms_BP, list(columns), sums.by_parameter, recorder.shapes, random)

    def _rerun(self, forward_pass: ForwardPass, transform: Callable[[Tensor], Tensor]) -> list[Tensor]:
        args, kwargs = forward_pass.args, forward_pass.kwargs
        if self._can_replace((args, kwargs)):
            args, kwargs = pytree.tree_map(lambda v: transform(v) if isinstance(v, Tensor) else v, (args, kwargs))
        grads = [None if grad is None else self._masked(grad) for grad in forward_pass.grads]
        return forward_pass.rerun(self._capture.model, lambda outputs: grads, args, kwargs)

    def _front(self, tensor: Tensor) -> Tensor | None:
        """Returns the tensor with the batch on axis 0; None if it has no batch axis."""
        front = self._capture.batch_to_front(tensor)
        return front if front.dim() and front.shape[0] == len(self._keep_B) else None

    def _can_replace(self, inputs: Any) -> bool:
        """Returns False if an input may hold flat indices for an EmbeddingBag."""
        tensors = _tensors_with_axes(inputs)
        indices = [t for t in tensors if not t.is_floating_point() and t.dtype is not torch.bool]
        shared = [t for t in indices if self._front(t) is None and self._capture.batch_to_front(t).shape[0] != 1]
        return not shared and not any(_may_be_offsets(t) for t in indices)

    def _others_replaced(self, tensor: Tensor) -> Tensor:
        """Replaces each sample that is not kept by the first kept sample, so that none of its data remain."""
        front = self._front(tensor)
        if front is None:
            return tensor
        first = front[int(self._keep_B.nonzero()[0])]
        return self._capture.batch_to_front(torch.where(_broadcast(self._keep_B, front), front, first))

    def _first_replaced(self, tensor: Tensor) -> Tensor:
        """Replaces samples in the first input only. Other inputs may have the length of the batch by chance."""
        return self._others_replaced(tensor) if any(t is tensor for t in self._first_inputs) else tensor

    def _masked(self, grad: Tensor) -> Tensor:
        front = self._front(grad)
        if front is None:
            return grad
        kept = front.masked_fill(~_broadcast(self._keep_B, front), 0)
        if self._weight_B is not None:
            kept *= _broadcast(self._weight_B, front).to(kept.dtype)
        return self._capture.batch_to_front(kept)

    # Comparison

    def _has_gradient(self, baseline: _Run, run: _Run) -> Tensor:
        return run.norms_B > _NO_GRADIENT * baseline.norms_B[self._keep_B].max()

    def _not_mixed(self, baseline: _Run, same: _Run) -> bool:
        """Returns True if the full gradient of each kept sample is at one index, possibly that of another sample."""
        if not self._all_masked:
            return True
        has_gradient_B = self._has_gradient(baseline, same)
        few = int(has_gradient_B.sum()) <= int(self._keep_B.sum())
        return few and _close(same.norms_B[has_gradient_B], baseline.norms_B[has_gradient_B], self._tolerance)

    def _unchanged(self, baseline: _Run, same: _Run, changed: _Run) -> bool:
        """Returns True if the results of kept samples are equal in both runs."""
        # If the model computes the loss, only norms of kept samples are compared, because others also have gradients.
        norms = [
            run.norms_B[self._has_gradient(baseline, run) if self._all_masked else self._keep_B]
            for run in (same, changed)
        ]
        expected, actual = (norms_B.sort().values if self._all_masked else norms_B for norms_B in norms)
        agree = expected.shape == actual.shape and _close(actual, expected, self._tolerance)
        for parameter in same.sums.keys() | changed.sums.keys():
            zero = torch.zeros(())
            agree = agree and self._is_small(same.sums.get(parameter, zero) - changed.sums.get(parameter, zero), same)
        return agree and self._outputs_agree(same.outputs, changed.outputs, self._keep_B)

    def _outputs_agree(self, expected: list[Tensor], actual: list[Tensor], selected_B: Tensor) -> bool:
        for output, new_output, grad in zip(expected, actual, self._grads, strict=True):
            front, new_front = self._front(output), self._front(new_output)
            if grad is None or front is None or new_front is None or front.shape != new_front.shape:
                continue
            a, b = front[selected_B.to(front.device)], new_front[selected_B.to(front.device)]
            if torch.equal(a, b):
                continue  # fast path for the common case
            finite = a.isfinite()
            scale = float(torch.where(finite, a.abs(), 0).max()) if a.numel() else 0.0
            if not ((a - b).abs() <= self._tolerance * (a.abs() + scale)).logical_or(~finite).all():
                return False
        return True

    def _warn_unknown(self, reason: str, fix: str) -> None:
        unknown = "so it is not known whether the model keeps the samples of a batch independent"
        notice("DPE012", f"{reason}, {unknown}. {fix}", key=reason, of=self._capture.model)

    def _raise(self, same: _Run, changed: _Run) -> None:
        names = {parameter: name for name, parameter in self._capture.model.named_parameters()}
        comparable = list(map(id, same.parameters)) == list(map(id, changed.parameters))
        change_P = ((changed if comparable else same).norms_BP - same.norms_BP)[self._keep_B].abs().amax(dim=0)
        if self._all_masked:
            change_P = torch.maximum(change_P, same.norms_BP[~self._keep_B].amax(dim=0))
        name = names.get(same.parameters[int(change_P.argmax())]) if change_P.numel() else None
        raise UnsupportedLayerError(
            "The model does not keep the samples of a batch independent: with other data in some samples, outputs or "
            f"gradients of the others changed{f' (most for {name!r})' if name else ''}. Clipping would not bound the "
            "contribution of a sample.",
            fix=f"{graph_note([(p.args, p.kwargs) for p in self._replay.reached])}"
            "Look for a layer that sorts, averages, normalizes or multiplies over axis 0, or has time or the nodes of "
            "one graph there. Sort before the model, or restore the order before the next layer; a model that restores "
            "it later trains with grad_sample_mode='whole_model'. Give inputs that all samples share, such as "
            "positions, a leading axis of length one: torch.arange(T)[None].",
        )


def _broadcast(values_B: Tensor, front: Tensor) -> Tensor:
    return values_B.to(front.device).view(-1, *[1] * (front.dim() - 1))


def _tensors_with_axes(tree: Any) -> list[Tensor]:
    return [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, Tensor) and leaf.dim()]


def _equal(tensors: list[Tensor], others: list[Tensor]) -> bool:
    return len(tensors) == len(others) and all(map(torch.equal, tensors, others))


def _unchanged_input(tensor: Tensor) -> Tensor:
    return tensor


def _may_be_offsets(indices: Tensor) -> bool:
    """Returns True if these may be the offsets of an EmbeddingBag."""
    return indices.dim() == 1 and int(indices[0]) == 0 and bool((indices.diff() >= 0).all())


def _close(actual: Tensor, expected: Tensor, tolerance: float) -> bool:
    floor = _NO_GRADIENT * expected.max() if expected.numel() else 0.0
    return bool(((actual - expected).abs() <= tolerance * expected + floor).all())


class _Recorder:
    """Receives the layer calls of reruns and records the shapes of their output gradients."""

    def __init__(self, capture: Capture):
        self.mode = BookKeeping(MethodTable(keep_budget=0, timed=False), capture.paused)
        self.shapes: list[tuple[str, torch.Size]] = []

    def receive(self, call: LayerCall, uses: Mapping[str, Use], rule: Any) -> None:
        leaves = pytree.tree_leaves(call.grad_output)  # None for an output that the loss does not use
        self.shapes += [(call.name, tensor.shape) for tensor in leaves if isinstance(tensor, Tensor)]
        self.mode.receive(call, uses, rule)

    def receive_tensor_call(self, call: TensorCall) -> None:
        self.receive(call.layer_call(), call.uses, call.uses.rule)
        call.inputs = call.grad = None

    def receive_rows(self, use: Use, grad: Tensor) -> None:
        self.shapes.append((use.name, grad.shape))
        self.mode.receive_rows(use, grad)
