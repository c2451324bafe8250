"""Clipped sums whose per-sample gradients stay in ``p.grad_sample``, to be read or changed, until they are clipped."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from dpengine.capture.record import LayerCall, Use
from dpengine.clipping.flat import Flat
from dpengine.distributed.topology import SINGLE, Topology
from dpengine.errors import MissingGradientError, RepeatedBackwardError, StaleGradientError, TicketError
from dpengine.grad_modes.bookkeep import Bookkeep
from dpengine.grad_modes.choose_method import KeepAll
from dpengine.grad_modes.materialize import show_grad_sample
from dpengine.grad_modes.on_demand import OnDemand
from dpengine.grad_modes.rows import Units
from dpengine.grad_modes.strategy import common_rows

from .clipped_sums import ClippedSums, ClipStatistics


class ShownSums(ClippedSums):
    """``ClippedSums`` that wait: what a backward pass left is clipped when ``clip`` is called, or another pass begins.

    Until then ``p.grad_sample`` is, for each trainable parameter, the gradient of each row's own loss,
    ``(B, *param.shape)``, formed when somebody looks. What is written there instead is what will be clipped. After
    several backward passes it is a list with one tensor for each.

    Attributes:
        only: The parameters that are clipped and summed; None for all that train.
        allows_accumulation: Whether several backward passes may wait at a time.
        on_pass: Called when a backward pass is over; what it raises drops the pass.
        on_backward_end: Called when a pass that is not shown must make way for another; it clips the one that waits.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        mode: str = "auto",  # with "no_op" nothing is captured: the user writes ``p.grad_sample``
        batch_first: bool = True,
        loss_reduction: str = "mean",
        topology: Topology = SINGLE,
        shows: bool = True,
    ):
        self.only: frozenset[nn.Parameter] | None = None
        self.captures = mode != "no_op"
        super().__init__(
            model,
            policy=Flat(1.0),
            mode=mode if self.captures else "auto",
            batch_first=batch_first,
            loss_reduction=loss_reduction,
            topology=topology,
            forms_on_demand=True,
        )
        self.shows = shows
        self.allows_accumulation = True
        self.on_pass: Callable[[], None] = _nothing
        self._sq_norms_BK: Tensor | None = None
        self._ended = False  # whether the strategy holds a backward pass that is over
        self._listed: tuple[nn.Parameter, ...] = ()  # what trains, as of its end
        self._present: dict[nn.Parameter, OnDemand] = {}  # what is shown of it
        self._used: dict[nn.Parameter, list[Any]] = {}  # what was clipped, as long as it stands in p.grad_sample
        self._left: dict[nn.Parameter, Any] = {}  # and was released
        self.show_none()

    def attach(self) -> None:
        """Starts to watch the model."""
        if self.captures:
            super().attach()

    def trainable(self) -> dict[str, nn.Parameter]:
        found = super().trainable()
        return found if self.only is None else {name: p for name, p in found.items() if p in self.only}

    def show_none(self) -> None:
        """Sets ``p.grad_sample`` to None: what was not clipped yet never will be."""
        for parameter in self.topology.parameters(self.model).values():
            parameter.grad_sample = None  # type: ignore[attr-defined]
        self._used, self._left = {}, {}
        if self._ended or self.strategy.rows:
            self.forget_pass()
        self._present = {}

    # What capture tells

    def forward_started(self, rows: int | None) -> None:
        if self.capture.backward_broke_off:
            self.forget_pass()
        self.refuse_unended()

    def refuse_unended(self) -> None:
        """Refuses, and drops, a backward pass that came by other ways than the model's own forward."""
        if not self.strategy.rows or self._ended:
            return
        name = next(iter(self.strategy.rows))
        self.forget_pass()  # else the next pass would add to it, with other rows in the place of these
        raise TicketError(
            f"A backward pass reached layer '{name}' that did not come through the model's own forward: by another "
            "method of it, as in model.encode(x), or by a layer that was called by itself. It was dropped.",
            fix="Call the model, and have its forward choose: def forward(self, x, part='all').",
        )

    def receive(self, call: LayerCall, uses: Mapping[str, Use], rule: Any) -> None:
        self._make_way()
        super().receive(call, uses, rule)

    def receive_rows(self, use: Use, grad: Tensor) -> None:
        self._make_way()
        super().receive_rows(use, grad)

    def _make_way(self) -> None:
        """A backward pass begins: what one that waits has left is kept as it is shown."""
        if not self._ended and (self.allows_accumulation or not self._stands_unreleased()):
            return
        if not self.allows_accumulation:
            stands = [name for name, p in super().trainable().items() if p in self._used]
            name = next(iter([*self.strategy.parameters.values(), *stands]), "?")
            raise RepeatedBackwardError(
                f"A second backward pass reached parameter '{name}' before optimizer.step(), and batches drawn by "
                "Poisson sampling do not add up: the rows of the first would count twice, or be lost.",
                fix="Call optimizer.zero_grad() and optimizer.step() for each batch; or add the losses, or use "
                "BatchMemoryManager for a larger batch.",
            )
        if not self._present and self.on_backward_end is not None:  # nothing is shown that could be kept
            self.on_backward_end()
        self.keep_shown()
        self._present = {}
        self.forget_pass()

    def _stands_unreleased(self) -> bool:
        """Whether a pass was clipped, for another batch's sake, that no step released and nobody cleared."""
        return not self._left and any(_is_shown(p, one) for p, used in self._used.items() for one in used)

    def keep_shown(self) -> None:
        for one in self._present.values() if self._ended else ():
            _ = one.value
        if self.strategy.rows and not self._ended:
            self.forget_pass()  # of rows before those that come now

    def backward_ended(self) -> None:
        self.strategy.backward_ended()
        if not self.strategy.rows:
            self.forget_pass()
            return
        try:
            self._refuse_leaks()  # what leaks from here to the clip is of passes in eval mode
            self._refuse_used()
            self.on_pass()
        except BaseException:
            self.forget_pass()
            raise
        self._ended, self._sq_norms_BK = True, None
        if self.shows and self.topology.runs_by_itself:
            self._show()

    def note_release(self) -> None:
        """What was clipped has left: what still stands in ``p.grad_sample`` must be cleared before the next pass."""
        self._left = {parameter: used[-1] for parameter, used in self._used.items() if used}

    def _refuse_used(self) -> None:
        for parameter, one in self._left.items():
            if self.shows and _is_shown(parameter, one):
                raise StaleGradientError(
                    "Gradients were not cleared since the last optimizer.step().",
                    fix="Call optimizer.zero_grad() at the top of the loop.",
                )

    def _show(self) -> None:
        self._listed = tuple(super().trainable().values())
        trainable = set(self._listed)
        rows = self.strategy.rows
        scale = next(iter(rows.values())) if self.loss_reduction == "mean" else 1.0
        for parameter in self.strategy.parameters:
            if parameter in trainable:
                shape = (next(iter(rows.values())), *parameter.shape)
                shown = OnDemand(self._former(parameter, scale), shape, parameter)
                self._present[parameter] = shown
                show_grad_sample(parameter, shown)

    def _former(self, parameter: nn.Parameter, scale: float) -> Callable[[], Tensor]:
        strategy = self._probed

        @torch.no_grad()
        def form() -> Tensor:
            common_rows(strategy.rows)  # refuses a batch of which layers disagree
            with self.capture.paused():
                grad = strategy.formed(parameter)
            return (grad * scale).to(parameter.dtype)

        return form

    # What the owner asks

    @torch.no_grad()
    def norms(self) -> Tensor | None:
        """Norms ``(B,)`` of the last backward pass, clipped or not; None before the first. Not private."""
        if self._ended and self._sq_norms_BK is None:
            groups = dict.fromkeys(self.strategy.parameters, 0)
            scale = common_rows(self.strategy.rows) if self.loss_reduction == "mean" else 1.0
            with self.capture.paused():
                self._sq_norms_BK = self.strategy.sq_norms(groups, 1, scale)
        return None if self._sq_norms_BK is None else self._sq_norms_BK.sum(dim=1).sqrt()

    def _sq_norms(
        self, groups: Mapping[nn.Parameter, int], num_groups: int, scale: float, fingerprint: tuple[object, ...]
    ) -> Tensor:
        self._sq_norms_BK = super()._sq_norms(groups, num_groups, scale, fingerprint)
        return self._sq_norms_BK

    @property
    def pending(self) -> bool:
        return self._ended or bool(self._waiting())

    @property
    def waits_for_owner(self) -> bool:
        return self._ended

    @property
    def rows_pending(self) -> int:
        waiting = next(iter(self._waiting().values()), None)
        return super().rows_pending if waiting is None else len(waiting[0])

    @property
    def waits(self) -> int:
        """How many backward passes wait to be clipped."""
        waiting = self._waiting()
        return len(next(iter(waiting.values()))) if waiting else int(self._ended)

    def clip(
        self,
        *,
        rows: int | None = None,
        loss_scale: float = 1.0,
        units: Units | None = None,
        fingerprint: tuple[object, ...] = (),
    ) -> ClipStatistics:
        if self._ended:
            self.capture.leaks.clear()
        if self._ended and not self._was_touched():
            try:
                return super().clip(rows=rows, loss_scale=loss_scale, units=units, fingerprint=fingerprint)
            finally:
                for parameter, one in self._present.items():
                    one.use_up()
                    self._used.setdefault(parameter, []).append(one)
                self._present = {}
        return self._clip_shown(rows, fingerprint)

    def _was_touched(self) -> bool:
        """Whether what will be clipped is anything else than what the last backward pass left."""
        if self.only is not None and not self.strategy.parameters.keys() <= self.only:
            return True
        waiting = self._waiting()
        alike = all(
            len(parts) == 1 and parts[0] is self._present.get(parameter) and self._present[parameter].untouched
            for parameter, parts in waiting.items()
        )
        return not (alike and (waiting.keys() >= self._present.keys() or not self.shows))

    def _waiting(self) -> dict[nn.Parameter, list[Tensor]]:
        """What stands in ``p.grad_sample`` and was not clipped yet, for each parameter that has any."""
        found = {}
        listed = self._listed if self._ended and self._listed else tuple(super().trainable().values())
        for parameter in listed:
            if self.only is not None and parameter not in self.only:
                continue
            shown = getattr(parameter, "grad_sample", None)
            parts = [] if shown is None else shown if isinstance(shown, list) else [shown]
            used = self._used.get(parameter, [])
            if left := [one for one in parts if not any(one is other for other in used)]:
                found[parameter] = left
        return found

    @torch.no_grad()
    def _clip_shown(self, rows: int | None, fingerprint: tuple[object, ...]) -> ClipStatistics:
        """Clips the first of the passes that wait, as it stands in ``p.grad_sample``."""
        self._refuse_leaks()
        waiting, names = self._waiting(), {p: name for name, p in self.trainable().items()}
        if self._ended and not self.shows:  # an optimizer over a part of the model
            waiting = {p: [self._formed(p)] for p in self.strategy.parameters if p in names}
        if len({len(parts) for parts in waiting.values()}) > 1:
            few, many = (pick(waiting, key=lambda p: len(waiting[p])) for pick in (min, max))
            raise MissingGradientError(
                f"Parameter '{names[few]}' took part in {len(waiting[few])} of the backward passes since the last "
                f"step, and '{names[many]}' in {len(waiting[many])}.",
                fix="Call optimizer.step() after each backward pass, or freeze what some batches leave out.",
            )
        given = Bookkeep(KeepAll())
        for parameter, parts in waiting.items():
            given.receive_rows(Use(parameter, names[parameter]), _values(parts[0], parameter, names[parameter]))
        self.strategy = given
        try:
            self._refuse_other_rows(rows)
            return self._add(common_rows(given.rows), 1.0, fingerprint)
        finally:
            self.strategy = self._probed
            for parameter, parts in waiting.items():
                self._used.setdefault(parameter, []).append(parts[0])
            if not self._waiting() or not self.shows:
                for one in self._present.values():
                    one.use_up()
                self._present = {}
                self.forget_pass()

    def _formed(self, parameter: nn.Parameter) -> Tensor:
        scale = common_rows(self.strategy.rows) if self.loss_reduction == "mean" else 1.0
        return self._former(parameter, scale)()

    def drop_pass(self) -> None:
        self.show_none()
        self.forget_pass()

    def forget_pass(self) -> None:
        self._ended = False
        for one in self._present.values():  # else it would be formed of the records of the next pass
            one.use_up()
        super().forget_pass()


def _nothing() -> None:
    """There is nothing to say."""


def _is_shown(parameter: nn.Parameter, one: Any) -> bool:
    shown = getattr(parameter, "grad_sample", None)
    return shown is one or (isinstance(shown, list) and any(part is one for part in shown))


def _values(grad: Any, parameter: nn.Parameter, name: str) -> Tensor:
    """What stands in ``p.grad_sample``, checked."""
    value = grad.value if isinstance(grad, OnDemand) else grad
    if not isinstance(value, Tensor) or value.shape[1:] != parameter.shape:
        found = tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__
        raise MissingGradientError(
            f"grad_sample of parameter '{name}' is {found}; expected a tensor (B, {str(tuple(parameter.shape))[1:]}.",
            fix="Write one gradient for each row, batch first.",
        )
    return value.detach().to(parameter.device)
