"""The isolation probe: now and then, some rows of a batch are run again in other company, and must not notice.

Clipping row by row bounds what a sample can do only where the model keeps rows apart, in their order. A layer that
sorts the batch, takes a mean over it or has time on axis 0 adds up gradients of several samples in one row, and nothing
that capture sees would tell. So a part of the rows is kept, all other rows are given other data, and the model runs
forward and backward again with the same random numbers, from the gradients that its outputs had, those of the other
rows set to zero. Then each kept row must have its outputs and its gradient norm, and no other row may have a gradient.

Axes: B rows, K groups of parameters, P parameters.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Set
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from dpengine.capture import Capture, LayerCall, Replay, Use
from dpengine.errors import UnsupportedLayerError, notice

from .bookkeep import Bookkeep
from .flat_buffer import FlatBuffer
from .strategy import AbstractGradients

EVERY = 500  # backward passes from one probe to the next
_EXACT, _ROUNDED = 1e-4, 2e-2  # of a squared norm: what the order of a sum may change, and what half precision may
_SPILL = 1e-8  # of the largest squared norm: what a row without a gradient may show


class Probed(AbstractGradients):
    """Any strategy, with the probe in front of its norms.

    Rows that do not stay apart raise UnsupportedLayerError, which names the first parameter that shows it. A model
    whose forward does not repeat itself under the same random state cannot be probed, which is noticed once.

    Args:
        inner: The strategy that does the work.
        capture: What it hears from.
        every: Backward passes from one probe to the next.
    """

    def __init__(self, inner: AbstractGradients, capture: Capture, every: int = EVERY):
        self._inner = inner
        self._capture = capture
        self._every = every
        self._passes = 0
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
    def parameters(self) -> Set[nn.Parameter]:
        return self._inner.parameters

    def sq_norms(self, groups: Mapping[nn.Parameter, int], num_groups: int, scale: float) -> Tensor:
        norms_BK = self._inner.sq_norms(groups, num_groups, scale)
        replay, due = self._capture.replay, self._passes % self._every == 0
        if due and replay is not None and replay.reached and len(norms_BK) > 1:
            Company(self._capture, replay, norms_BK.sum(dim=1), scale, self._passes).ask()
            self._passes += 1
        elif not due:
            self._passes += 1
        self._arm()
        return norms_BK

    def _arm(self) -> None:
        """Has the next forward pass noted if a probe is due, where no strategy has it noted anyway."""
        if self._own is not None:
            self._capture.replay = self._own if self._passes % self._every == 0 else None

    def drop(self, rows_B: Tensor) -> None:
        self._inner.drop(rows_B)

    def add_sums(self, groups: Mapping[nn.Parameter, int], weights_BK: Tensor, into: FlatBuffer) -> None:
        self._inner.add_sums(groups, weights_BK, into)

    def clear(self) -> None:
        self._inner.clear()


@dataclass(frozen=True, eq=False)
class _Run:
    """What a run left: outputs, and squared norms ``(B, P)`` by parameter."""

    outputs: list[Tensor]
    norms_BP: Tensor
    parameters: list[nn.Parameter]

    @property
    def norms_B(self) -> Tensor:
        return self.norms_BP.sum(dim=1)


class Company:
    """One probe of one batch.

    Args:
        capture: What watches the model.
        replay: The forward passes that the backward pass reached.
        norms_B: Squared norms of the whole gradients, as the strategy found them.
        scale: By what the gradients were multiplied for these norms.
        seed: Which rows are kept follows from it; it is public.
    """

    def __init__(self, capture: Capture, replay: Replay, norms_B: Tensor, scale: float, seed: int):
        self._capture = capture
        self._replay = replay
        self._norms_B = norms_B
        self._scale = scale
        self._rows = len(norms_B)
        self._keep_B = self._kept(seed)
        self._outputs = [output for one in replay.reached for output in one.outputs]
        dtypes = {output.dtype for output in self._outputs if output.is_floating_point()}
        half = torch.is_autocast_enabled("cpu") or bool(dtypes & {torch.float16, torch.bfloat16})
        half = half or any(on for one in replay.reached for _, on, _ in one.autocast)
        self._tolerance = _ROUNDED if half else _EXACT

    def _kept(self, seed: int) -> Tensor:
        """About half of the rows that have a finite norm; at least one, and never all."""
        coins_B = torch.rand(self._rows, generator=torch.Generator().manual_seed(seed)).to(self._norms_B.device)
        finite_B = self._norms_B.isfinite()
        coins_B = torch.where(finite_B, coins_B, 2.0)
        return (coins_B <= coins_B.median()) & finite_B if self._rows > 2 else (coins_B == coins_B.min()) & finite_B

    def ask(self) -> None:
        """Raises UnsupportedLayerError where a kept row noticed that the others had changed."""
        if not self._keep_B.any():
            return
        try:
            changed = self._run(self._others_changed)
        except Exception:  # noqa: BLE001 - data that do not belong together may break any model
            changed = None
        if changed is not None and self._undisturbed(changed):
            return
        # Perhaps the model draws random numbers of its own, or has all rows in another order: the same data will show.
        same = self._run(lambda tensor: tensor)
        if not self._outputs_agree(same, torch.ones_like(self._keep_B)):
            notice(
                "DPE012",
                "The forward pass gave another output when it was run again, so it could not be probed whether the "
                "model keeps the rows of a batch apart. Draw random numbers by torch alone, and keep nothing from one "
                "batch to the next.",
                key="probe",
            )
            return
        if changed is None and self._undisturbed(same):
            return
        if changed is not None and self._in_another_order(same, changed):
            return
        self._refuse(same, changed)

    # The runs

    def _run(self, arrange: Callable[[Tensor], Tensor]) -> _Run:
        listener = _Listener(self._capture)
        receiver, swap = self._capture.receiver, self._capture.swap
        self._capture.receiver, self._capture.swap, self._replay.running = listener, None, True
        outputs: list[Tensor] = []
        try:
            with _state_kept(self._capture.model):
                for one in self._replay.reached:
                    outputs += self._once(one, arrange)
        finally:
            self._capture.receiver, self._capture.swap, self._replay.running = receiver, swap, False
        columns = {parameter: i for i, parameter in enumerate(listener.strategy.parameters)}
        norms_BP = listener.strategy.sq_norms(columns, len(columns), self._scale)
        return _Run(outputs, norms_BP, list(columns))

    def _once(self, one: Any, arrange: Callable[[Tensor], Tensor]) -> list[Tensor]:
        args, kwargs = one.args, one.kwargs
        if self._can_be_changed((args, kwargs)):
            args, kwargs = pytree.tree_map(lambda v: arrange(v) if isinstance(v, Tensor) else v, (args, kwargs))
        outputs = one.forward(self._capture.model, args, kwargs)
        ends = [(o, self._masked(g)) for o, g in zip(outputs, one.grads, strict=True) if g is not None]
        ends = [(o, g) for o, g in ends if o.requires_grad]
        torch.autograd.backward([o for o, _ in ends], [g for _, g in ends])
        return [o.detach() for o in outputs]

    def _front(self, tensor: Tensor) -> Tensor | None:
        """The tensor with its rows in front, None if it has none."""
        front = self._capture.batch_to_front(tensor)
        return front if front.dim() and front.shape[0] == self._rows else None

    def _can_be_changed(self, inputs: Any) -> bool:
        """Whether it is known which inputs carry rows: indices of another length may be flat bags."""
        tensors = [leaf for leaf in pytree.tree_leaves(inputs) if isinstance(leaf, Tensor) and leaf.dim()]
        shared = [t for t in tensors if self._front(t) is None and self._capture.batch_to_front(t).shape[0] != 1]
        return not any(not t.is_floating_point() and t.dtype is not torch.bool for t in shared)

    def _others_changed(self, tensor: Tensor) -> Tensor:
        """Every row that is not kept gets the data of the row before it."""
        front = self._front(tensor)
        if front is None:
            return tensor
        keep = self._keep_B.to(front.device).view(-1, *[1] * (front.dim() - 1))
        return self._capture.batch_to_front(torch.where(keep, front, front.roll(1, dims=0)))

    def _masked(self, grad: Tensor) -> Tensor:
        front = self._front(grad)
        if front is None:
            return grad
        keep = self._keep_B.to(front.device).view(-1, *[1] * (front.dim() - 1))
        return self._capture.batch_to_front(front.masked_fill(~keep, 0))

    # What they show

    @property
    def _all_masked(self) -> bool:
        """Whether the rows that are not kept surely have no gradient."""
        grads = [grad for one in self._replay.reached for grad in one.grads if grad is not None]
        return all(self._front(grad) is not None for grad in grads)

    def _undisturbed(self, run: _Run) -> bool:
        kept, others = self._norms_B[self._keep_B], run.norms_B[~self._keep_B]
        same = self._close(run.norms_B[self._keep_B], kept)
        spilt = self._all_masked and bool((others > _SPILL * kept.max()).any())
        return same and not spilt and self._outputs_agree(run, self._keep_B)

    def _in_another_order(self, same: _Run, changed: _Run) -> bool:
        """Whether every sample has one row for all layers, if perhaps not its own: then it is clipped as one."""
        if not self._all_masked or not self._outputs_agree(changed, self._keep_B):
            return False
        least = _SPILL * self._norms_B[self._norms_B.isfinite()].max()
        touched_B, now_B = same.norms_B > least, changed.norms_B > least
        if int(touched_B.sum()) > int(self._keep_B.sum()) or int(now_B.sum()) != int(touched_B.sum()):
            return False
        whole = self._close(same.norms_B[touched_B], self._norms_B[touched_B])
        return whole and self._close(changed.norms_B[now_B].sort().values, same.norms_B[touched_B].sort().values)

    def _close(self, now: Tensor, then: Tensor) -> bool:
        floor = _SPILL * then[then.isfinite()].max() if then.numel() else 0.0
        return bool(((now - then).abs() <= self._tolerance * then + floor).all())

    def _outputs_agree(self, run: _Run, rows_B: Tensor) -> bool:
        for then, now in zip(self._outputs, run.outputs, strict=True):
            fronts = self._front(then), self._front(now)
            if fronts[0] is None or fronts[1] is None:
                continue
            mask = rows_B.to(fronts[0].device)
            if not torch.allclose(fronts[0][mask], fronts[1][mask], rtol=1e-3, atol=1e-6, equal_nan=True):
                return False
        return True

    def _refuse(self, same: _Run, changed: _Run | None) -> None:
        names = {p: name for name, p in self._capture.model.named_parameters()}
        other = changed or same
        share_P = (other.norms_BP - same.norms_BP)[self._keep_B].abs().amax(dim=0)
        if self._all_masked:
            share_P = torch.maximum(share_P, other.norms_BP[~self._keep_B].amax(dim=0))
        first = names.get(other.parameters[int(share_P.argmax())], "?") if share_P.numel() else "?"
        raise UnsupportedLayerError(
            "The model does not keep the rows of a batch apart: when some rows got other data, the output or the "
            f"gradient of the rest changed (most for '{first}'). A row's clipped gradient would hold several samples.",
            fix="Look for what sorts, averages or normalises over axis 0, or has time there; sort before the model, or "
            "put the rows back in order before the next layer with parameters.",
        )


class _Listener:
    """Receives what the probe's own runs report."""

    def __init__(self, capture: Capture):
        self.strategy = Bookkeep(keep_budget=0)
        self._capture = capture

    def forward_started(self, rows: int | None) -> None: ...

    def receive(self, call: LayerCall, uses: Mapping[str, Use], rule: Any) -> None:
        with self._capture.paused():
            self.strategy.receive(call, uses, rule)

    def receive_rows(self, use: Use, grad: Tensor) -> None:
        self.strategy.receive_rows(use, grad)

    def backward_ended(self) -> None: ...


@contextlib.contextmanager
def _state_kept(model: nn.Module) -> Iterator[None]:
    """Puts back buffers and attributes that forward writes."""
    skipped = {"_parameters", "_modules", "_buffers"}
    before = [
        (
            module,
            {name: value for name, value in vars(module).items() if name not in skipped},
            {name: (buffer, None if buffer is None else buffer.clone()) for name, buffer in module._buffers.items()},
        )
        for module in model.modules()
    ]
    try:
        yield
    finally:
        for module, attributes, buffers in before:
            for name in vars(module).keys() - attributes.keys() - skipped:
                del vars(module)[name]
            vars(module).update(attributes)
            module._buffers.clear()
            for name, (buffer, value) in buffers.items():
                module._buffers[name] = buffer
                if buffer is not None and buffer._version and not torch.equal(buffer, value):
                    buffer.copy_(value)
