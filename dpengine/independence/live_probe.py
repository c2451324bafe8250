"""Independence probe on the live pass: reruns some samples of a batch beside other data and compares the results.

Clipping bounds the contribution of a sample only if the model keeps samples apart and in order. A layer that sorts the
batch, averages over it or has time on axis 0 puts gradients of several samples into one row, which capture cannot
detect. The probe therefore reruns the model, forward and backward, with the same random numbers and output gradients:
first unchanged; then with half of the samples kept and the output gradients of the others set to zero; then with other
data for those others as well. At most the kept samples may then have a gradient, their norms must be those of the whole
batch, and their outputs, norms and sum of gradients must not depend on the others. The other half is kept next, and
then some more halves, because two exchanged samples are detected only if exactly one of them is kept.

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
from dpengine.capture.record import LayerCall, Use
from dpengine.capture.replay import Pass, Replay
from dpengine.errors import UnsupportedLayerError, notice
from dpengine.grad_modes.bookkeep import BookKeeping
from dpengine.grad_modes.choose_method import MethodTable
from dpengine.grad_modes.flat_buffer import Sums

_WIDTH = 4096  # numbers of a sketch of one kind; what is not larger is kept as it is
_KINDS = 4


class Sketches(Sums):
    """Stands in for a ``FlatBuffer``: of each sum it keeps its products with random signs, which add up like it.

    The norm of a sketch is that of the sum on average (Alon, Matias and Szegedy 1996), give or take a half.
    """

    def __init__(self) -> None:
        self.of: dict[nn.Parameter, Tensor] = {}

    def add(self, parameter: nn.Parameter, total: Tensor, scale: float = 1.0) -> None:
        """Adds ``scale * total``."""
        sketch = _sketched(total.reshape(-1)) * scale
        self.of[parameter] = self.of[parameter] + sketch if parameter in self.of else sketch

    def fill(self, parameter: nn.Parameter, write: Callable[[Tensor, float], None]) -> None:
        """Adds what ``write`` writes. See ``FlatBuffer.fill``."""
        dtype = torch.promote_types(parameter.dtype, torch.float32)
        total = torch.empty(parameter.shape, dtype=dtype, device=parameter.device)
        write(total, 0.0)
        self.add(parameter, total)

    def complete(self, parameter: nn.Parameter) -> None:
        """Nothing waits for that here."""


def norm_of_sketch(sketch: Tensor) -> Tensor:
    """About the norm of what was sketched."""
    return sketch.norm() / (len(sketch) ** 0.5 if sketch.dim() == 2 else 1)


def _sketched(flat: Tensor) -> Tensor:
    if flat.numel() <= _WIDTH:
        return flat.clone()
    rows = flat.numel() // _WIDTH
    generator = torch.Generator().manual_seed(rows)  # the same signs for sums that are to be compared
    signs = torch.randint(0, 2, (_KINDS, rows + 1), generator=generator).to(flat) * 2 - 1
    sketch = signs[:, :rows] @ flat[: rows * _WIDTH].view(rows, _WIDTH)
    rest = flat[rows * _WIDTH :]
    sketch[:, : len(rest)] += signs[:, rows:] * rest
    return sketch


_HALVES = 4  # further ones of a thorough probe, on which only gradients are looked at
_EXACT, _HALF = 1e-4, 2e-2  # relative: what two runs of the same rows may differ by
_ALL = 0.05  # relative: what squared norms by two methods may differ by
_NOTHING = 1e-8  # of the largest squared norm: a row with less has no gradient


@dataclass(frozen=True, eq=False)
class _Run:
    """What a run left.

    Attributes:
        outputs: What the model gave.
        norms_BP: Squared norms by row and parameter.
        parameters: These parameters.
        sums: Sketches of the gradients of each parameter, added over rows.
        shapes: The shapes that layers gave.
        random: The states of random generators after the forward passes.
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


def _halves(usable_B: Tensor, seed: int, further: int) -> list[Tensor]:
    """Sets of usable rows: about half of them, and the others; then so many other halves."""
    usable = usable_B.nonzero().flatten()
    generator = torch.Generator().manual_seed(seed)
    orders = [torch.randperm(len(usable), generator=generator).to(usable.device) for _ in range(1 + further)]
    parts = [*usable[orders[0]].tensor_split(2), *(usable[order].tensor_split(2)[0] for order in orders[1:])]
    nothing_B = torch.zeros_like(usable_B)
    return [nothing_B.index_fill(0, part, True) for part in parts if 0 < len(part) < len(usable_B)]


class Company:
    """One probe of one batch. Samples without a finite norm are not kept.

    ``thorough`` adds halves that detect samples exchanged with few others, at nearly twice the time.
    """

    def __init__(self, capture: Capture, replay: Replay, sq_norms_B: Tensor, seed: int, *, thorough: bool):
        self._capture = capture
        self._replay = replay
        self._sq_norms_B = sq_norms_B
        self._usable_B = sq_norms_B.isfinite()
        self._halves = _halves(self._usable_B, seed, _HALVES if thorough else 0)
        self._keep_B = torch.ones_like(self._usable_B)
        self._first_inputs = [t for one in replay.reached for t in _tensors_with_axes((one.args, one.kwargs))[:1]]
        self._outputs = [output for one in replay.reached for output in one.outputs]
        self._grads = [grad for one in replay.reached for grad in one.grads]
        self._all_masked = all(self._front(grad) is not None for grad in self._grads if grad is not None)
        half = any(output.dtype in {torch.float16, torch.bfloat16} for output in self._outputs)
        half = half or any(on for one in replay.reached for _, on, _ in one.autocast)
        self._tolerance = _HALF if half else _EXACT

    def ask(self) -> None:
        """Raises UnsupportedLayerError where rows do not stay apart."""
        whole = self._try(_as_it_is) if self._replay.reached else None
        if whole is None or not self._outputs_agree(self._outputs, whole.outputs, self._keep_B):
            if self._replay.reached:
                _notice_unknown(
                    "The forward pass gave another output when it was run again", "Draw random numbers by torch alone, "
                    "and keep nothing from one batch to the next."
                )  # fmt: skip
            else:
                _notice_unknown("The loss is not made of what the model returns", "Call the model as a whole.")
            return
        if not self._is_all(whole):
            _notice_unknown(
                "Gradients came by other ways than what the model returns", "Return all that the loss is made of."
            )
        for round_, keep_B in enumerate(self._halves):
            self._keep_B = keep_B
            self._ask_half(whole, with_others=round_ < 2)

    def _ask_half(self, whole: _Run, *, with_others: bool) -> None:
        same = self._try(_as_it_is)
        if same is None:  # for want of memory, say
            _notice_unknown("A batch could not be run again", "See that there is memory for it.")
            return
        changed = self._try(self._others_changed) if with_others else same
        if changed is None or not self._comparable(same, changed):
            changed = same
        if self._apart(whole, same) and self._unchanged(whole, same, changed):
            return
        alone = self._try(self._others_changed_in_the_first) if with_others else None
        if (
            alone is not None
            and self._comparable(same, alone)
            and self._apart(whole, same)
            and self._unchanged(whole, same, alone)
        ):
            _notice_unknown(
                "An input is as long as the batch, and it could not be told whether it holds rows",
                "Register what all rows share as a buffer of the model.",
            )
            return
        self._refuse(same, changed)

    def _comparable(self, one: _Run, other: _Run) -> bool:
        """Whether random numbers fell on the same places.

        Where a shape follows from the data of the batch, as in padding to its longest row, those of dropout do not.
        """
        none_drawn = _equal(one.random, [state for p in self._replay.reached for _, state in p.random])
        return _equal(one.random, other.random) and (none_drawn or one.shapes == other.shapes)

    def _is_all(self, whole: _Run) -> bool:
        """Whether the run again brought the gradients that the grad mode received."""
        expected = self._sq_norms_B[self._usable_B].sum()
        return bool((whole.norms_B[self._usable_B].sum() - expected).abs() <= _ALL * expected)

    # The runs

    def _try(self, arrange: Callable[[Tensor], Tensor]) -> _Run | None:
        try:
            return self._run(arrange)
        except Exception:
            return None

    def _run(self, arrange: Callable[[Tensor], Tensor]) -> _Run:
        recorder = _Recorder(self._capture)
        outputs: list[Tensor] = []
        with self._capture.redirected(recorder, self._capture.rows):
            for one in self._replay.reached:
                outputs += self._once(one, arrange)
        columns = {parameter: i for i, parameter in enumerate(recorder.mode.parameters)}
        norms_BP = recorder.mode.sq_norms(columns, len(columns), 1.0).to(self._keep_B.device)
        sums = Sketches()
        finite_B = norms_BP.sum(dim=1).isfinite()
        recorder.mode.drop(~finite_B)  # their data may have been put into other rows
        counted_B = finite_B if self._all_masked else finite_B & self._keep_B
        recorder.mode.add_sums(columns, counted_B.unsqueeze(1).expand_as(norms_BP).to(norms_BP.dtype), 1.0, sums)
        random = [state for one in self._replay.reached for _, state in one.random_after]
        return _Run(outputs, norms_BP, list(columns), sums.of, recorder.shapes, random)

    def _once(self, one: Pass, arrange: Callable[[Tensor], Tensor]) -> list[Tensor]:
        args, kwargs = one.args, one.kwargs
        if self._can_be_changed((args, kwargs)):
            args, kwargs = pytree.tree_map(lambda v: arrange(v) if isinstance(v, Tensor) else v, (args, kwargs))
        grads = [None if grad is None else self._masked(grad) for grad in one.grads]
        return one.again(self._capture.model, lambda outputs: grads, args, kwargs)

    def _front(self, tensor: Tensor) -> Tensor | None:
        """The tensor with its rows in front, None if it has none."""
        front = self._capture.batch_to_front(tensor)
        return front if front.dim() and front.shape[0] == len(self._keep_B) else None

    def _chosen(self, front: Tensor) -> Tensor:
        return self._keep_B.to(front.device).view(-1, *[1] * (front.dim() - 1))

    def _can_be_changed(self, inputs: Any) -> bool:
        """Whether it is known which inputs carry rows: indices may be flat bags, as long as the batch by chance."""
        tensors = _tensors_with_axes(inputs)
        indices = [t for t in tensors if not t.is_floating_point() and t.dtype is not torch.bool]
        shared = [t for t in indices if self._front(t) is None and self._capture.batch_to_front(t).shape[0] != 1]
        return not shared and not any(_may_be_offsets(t) for t in indices)

    def _others_changed(self, tensor: Tensor) -> Tensor:
        """Every row that is not kept gets the data of one that is: were its own left elsewhere, so would a maximum."""
        front = self._front(tensor)
        if front is None:
            return tensor
        first = front[int(self._keep_B.nonzero()[0])]
        return self._capture.batch_to_front(torch.where(self._chosen(front), front, first))

    def _others_changed_in_the_first(self, tensor: Tensor) -> Tensor:
        """The same for the first input alone, which is the batch; another may be as long as it by chance."""
        return self._others_changed(tensor) if any(t is tensor for t in self._first_inputs) else tensor

    def _masked(self, grad: Tensor) -> Tensor:
        front = self._front(grad)
        if front is None:
            return grad
        return self._capture.batch_to_front(front.masked_fill(~self._chosen(front), 0))

    # What they show

    def _with_gradient(self, whole: _Run, run: _Run) -> Tensor:
        return run.norms_B > _NOTHING * whole.norms_B[self._keep_B].max()

    def _apart(self, whole: _Run, same: _Run) -> bool:
        """Whether the kept samples have one row each, if perhaps not their own, and their whole gradient there."""
        if not self._all_masked:
            return True
        rows_B = self._with_gradient(whole, same)
        few = int(rows_B.sum()) <= int(self._keep_B.sum())
        return few and _close(same.norms_B[rows_B], whole.norms_B[rows_B], self._tolerance)

    def _unchanged(self, whole: _Run, same: _Run, changed: _Run) -> bool:
        """Whether the kept samples noticed nothing of the change. With a loss inside the model others show, too."""
        norms = [
            run.norms_B[self._with_gradient(whole, run) if self._all_masked else self._keep_B]
            for run in (same, changed)
        ]
        then, now = (found.sort().values if self._all_masked else found for found in norms)
        agree = then.shape == now.shape and _close(now, then, self._tolerance)
        size = float(same.norms_B.sqrt().nan_to_num(0, 0, 0).sum())
        for parameter in same.sums.keys() | changed.sums.keys():
            zero = torch.zeros(())
            moved = norm_of_sketch(same.sums.get(parameter, zero) - changed.sums.get(parameter, zero))
            agree = agree and not bool(moved > 10 * self._tolerance * size)  # which overflow is not
        return agree and self._outputs_agree(same.outputs, changed.outputs, self._keep_B)

    def _outputs_agree(self, then: list[Tensor], now: list[Tensor], rows_B: Tensor) -> bool:
        for one, other, grad in zip(then, now, self._grads, strict=True):
            front, front_now = self._front(one), self._front(other)
            if grad is None or front is None or front_now is None or front.shape != front_now.shape:
                continue
            a, b = front[rows_B.to(front.device)], front_now[rows_B.to(front.device)]
            finite = a.isfinite()
            scale = float(torch.where(finite, a.abs(), 0).max()) if a.numel() else 0.0
            if not ((a - b).abs() <= self._tolerance * (a.abs() + scale)).logical_or(~finite).all():
                return False
        return True

    def _refuse(self, same: _Run, changed: _Run) -> None:
        names = {parameter: name for name, parameter in self._capture.model.named_parameters()}
        comparable = same.parameters == changed.parameters
        share_P = ((changed if comparable else same).norms_BP - same.norms_BP)[self._keep_B].abs().amax(dim=0)
        if self._all_masked:
            share_P = torch.maximum(share_P, same.norms_BP[~self._keep_B].amax(dim=0))
        most = names.get(same.parameters[int(share_P.argmax())]) if share_P.numel() else None
        raise UnsupportedLayerError(
            "The model does not keep the rows of a batch apart: with other data in some rows, outputs or gradients of "
            f"the rest changed{f' (most for {most!r})' if most else ''}. A clipped row would hold several samples.",
            fix="Look for what sorts, averages or normalises over axis 0, or has time there. Sort before the model, or "
            "put the rows back in order before the next layer. What all rows share, as positions, needs an axis of "
            "length one in front, lest it be taken for rows: torch.arange(T)[None].",
        )


def _tensors_with_axes(tree: Any) -> list[Tensor]:
    return [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, Tensor) and leaf.dim()]


def _equal(some: list[Tensor], others: list[Tensor]) -> bool:
    return len(some) == len(others) and all(map(torch.equal, some, others))


def _notice_unknown(what: str, fix: str) -> None:
    notice("DPE012", f"{what}, so it is not known whether the model keeps the rows of a batch apart. {fix}", key=what)


def _as_it_is(tensor: Tensor) -> Tensor:
    return tensor


def _may_be_offsets(indices: Tensor) -> bool:
    """Whether these could be where bags begin among entries that are listed one after the other."""
    return indices.dim() == 1 and int(indices[0]) == 0 and bool((indices.diff() >= 0).all())


def _close(now: Tensor, then: Tensor, tolerance: float) -> bool:
    floor = _NOTHING * then.max() if then.numel() else 0.0
    return bool(((now - then).abs() <= tolerance * then + floor).all())


class _Recorder:
    """Takes the layer calls of the probe's own passes, and notes the shapes of their output gradients."""

    def __init__(self, capture: Capture):
        self.mode = BookKeeping(MethodTable(keep_budget=0, timed=False), capture.paused)
        self.shapes: list[tuple[str, torch.Size]] = []

    def receive(self, call: LayerCall, uses: Mapping[str, Use], rule: Any) -> None:
        leaves = pytree.tree_leaves(call.grad_output)  # None for an output that the loss does not use
        self.shapes += [(call.name, tensor.shape) for tensor in leaves if isinstance(tensor, Tensor)]
        self.mode.receive(call, uses, rule)

    def receive_rows(self, use: Use, grad: Tensor) -> None:
        self.shapes.append((use.name, grad.shape))
        self.mode.receive_rows(use, grad)
