"""Executes private steps: from the draw of a logical batch to the parameter update.

`batch_state` has the stages of a logical batch. A batch that ends before its step is discarded: its sums are zeroed,
and it is charged all the same, because the reason may depend on the data.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from dpengine.accounting.ledger import Ledger
from dpengine.accounting.rounding import round_up
from dpengine.errors import BudgetExceeded, UnknownParameterError, notice
from dpengine.grad_modes.flat_buffer import FlatBuffer
from dpengine.grad_modes.materialize import forget_grad_samples
from dpengine.grad_modes.rows import Units
from dpengine.ledger_file.run_ledger import RunLedger
from dpengine.noise.correlated import mechanism_for
from dpengine.noise.share import add_noise
from dpengine.noise.source import NoiseSource
from dpengine.plan.run_plan import RunPlan
from dpengine.sampling.batches import Ticket

from .batch_state import BatchState, Effect, Stage
from .clipped_sums import ClippedSums, ClipStatistics
from .grad_writer import WrittenGradients
from .step_checks import refuse_backward, refuse_stale, refuse_step, refuse_unused, step_used_twice


@dataclass(eq=False)
class Release:
    """Runs the private optimizer step.

    Attributes:
        plan: The plan in force: sampling, clipping and noise.
        sums: Clips backward passes and holds the clipped sums.
        source: The source of private randomness.
        ledger: The privacy cost. A ledger that is also on disk writes a charge there before it counts here.
        unused_parameters: ``"error"`` or ``"zero"``: what happens to a parameter without a gradient in a step.
        overspend: Returns epsilon after a number of further charges if it exceeds the target, else None.
        grad_scaler: The GradScaler that scales the loss, if any.
        unit_reduction: ``"mean"`` or ``"sum"``: how the gradients of the samples of a privacy unit are combined.
        batches: The state of the current logical batch.
        statistics: Statistics of the last backward pass. Not private.
        dropped_rows: Number of samples dropped so far because their gradient norm was not finite.
        hand_fed: Whether the private loader does not draw the batches: each backward pass is a logical batch.
        goes_on: With ``hand_fed``: whether the next backward pass continues the current logical batch.
        pads_empty: Whether an empty batch runs with a placeholder sample, whose gradient is dropped.
        changed: Whether the plan was changed since the run began.
    """

    plan: RunPlan
    sums: ClippedSums
    source: NoiseSource
    ledger: Ledger | RunLedger
    unused_parameters: str = "error"
    overspend: Callable[[int], float | None] = lambda count: None
    grad_scaler: Any = None
    unit_reduction: str = "mean"
    batches: BatchState = field(default_factory=BatchState)
    statistics: ClipStatistics = field(default_factory=ClipStatistics)
    dropped_rows: int = 0
    hand_fed: bool = False
    goes_on: bool = False
    pads_empty: bool = False
    changed: bool = False
    _next_plan: RunPlan | None = None  # takes effect once the sums are empty

    def __post_init__(self) -> None:
        """Creates the noise mechanism and the writer of ``p.grad``."""
        self.noise = mechanism_for(self.source, self.plan.noise)
        self.gradients = WrittenGradients(self.sums.topology)

    # From the loader

    def handed_out(self, ticket: Ticket, chunk: int) -> None:
        """A physical batch is returned to the user."""
        if self.batches.stage is Stage.CLOSED:
            return
        if self.sums.waits_for_owner and self.batches.stage in {Stage.IDLE, Stage.RELEASED}:
            self.sums.drop_pass()  # the pass was for another model, such as a generator's
        self.sums.keep_shown()
        self._settle()
        self._begin(self.batches.fetch(ticket, chunk))

    def _begin(self, physical: tuple[Ticket, int] | None) -> None:
        """Makes a physical batch the current one, if there is one."""
        if physical is None:
            return
        batch, chunk = physical
        if chunk > 0:
            self._apply(self.batches.begin(batch, chunk))
            return
        if batch.step <= self.batches.last_step:
            self.discard()
            raise step_used_twice(batch.step)
        self.plan.refuse_step(batch.step)
        self.plan = self.plan.at_step(batch.step, first=self.batches.last_step < 0)
        if self.plan.takes_turns:  # participation depends on the step number, so skipped steps count
            self._charge_discarded(self.batches.skipped_before(batch.step))
        try:
            self._apply(self.batches.begin(batch, chunk))
        except BaseException:
            self.batches.revoke()  # the loader raises, so the user does not get this batch
            raise
        self._follow_plan()

    def _apply(self, effect: Effect) -> None:
        try:
            self._charge_discarded(effect.discarded)
        finally:
            if effect.zero_sums:
                self.sums.discard_sums()
                self._follow_plan()

    def _charge_discarded(self, count: int) -> None:
        if count:
            self.batches.discarded += count
            self.ledger.charge(self.plan.event(), count=count, kind="void")

    def discard(self) -> None:
        """Discards the merged logical batches: charges them and zeroes the sums."""
        self._apply(self.batches.discard())

    def change(self, **constants: Any) -> None:
        """Changes constants of the plan for clipping, noise and accounting together.

        The change takes effect once the sums are empty: a batch is noised and charged by the plan that clipped it.
        Raises InvalidBudgetError if the plan cannot change.
        """
        self._next_plan = (self._next_plan or self.plan).changed(self.batches.first_uncharged, **constants)
        self._follow_plan()

    @property
    def asked_plan(self) -> RunPlan:
        """The plan of the next step."""
        return self._next_plan or self.plan

    def _follow_plan(self) -> None:
        if self._next_plan is None or not self.sums.buffer.clean:
            return
        self.plan = self._next_plan.changed(self.batches.first_uncharged)
        self.sums.policy, self._next_plan, self.changed = self.plan.clipping, None, True

    def _begin_external(self) -> None:
        """Makes the samples of a backward pass, which the private loader did not draw, the current batch."""
        rows, batches = self.sums.rows_pending, self.batches
        if batches.stage is Stage.CLIPPED and self.goes_on:
            batches.extend(replace(batches.batches[-1], rows=(*batches.batches[-1].rows, rows)))
        else:
            self._begin((Ticket(batches.last_step + 1, (rows,)), 0))

    def _units(self) -> Units | None:
        """The privacy unit of each sample of the current physical batch; None if each sample is a unit."""
        units = self.batches.batches[-1].units
        if not units or not self.batches.samples:
            return None
        place_B = torch.from_numpy(units[self.batches.chunk])
        return Units(place_B, int(place_B[-1]) + 1, mean=self.unit_reduction == "mean")

    # From capture

    def backward_ended(self) -> None:
        """Clips a finished backward pass. An error discards the logical batch."""
        if not (self.sums.pending or self.sums.trainable()):
            self.sums.forget_pass()  # a model without trainable parameters passes gradients on and has none
            return
        try:
            if self.hand_fed:
                self._begin_external()
            elif self.pads_empty and self.batches.awaits_backward and self.batches.samples == 0:
                self.sums.drop_pass()
                self.batches.clipped()
                return
            while physical := self.batches.next_for_backward(self.sums.strategy.rows.values()):
                self._begin(physical)
            refuse_backward(self)
            self._follow_parameters()
            self.statistics = self.sums.clip(
                rows=self.batches.samples,
                loss_scale=1.0 if self.grad_scaler is None else float(self.grad_scaler.get_scale()),
                units=self._units(),
                fingerprint=self._facts(),
            )
        except BaseException:  # of any kind: the sums may hold a part of the batch
            self.sums.forget_pass()
            self.discard()
            raise
        self.dropped_rows += self.statistics.dropped
        self.batches.clipped()

    def _follow_parameters(self) -> None:
        """Adapts the buffer to the parameters that are trainable now. They may not change within a step."""
        trainable = self.sums.trainable()
        if self.sums.buffer.fits(trainable.values()):
            return
        if not self.sums.buffer.clean:
            named = self.sums.topology.parameters(self.sums.model).items()
            changed = [repr(name) for name, p in named if p.requires_grad != (p in self.sums.buffer.parameters)]
            raise UnknownParameterError(
                f"Parameters changed in the middle of a step: {', '.join(changed) or 'their device or dtype'}.",
                fix="Freeze, thaw or move parameters after optimizer.step(), before the next batch.",
            )
        self.sums.buffer = FlatBuffer(trainable.values(), self.sums.topology)

    # From the optimizer

    def zero_grad(self) -> None:
        """Discards complete logical batches that were not stepped, because the user cleared their gradients."""
        self.gradients.zero_grad(self.sums.buffer.parameters)
        try:
            self._apply(self.batches.cleared())
        except BaseException:
            self.batches.drop_uncharged()
            raise

    def step(self, apply: Callable[[], None]) -> bool:
        """Charges the logical batch, adds noise and updates the parameters; False if the batch is not complete."""
        if not self.gather():
            return False
        with self.leaving():
            self._write_gradients()
            apply()
        return True

    def gather(self) -> bool:
        """Clips a pass whose end callback was missed. Returns whether the logical batch is complete."""
        self._settle()
        self._begin(self.batches.next_for_step())
        if self.batches.stage in {Stage.IDLE, Stage.RELEASED}:
            self._refuse_over_budget(1)  # the loader may have ended for that reason
        refuse_step(self)
        if not self.batches.done:
            refuse_stale(self)
            self.batches.clipped()  # an empty batch may skip its backward pass
        return self.batches.stage is not Stage.OPEN

    @contextlib.contextmanager
    def leaving(self) -> Iterator[None]:
        """Charges a complete logical batch, which the context then releases. An error in the context discards it."""
        self._refuse_over_budget(len(self.batches.batches))
        try:
            self._follow_parameters()
            refuse_unused(self)
            self._charge()
            yield
            step, size, total = self.batches.last_step, self.plan.expected_batch_size, self.sums.topology.total
            self.plan.clipping.finish_step(self.source, step, size, total)  # it may wait for other ranks
        except BaseException:
            self.discard()
            raise
        self.sums.contributed.clear()
        self.batches.finished()
        self._follow_plan()

    def _settle(self) -> None:
        """Clips a pass whose end callback was missed; discards an interrupted one."""
        if self.sums.capture.backward_broke_off:
            self.sums.forget_pass()
            self.discard()
        while self.sums.pending:
            self.backward_ended()

    def _refuse_over_budget(self, count: int) -> None:
        reached = self.overspend(count)
        if reached is None:
            return
        if self.batches.stage is Stage.CLIPPED:
            # Not charged: that this step is one too many is public, and nothing of its batch leaves.
            self.batches.drop_uncharged()
            self.sums.discard()
        raise BudgetExceeded(
            f"Step {self.ledger.steps + count:,} would reach epsilon {round_up(reached, 4)}, above the target.",
            fix="Training ended. Raise target_epsilon deliberately, or report now.",
        )

    def _charge(self) -> None:
        count = len(self.batches.batches)
        if count > 1 and not self.plan.claims_passes:  # a pass costs the same, however many of its batches are joined
            notice(
                "DPE006",
                f"{count} sampled batches went into one step; both are accounted. "
                f"accumulation_steps={count} of dpengine.PrivacyEngine costs less privacy.",
            )
        self.ledger.charge(self.plan.event(count), count=count)
        self.batches.charged()

    def watch(self, sums: ClippedSums) -> None:
        """Replaces the clipped sums. The current logical batch is discarded."""
        if not self.sums.buffer.clean:
            self.discard()
        self.sums, sums.policy = sums, self.plan.clipping

    def draw_from(self, source: NoiseSource) -> None:
        """Draws noise from another source, from the next step on."""
        self.source = source
        self.noise = mechanism_for(source, self.plan.noise)

    def _write_gradients(self, *, divides: bool = True) -> None:
        """Adds noise to the sums, divides by public constants, and writes ``p.grad`` in the memory of the sums."""
        buffer, std, step = self.sums.buffer, self.plan.noise_std, self.batches.batches[-1].step
        mean, count = self.sums.loss_reduction == "mean", len(self.batches.batches)
        divisor = self.plan.divisor(count, mean=mean) if divides else 1.0
        topology, facts = self.sums.topology, ("release", *self._facts(), count, divisor)
        if buffer.waits:
            buffer.settle()
        taken = buffer.take()
        try:
            add_noise(taken, self.noise, std=std, step=step, scale=1 / divisor, replicas=topology.replicas, facts=facts)
        except BaseException:
            for flat in taken.flats.values():
                flat.zero_()
            raise
        self.gradients.write(taken.views)

    def _facts(self) -> tuple[object, ...]:
        """The rank fingerprint: values that must be equal on all ranks."""
        batches = self.batches
        step = batches.batches[-1].step if batches.batches else None
        place = (step, batches.chunk, len(batches.batches), batches.released)
        return (*place, self.plan.noise_std, *self.plan.clipping.bounds, self.ledger.steps)

    # The end

    def close(self) -> None:
        """Ends the run: discards unfinished batches and zeroes the sums, also if the charge fails."""
        try:
            self._charge_discarded(self.batches.close().discarded)
        finally:
            self.sums.detach()
            forget_grad_samples(self.sums.model.parameters())
            self.gradients.forget()
