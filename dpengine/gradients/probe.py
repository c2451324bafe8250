"""The isolation probe: now and then, some rows of a batch are run again in other company, and must not notice.

Clipping row by row bounds what a sample can do only where the model keeps rows apart, and in one order. A layer that
sorts the batch, takes a mean over it or has time on axis 0 adds up gradients of several samples in one row, and nothing
that capture sees would tell. So the model runs forward and backward again with the same random numbers, from the
gradients that its outputs had: once as it was; then half of the rows are kept, and the output gradients of the others
are zero; then the others get other data, too. No more rows than were kept may then have a gradient, their norms must be
those of the whole batch, and the kept rows must have the same outputs and norms whatever is beside them. At last the
other half is kept.

Axes: B rows, P parameters.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from dpengine.capture import Capture, LayerCall, Pass, Replay, Use
from dpengine.errors import UnsupportedLayerError, notice

from .bookkeep import Bookkeep
from .flat_buffer import FlatBuffer
from .strategy import AbstractGradients

EVERY = 500  # backward passes from one probe to the next
_EXACT, _HALF = 1e-4, 2e-2  # relative: what two runs of the same rows may differ by
_NOTHING = 1e-8  # of the largest squared norm: a row with less has no gradient


class Probed(AbstractGradients):
    """Any strategy, with a probe before its norms are used: at the first pass, and at every ``every``-th.

    Rows that do not stay apart raise UnsupportedLayerError, which names the parameter that shows it most. A model whose
    forward does not repeat itself under the same random state cannot be probed, which is noticed once.

    Args:
        inner: The strategy that does the work.
        capture: What it hears from.
        every: Backward passes from one probe to the next.
    """

    def __init__(self, inner: AbstractGradients, capture: Capture, every: int = EVERY):
        self._inner = inner
        self._capture = capture
        self._every = every
        self._left = 0  # passes until the next probe
        self._probes = 0
        self._own = Replay() if capture.replay is None else None
        self._arm()

    def receive(self, call: LayerCall, uses: Mapping[str, Use], rule: Any) -> None:
        self._inner.receive(call, uses, rule)

    def receive_rows(self, use: Use, grad: Tensor) -> None:
        self._inner.receive_rows(use, grad)

    @property
    def rows(self) -> Mapping[str, int]:
        return self._inner.rows

    @property
    def parameters(self) -> Mapping[nn.Parameter, str]:
        return self._inner.parameters

    def sq_norms(self, groups: Mapping[nn.Parameter, int], num_groups: int, scale: float) -> Tensor:
        norms_BK = self._inner.sq_norms(groups, num_groups, scale)
        replay = self._capture.replay
        self._left -= 1
        if self._left < 0 and replay is not None and replay.reached and len(norms_BK) > 1:
            self._left = self._every - 1
            self._probes += 1
            Company(self._capture, replay, norms_BK.sum(dim=1), self._probes).ask()
        self._arm()
        return norms_BK

    def _arm(self) -> None:
        """Has the next forward pass noted if a probe is due, where no strategy has it noted anyway."""
        if self._own is not None:
            self._own.clear()
            self._capture.replay = self._own if self._left <= 0 else None

    def backward_ended(self) -> None:
        self._inner.backward_ended()

    def drop(self, rows_B: Tensor) -> None:
        self._inner.drop(rows_B)

    def add_sums(self, groups: Mapping[nn.Parameter, int], weights_BK: Tensor, into: FlatBuffer) -> None:
        self._inner.add_sums(groups, weights_BK, into)

    def clear(self) -> None:
        self._inner.clear()


@dataclass(frozen=True, eq=False)
class _Run:
    """What a run left: the outputs, squared norms by row and parameter, and the shapes that layers gave."""

    outputs: list[Tensor]
    norms_BP: Tensor
    parameters: list[nn.Parameter]
    shapes: list[tuple[str, torch.Size]]

    @property
    def norms_B(self) -> Tensor:
        return self.norms_BP.sum(dim=1)


def _halves(usable_B: Tensor, seed: int) -> list[Tensor]:
    """Two sets of usable rows: about half of them, and the others."""
    usable = usable_B.nonzero().flatten()
    order = torch.randperm(len(usable), generator=torch.Generator().manual_seed(seed)).to(usable.device)
    parts = usable[order].tensor_split(2)
    nothing_B = torch.zeros_like(usable_B)
    return [nothing_B.index_fill(0, part, True) for part in parts if 0 < len(part) < len(usable_B)]


class Company:
    """One probe of one batch.

    Args:
        capture: What watches the model.
        replay: The forward passes that the backward pass reached.
        norms_B: Norms as the strategy found them; a row without a finite one is not kept.
        seed: Of the choice of rows.
    """

    def __init__(self, capture: Capture, replay: Replay, norms_B: Tensor, seed: int):
        self._capture = capture
        self._replay = replay
        self._usable_B = norms_B.isfinite()
        self._seed = seed
        self._keep_B = torch.ones_like(self._usable_B)
        self._outputs = [output for one in replay.reached for output in one.outputs]
        grads = [grad for one in replay.reached for grad in one.grads if grad is not None]
        self._all_masked = all(self._front(grad) is not None for grad in grads)
        half = any(output.dtype in {torch.float16, torch.bfloat16} for output in self._outputs)
        half = half or any(on for one in replay.reached for _, on, _ in one.autocast)
        self._tolerance = _HALF if half else _EXACT

    def ask(self) -> None:
        """Raises UnsupportedLayerError where rows do not stay apart."""
        whole = self._try(_as_it_is)
        if whole is None or not self._outputs_agree(self._outputs, whole.outputs, self._keep_B):
            notice(
                "DPE012",
                "The forward pass gave another output when it was run again, so it is not known whether the model "
                "keeps the rows of a batch apart. Draw random numbers by torch alone, and keep nothing from one batch "
                "to the next.",
                key="probe",
            )
            return
        for keep_B in _halves(self._usable_B, self._seed):
            self._keep_B = keep_B
            same = self._try(_as_it_is) or whole
            changed = self._try(self._others_changed)
            if changed is None or changed.shapes != same.shapes:
                # Data that do not belong together may break any model; and where some shape follows from the batch,
                # as in padding to its longest row, random numbers of dropout fall on other places.
                changed = same
            if not (self._apart(whole, same) and self._unchanged(whole, same, changed)):
                self._refuse(same, changed)

    # The runs

    def _try(self, arrange: Callable[[Tensor], Tensor]) -> _Run | None:
        try:
            return self._run(arrange)
        except Exception:
            return None

    def _run(self, arrange: Callable[[Tensor], Tensor]) -> _Run:
        listener = _Listener(self._capture)
        receiver, swap = self._capture.receiver, self._capture.swap
        self._capture.receiver, self._capture.swap, self._replay.running = listener, None, True
        outputs: list[Tensor] = []
        try:
            for one in self._replay.reached:
                outputs += self._once(one, arrange)
        finally:
            self._capture.receiver, self._capture.swap, self._replay.running = receiver, swap, False
        columns = {parameter: i for i, parameter in enumerate(listener.strategy.parameters)}
        norms_BP = listener.strategy.sq_norms(columns, len(columns), 1.0)
        return _Run(outputs, norms_BP, list(columns), listener.shapes)

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
        tensors = [leaf for leaf in pytree.tree_leaves(inputs) if isinstance(leaf, Tensor) and leaf.dim()]
        indices = [t for t in tensors if not t.is_floating_point() and t.dtype is not torch.bool]
        shared = [t for t in indices if self._front(t) is None and self._capture.batch_to_front(t).shape[0] != 1]
        return not shared and not any(_may_be_offsets(t) for t in indices)

    def _others_changed(self, tensor: Tensor) -> Tensor:
        """Every row that is not kept gets the data of the row before it."""
        front = self._front(tensor)
        if front is None:
            return tensor
        return self._capture.batch_to_front(torch.where(self._chosen(front), front, front.roll(1, dims=0)))

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
        return agree and self._outputs_agree(same.outputs, changed.outputs, self._keep_B)

    def _outputs_agree(self, then: list[Tensor], now: list[Tensor], rows_B: Tensor) -> bool:
        for one, other in zip(then, now, strict=True):
            front, front_now = self._front(one), self._front(other)
            if front is None or front_now is None or not one.is_floating_point():
                continue
            a, b = front[rows_B.to(front.device)], front_now[rows_B.to(front.device)]
            finite = a.isfinite()
            scale = float(torch.where(finite, a.abs(), 0).max()) if a.numel() else 0.0
            if not ((a - b).abs() <= self._tolerance * (a.abs() + scale)).logical_or(~finite).all():
                return False
        return True

    def _refuse(self, same: _Run, changed: _Run) -> None:
        names = {parameter: name for name, parameter in self._capture.model.named_parameters()}
        share_P = (changed.norms_BP - same.norms_BP)[self._keep_B].abs().amax(dim=0)
        if self._all_masked:
            share_P = torch.maximum(share_P, same.norms_BP[~self._keep_B].amax(dim=0))
        most = names.get(same.parameters[int(share_P.argmax())]) if share_P.numel() else None
        raise UnsupportedLayerError(
            "The model does not keep the rows of a batch apart: with other data in some rows, outputs or gradients of "
            f"the rest changed{f' (most for {most!r})' if most else ''}. A clipped row would hold several samples.",
            fix="Look for what sorts, averages or normalises over axis 0, or has time there. Sort before the model, or "
            "put the rows back in order before the next layer.",
        )


def _as_it_is(tensor: Tensor) -> Tensor:
    return tensor


def _may_be_offsets(indices: Tensor) -> bool:
    """Whether these could be where bags begin among entries that are listed one after the other."""
    return indices.dim() == 1 and int(indices[0]) == 0 and bool((indices.diff() >= 0).all())


def _close(now: Tensor, then: Tensor, tolerance: float) -> bool:
    floor = _NOTHING * then.max() if then.numel() else 0.0
    return bool(((now - then).abs() <= tolerance * then + floor).all())


class _Listener:
    """Receives what the probe's own runs report."""

    def __init__(self, capture: Capture):
        self.strategy = Bookkeep(keep_budget=0)
        self.shapes: list[tuple[str, torch.Size]] = []
        self._capture = capture

    def forward_started(self, rows: int | None) -> None: ...

    def receive(self, call: LayerCall, uses: Mapping[str, Use], rule: Any) -> None:
        self.shapes += [(call.name, tensor.shape) for tensor in pytree.tree_leaves(call.grad_output)]
        with self._capture.paused():
            self.strategy.receive(call, uses, rule)

    def receive_rows(self, use: Use, grad: Tensor) -> None:
        self.shapes.append((use.name, grad.shape))
        self.strategy.receive_rows(use, grad)

    def backward_ended(self) -> None: ...
