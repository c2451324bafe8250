"""Backward passes that are pending until an optimizer clips them, with their gradients in ``p.grad_sample``."""

from __future__ import annotations

import weakref
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from dpengine.capture.record import Use
from dpengine.clipping.flat import Flat
from dpengine.distributed.topology import SINGLE, Topology
from dpengine.engine.batch_state import NOT_RETURNED, Stage
from dpengine.engine.pass_clipper import PassClipper, RecordedPass
from dpengine.engine.per_sample import PerSampleGradients
from dpengine.engine.watch_model import mode_of
from dpengine.errors import BatchStateError, MissingGradientError, RepeatedBackwardError, StaleGradientError
from dpengine.grad_modes.bookkeep import BookKeeping
from dpengine.grad_modes.choose_method import KeepAll
from dpengine.grad_modes.grad_sample import OnDemand, add_grad_sample
from dpengine.grad_modes.modes import on_demand

if TYPE_CHECKING:
    from dpengine.compat.opacus.optimizers.optimizer import DPOptimizer
    from dpengine.engine.step import PrivateStep
    from dpengine.sampling.batches import LogicalBatch


@dataclass(frozen=True, eq=False)
class _PendingPass:
    """Backward pass that has not been clipped.

    Attributes:
        gradients: Its per-sample gradients.
        unread: Gradients that were written to ``p.grad_sample`` and not read, by parameter.
        shown: Lazy tensors in ``p.grad_sample``, by parameter; empty if none were written.
    """

    gradients: PerSampleGradients
    unread: dict[nn.Parameter, OnDemand]
    shown: dict[nn.Parameter, OnDemand]

    def invalidate(self) -> None:
        """Makes unread gradients unreadable, because the layer calls will be cleared."""
        self.unread.clear()


class PendingPasses:
    """Backward passes over a model that are pending until an optimizer clips them.

    Until then, ``p.grad_sample`` of each trainable parameter has the gradients of the per-sample losses,
    ``(B, *param.shape)``, which are materialized when they are read. If the user replaces it, the replacement is
    clipped. After several backward passes it is a list with one tensor for each pass.

    Attributes:
        clipper: Clips the passes.
        captures: Whether the model has hooks. Without hooks the user writes ``p.grad_sample``.
        writes_grad_sample: Whether ``p.grad_sample`` is set.
        allows_accumulation: Whether several backward passes may be pending.
        owner: The optimizer that clips the passes.

    Args:
        mode: A value of ``grad_sample_mode``, or ``"no_op"`` for no hooks.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        mode: str = "auto",
        batch_first: bool = True,
        loss_reduction: str = "mean",
        topology: Topology = SINGLE,
        writes_grad_sample: bool = True,
    ):
        self.captures = mode != "no_op"
        self.writes_grad_sample = writes_grad_sample
        self.allows_accumulation = True
        self.owner: weakref.ref[DPOptimizer] | None = None
        self.clipper = _Clipper(
            model,
            Flat(1.0),
            self._pass_ended,
            grad_sample_mode=on_demand(mode_of(mode if self.captures else "auto")),
            batch_first=batch_first,
            loss_reduction=loss_reduction,
            topology=topology,
        )
        self._pending: list[_PendingPass] = []
        self._norms_BK: Tensor | None = None  # norms of the last clipped pass
        self._used: dict[nn.Parameter, list[Any]] = {}  # clipped gradients in p.grad_sample
        self._left: dict[nn.Parameter, Any] = {}  # clipped gradients that a step used
        self.clear()

    def attach(self) -> None:
        """Attaches hooks to the model."""
        if self.captures:
            self.clipper.attach()

    def detach(self) -> None:
        """Removes the hooks and drops pending passes."""
        self._forget()
        self.clipper.detach()

    @property
    def parameters(self) -> dict[str, nn.Parameter]:
        """All parameters of the model, by dotted name."""
        return dict(self.clipper.topology.parameters(self.clipper.model))

    def clear(self) -> None:
        """Sets ``p.grad_sample`` to None and drops pending passes."""
        for parameter in self.parameters.values():
            parameter.grad_sample = None  # type: ignore[attr-defined]
        self._used, self._left = {}, {}
        self._forget()

    def _forget(self) -> None:
        for pending_pass in self._pending:
            pending_pass.invalidate()
        self._pending = []
        if self.clipper.pending:
            self.clipper.forget()

    # Called by the capture

    def _pass_ended(self, recorded: RecordedPass) -> None:
        if not recorded.mode.rows:
            self.clipper.forget()
            return
        try:
            self._check_accumulation(recorded)
            self.clipper.check_leaks()  # later leaks, until clipping, are from passes in eval mode
            self._check_cleared()
        except BaseException:
            self.clipper.forget()
            raise
        gradients = PerSampleGradients(self.clipper, self.clipper.take())
        owner = None if self.owner is None else self.owner()
        if self._pending and not self.writes_grad_sample and owner is not None:
            self.deliver(owner._step)  # its gradients are not in p.grad_sample, so the user cannot change them
        writes_grad_sample = self.writes_grad_sample and self.clipper.topology.runs_independently
        unread = gradients.on_demand() if writes_grad_sample else {}
        shown = {parameter: _shown(unread, parameter) for parameter in unread}
        for parameter, grad_sample in shown.items():
            add_grad_sample(parameter, grad_sample)
        self._pending.append(_PendingPass(gradients, unread, shown))

    def _check_accumulation(self, recorded: RecordedPass) -> None:
        """Raises if a second backward pass ends before the step and accumulation is not allowed."""
        unused = not self._left and any(_is_shown(p, one) for p, used in self._used.items() for one in used)
        if self.allows_accumulation or not (self._pending or unused):
            return
        name = next(iter(recorded.mode.parameters.values()), "?")
        self._forget()
        raise RepeatedBackwardError(
            f"A second backward pass reached parameter '{name}' before optimizer.step(), and batches of "
            "Poisson sampling must not be accumulated: samples of the first would be counted twice or lost.",
            fix="Call optimizer.zero_grad() and optimizer.step() for each batch; or add the losses, or use "
            "BatchMemoryManager for a larger batch.",
        )

    def _check_cleared(self) -> None:
        for parameter, one in self._left.items():
            if self.writes_grad_sample and _is_shown(parameter, one):
                raise StaleGradientError(
                    "Gradients were not cleared since the last optimizer.step().",
                    fix="Call optimizer.zero_grad() at the top of the loop.",
                )

    # Called by the optimizer

    @property
    def pending(self) -> bool:
        """True if a pass is to be clipped."""
        return bool(self._pending or self._parts())

    @property
    def count(self) -> int:
        """Number of pending backward passes."""
        parts = self._parts()
        return len(next(iter(parts.values()))) if parts else len(self._pending)

    def norms(self) -> Tensor | None:
        """Norms ``(B,)`` of the last backward pass, clipped or not; None before the first. Not private."""
        if self._pending:
            return self._pending[-1].gradients.norms()
        return None if self._norms_BK is None else self._norms_BK.square().sum(dim=1).sqrt()

    def settle(self, step: PrivateStep) -> None:
        """Ends the recording of the last pass. An interrupted pass discards the logical batch of the step."""
        if self.clipper.settle():
            self._forget()
            step.discard()

    def batch_returned(self, step: PrivateStep, batch: LogicalBatch, chunk: int, data: Any) -> None:
        """Clips pending passes, which belong to the previous batch, when the loader returns the next batch."""
        if step.batches.stage is not Stage.CLOSED:
            if self._pending and step.batches.stage in NOT_RETURNED:
                self.clear()  # the pass was for another model, such as a generator
            for pending_pass in self._pending:
                for grad_sample in pending_pass.shown.values():
                    _ = grad_sample.value  # materializes it, because it may be read later
            if self.clipper.capture.unfinished is not None:
                self.settle(step)
            elif self.clipper.pending:
                self.clipper.forget()  # the recorded pass is of samples before this batch
            self.deliver(step)
        step.batch_returned(batch, chunk, data)

    def deliver(self, step: PrivateStep) -> None:
        """Passes all pending passes to the private step, oldest first."""
        while self.pending:
            self._deliver_next(step)

    def _deliver_next(self, step: PrivateStep) -> None:
        parts = self._parts()
        first = self._pending[0] if self._pending else None
        if first is not None:
            self.clipper.capture.leaks.clear()
        if first is not None and self._is_untouched(first, parts):
            self._check_unchanged(first)
            recorded, clipped = first.gradients.recorded, dict(first.shown)
        else:
            recorded = self._pass_of(parts)
            if first is not None:  # the probe reruns the recorded pass, whatever its gradients are now
                recorded = replace(first.gradients.recorded, mode=recorded.mode, mean_loss=False)
            clipped = {parameter: shown[0] for parameter, shown in parts.items()}
        try:
            step.on_pass(recorded)
            self._norms_BK = step.statistics.norms_BK
        finally:
            for parameter, grad_sample in clipped.items():
                self._used.setdefault(parameter, []).append(grad_sample)
            if first is not None:
                first.invalidate()
                del self._pending[:1]

    def _check_unchanged(self, first: _PendingPass) -> None:
        """Raises StaleGradientError and drops pending passes if the batch was overwritten after its pass."""
        try:
            first.gradients.check_unchanged()
        except StaleGradientError:
            self._forget()
            raise

    def mark_released(self) -> None:
        """Records that a step used the clipped gradients, which must be cleared before the next pass."""
        self._left = {parameter: used[-1] for parameter, used in self._used.items() if used}

    def _is_untouched(self, first: _PendingPass, parts: dict[nn.Parameter, list[Any]]) -> bool:
        """Returns True if ``p.grad_sample`` has the gradients of the pass, neither read nor replaced."""
        untouched = all(
            len(shown) == len(self._pending) and parameter in first.shown and shown[0] is first.shown[parameter]
            for parameter, shown in parts.items()
        )
        untouched = untouched and all(first.shown[parameter].formed is None for parameter in parts)
        only = self.clipper.only
        included = {p for p in first.shown if only is None or p in only}
        return untouched and parts.keys() >= included

    def _parts(self) -> dict[nn.Parameter, list[Any]]:
        """Returns the parts of ``p.grad_sample`` that are not clipped yet, for each parameter that has any."""
        unclipped = {}
        for parameter in self.clipper.trainable().values():
            shown = getattr(parameter, "grad_sample", None)
            parts = [] if shown is None else shown if isinstance(shown, list) else [shown]
            used = self._used.get(parameter, [])
            if left := [part for part in parts if not any(part is other for other in used)]:
                unclipped[parameter] = left
        return unclipped

    @torch.no_grad()
    def _pass_of(self, parts: dict[nn.Parameter, list[Any]]) -> RecordedPass:
        """Returns a pass with the first unclipped part of ``p.grad_sample`` of each parameter."""
        names = {parameter: name for name, parameter in self.parameters.items()}
        if len({len(shown) for shown in parts.values()}) > 1:
            few, many = (pick(parts, key=lambda p: len(parts[p])) for pick in (min, max))
            self._forget()
            raise MissingGradientError(
                f"Parameter '{names[few]}' has gradients of {len(parts[few])} backward passes since the last step, "
                f"but '{names[many]}' of {len(parts[many])}.",
                fix="Call optimizer.step() after each backward pass, or freeze parameters that batches may leave out.",
            )
        mode = BookKeeping(KeepAll())
        for parameter, shown in parts.items():
            mode.receive_rows(Use(parameter, names[parameter]), _values(shown[0], parameter, names[parameter]))
        return RecordedPass(mode)


class _Clipper(PassClipper):
    """Clipper that rejects passes whose end callback was missed."""

    def settle(self) -> bool:
        if self.capture.unfinished is None and self.mode.rows:
            name = next(iter(self.mode.rows))
            self.forget()
            raise BatchStateError(
                f"A backward pass reached layer '{name}' that was not called by the model's forward, but by another "
                "method, as in model.encode(x), or directly. It was dropped.",
                fix="Call the model, whose forward may choose a part: def forward(self, x, part='all').",
            )
        return super().settle()


def _shown(unread: dict[nn.Parameter, OnDemand], parameter: nn.Parameter) -> OnDemand:
    """Returns a lazy ``p.grad_sample`` in the dtype of the parameter, as in Opacus, readable until it is clipped."""
    dtype, wide = parameter.dtype, unread[parameter]

    def materialize() -> Tensor:
        if parameter not in unread:
            raise MissingGradientError(
                "This per-sample gradient was clipped and summed without being materialized.",
                fix="Read p.grad_sample between loss.backward() and optimizer.step().",
            )
        value = unread[parameter].value.to(dtype)
        del unread[parameter]
        return value

    return OnDemand(materialize, tuple(wide.shape), dtype=dtype, device=wide.device)


def _is_shown(parameter: nn.Parameter, gradient: Any) -> bool:
    shown = getattr(parameter, "grad_sample", None)
    return shown is gradient or (isinstance(shown, list) and any(part is gradient for part in shown))


def _values(grad: Any, parameter: nn.Parameter, name: str) -> Tensor:
    """Returns the value of one part of ``p.grad_sample``; raises if it has the wrong shape."""
    value = grad.value if isinstance(grad, OnDemand) else grad
    if not isinstance(value, Tensor) or value.shape[1:] != parameter.shape:
        found = tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__
        raise MissingGradientError(
            f"grad_sample of parameter '{name}' is {found}; expected a tensor (B, {str(tuple(parameter.shape))[1:]}.",
            fix="Write one gradient for each sample, batch first.",
        )
    return value.detach().to(parameter.device)
