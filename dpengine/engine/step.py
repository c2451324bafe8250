"""Executes private steps: sampling, clipping, accounting, noise, parameter update.

`batch_state` defines the stages of a logical batch. A batch that ends before its step is discarded: its sums are
zeroed, but it is charged, because the reason may depend on the data.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch

from dpengine.accounting.ledger import Ledger
from dpengine.accounting.rounding import round_up
from dpengine.capture.capture import CaptureState
from dpengine.errors import BudgetExceeded
from dpengine.grad_modes.grad_sample import forget_grad_samples
from dpengine.grad_modes.rows import Units
from dpengine.independence.loop_probe import LoopProbe
from dpengine.independence.watch_step import step_inside_check_error
from dpengine.ledger_file.run_ledger import RunLedger
from dpengine.noise.correlated import mechanism_for
from dpengine.noise.sharded_noise import add_noise
from dpengine.noise.source import NoiseSource
from dpengine.plan.run_plan import RunPlan
from dpengine.sampling.batches import LogicalBatch
from dpengine.sampling.cyclic import PARTITION_STEP

from .add_clipped import ClipStatistics
from .batch_state import NOT_RETURNED, BatchState, Effect, Stage
from .budget import Budget
from .grad_writer import GradWriter
from .pass_clipper import PassClipper, RecordedPass
from .shared_dataset_check import SharedDatasetCheck
from .step_checks import (
    PLACEHOLDER_NOTE,
    check_backward,
    check_stale,
    check_step,
    check_unused,
    pass_inside_update,
    step_used_twice,
    warn_ended,
    warn_left_out,
    warn_merged,
)

OnPass = Callable[[RecordedPass], None]


class PrivateStep:
    """Executes the private steps of one model and one optimizer.

    Attributes:
        plan: The current plan: sampling, clipping and noise.
        passes: Clips backward passes and holds the clipped sums.
        batches: The state of the current logical batch.
        ledger: The ledger to charge. A `RunLedger` writes each charge to disk before it counts it.
        source: The source of private randomness.
        earlier_nonces: For each saved run that this one continues: the step after its last, and its batches' nonce.
        noise: The noise mechanism.
        noise_drawn: Each source of noise so far, with the type of the device on which the noise was added.
        writer: Writes ``p.grad``.
        statistics: Statistics of the last backward pass. Not private.
        dropped_samples: Number of samples dropped so far because their gradient norm was not finite.

    Args:
        plan: The plan of the first step.
        make_passes: Returns the `PassClipper` of the model, which reports backward passes to the given function.
        source: The source of private randomness.
        ledger: The ledger to charge.
        budget: The privacy budget; None for no limit.
        batches: The state machine of logical batches; None creates one for a private loader.
        dataset_check: Warns if another engine trains on the same data set.
        unused_parameters: ``"error"`` or ``"zero"``: treatment of parameters without a gradient in a step.
        unit_reduction: ``"mean"`` or ``"sum"``: reduction of the gradients of a privacy unit's samples.
        grad_scaler: The GradScaler that scales the loss, if any.
    """

    def __init__(
        self,
        plan: RunPlan,
        make_passes: Callable[[OnPass], PassClipper],
        source: NoiseSource,
        ledger: Ledger | RunLedger,
        *,
        budget: Budget | None = None,
        batches: BatchState | None = None,
        dataset_check: SharedDatasetCheck | None = None,
        unused_parameters: str = "error",
        unit_reduction: str = "mean",
        grad_scaler: Any = None,
    ):
        self.plan = plan
        self._next_plan: RunPlan | None = None  # takes effect once the sums are empty
        self.passes = make_passes(self.on_pass)
        self.passes.policy = plan.clipping
        self.batches = BatchState() if batches is None else batches
        self.ledger = ledger
        self.source = source
        self.earlier_nonces: tuple[tuple[int, int], ...] = ()
        self.noise = mechanism_for(source, plan.noise)
        self.noise_drawn: set[tuple[NoiseSource, str]] = set()
        self.loop = LoopProbe(self.passes.capture, mean_loss=self.passes.loss_reduction == "mean")
        self.writer = GradWriter(self.passes.topology)
        self.budget = Budget() if budget is None else budget
        self.dataset_check = dataset_check
        self.unused_parameters, self.unit_reduction = unused_parameters, unit_reduction
        self.grad_scaler = grad_scaler
        self.statistics, self.dropped_samples = ClipStatistics(), 0
        self.run: Any = None  # set by `Run.attach`, so that the run lives as long as the model

    # Called by the loader

    def may_draw(self, step: int) -> bool:
        """Returns True if the loader may draw the logical batch of this step."""
        fits = self.plan.has_step(step)
        if fits and self.budget.target_epsilon is not None:
            fits = self.budget.may_draw(self.plan, self.ledger, *self.batches.upcoming())
        if not fits or step == self.budget.planned_steps:
            warn_ended(self, step, ends=not fits)
        return fits

    def batch_returned(self, batch: LogicalBatch, chunk: int, data: Any = None) -> None:
        """Records a physical batch, just before the loader returns it to the user."""
        if self.batches.stage is Stage.CLOSED:
            return
        self._settle()
        self._begin(self.batches.fetch(batch, chunk))
        self.passes.capture.error_note = PLACEHOLDER_NOTE if batch.placeholder and not batch.sizes[chunk] else ""
        samples, probe = batch.sizes[chunk], self.passes.probe
        due = probe.armed or probe.needs_other_length or self.loop.needs_other_size not in (None, samples)
        if (due or self.loop.record is not None) and not self.batches.fetched:
            self.loop.batch_returned(probe, data, samples)

    def _begin(self, physical: tuple[LogicalBatch, int] | None) -> None:
        """Makes a physical batch the current one, if there is one."""
        if physical is None:
            return
        batch, chunk = physical
        if chunk > 0:
            self._apply(self.batches.begin(batch, chunk), left_out=True)
            return
        if batch.step <= self.batches.last_step:
            self.discard()
            raise step_used_twice(batch.step)
        self.plan.check_step(batch.step)
        self.plan = self.plan.at_step(batch.step, first=self.batches.last_step < 0)
        if self.plan.is_cyclic:  # participation depends on the step number, so skipped steps are charged
            self._charge_discarded(self.batches.skipped_before(batch.step))
        last_step = self.batches.last_step
        try:
            self._apply(self.batches.begin(batch, chunk), left_out=True)
        except BaseException:
            self.batches.revoke(last_step)  # the loader raises and does not return this batch
            raise
        self._apply_next_plan()

    def _apply(self, effect: Effect, *, left_out: bool = False) -> None:
        """Executes the effect of a transition of the batch state. With ``left_out``, warns if it discards a batch."""
        if effect.discarded and left_out:
            warn_left_out(self)
        try:
            self._charge_discarded(effect.discarded)
        finally:
            if effect.zero_sums:
                self.passes.zero()
                self._apply_next_plan()

    def _charge_discarded(self, count: int) -> None:
        if count:
            self.batches.discarded += count
            self.ledger.charge(self.plan.event(), count=count, kind="void")

    def discard(self) -> None:
        """Discards the merged logical batches: charges them if they are not charged yet, and zeroes the sums."""
        self._apply(self.batches.discard())

    @contextlib.contextmanager
    def _discard_on_error(self) -> Iterator[None]:
        try:
            yield
        except BaseException:  # including interrupts, because the sums may hold a part of the batch
            self.loop.close()
            self.passes.forget()
            self.discard()
            raise

    def sampling_words(self, count: int, *, step: int, block: int) -> Any:
        """Returns the random words that select a batch."""
        # Each call uses less than 2**32 blocks of the source, so the calls of one step do not overlap.
        is_partition, earlier = step >= PARTITION_STEP, self.earlier_nonces  # a continued run keeps the first partition
        nonce = next((nonce for end, nonce in earlier if is_partition or step < end), None) if earlier else None
        return self.source.words(count, domain="mask", step=step, block=block << 32, nonce=nonce)

    # The plan

    @property
    def next_plan(self) -> RunPlan:
        """The plan of the next step."""
        return self._next_plan or self.plan

    def change(self, **constants: Any) -> None:
        """Changes constants of the plan for clipping, noise and accounting together.

        The change takes effect once the sums are empty, so that clipping, noise and charge of a batch follow one plan.
        Raises InvalidBudgetError if the plan cannot change.
        """
        self._next_plan = self.next_plan.changed(self.batches.first_uncharged, **constants)
        self._apply_next_plan()

    def _apply_next_plan(self) -> None:
        if self._next_plan is None or not self.passes.buffer.clean:
            return
        self.plan = self._next_plan.changed(self.batches.first_uncharged)
        self.passes.policy, self._next_plan = self.plan.clipping, None
        self.budget.fits_plan = False

    # Called by the capture

    def on_pass(self, recorded: RecordedPass) -> None:
        """Clips a finished backward pass. An error discards the logical batch."""
        if not (recorded.mode.rows or self.passes.trainable()):
            self.passes.forget()  # a model without trainable parameters only propagates gradients
            return
        with self._discard_on_error():
            if self.batches.stage is Stage.CHARGED:
                raise pass_inside_update()
            if self.batches.external:
                self._begin_external(recorded.samples)
            while physical := self.batches.next_for_backward(recorded.mode.rows.values()):
                self._begin(physical)
            if self.batches.is_placeholder:  # clipped as a pass without samples, because other ranks may wait for it
                self.passes.forget()
                recorded = RecordedPass(self.passes.mode)
            # Cheap conditions that every pass evaluates. `check_backward` raises if the pass is wrong.
            samples = self.batches.samples if self.batches.awaits_backward else None
            if samples is None or recorded.samples != samples or self.writer.stale:
                check_backward(self, recorded)
            loss_scale = 1.0 if self.grad_scaler is None else float(self.grad_scaler.get_scale())
            units, fingerprint = self._units(), self._fingerprint()
            self.statistics = self.passes.clip(
                recorded, samples=samples, loss_scale=loss_scale, units=units, fingerprint=fingerprint
            )
            if self.loop.record is not None:
                self.loop.check()
        self.dropped_samples += self.statistics.dropped
        self.batches.clipped()

    def _begin_external(self, samples: int) -> None:
        """Makes the samples of a backward pass the current physical batch, because no loader returned one."""
        if self.batches.stage is Stage.CLIPPED and self.batches.continues:
            self.batches.extend(samples)
        else:
            self._begin((LogicalBatch(self.batches.last_step + 1, (samples,)), 0))

    def _units(self) -> Units | None:
        """Returns the privacy unit of each sample of the current physical batch; None if each sample is a unit."""
        units = self.batches.logical_batches[-1].units
        if not units or not self.batches.samples:
            return None
        unit_B = torch.from_numpy(units[self.batches.chunk])
        return Units(unit_B, int(unit_B[-1]) + 1, mean=self.unit_reduction == "mean")

    # Called by the optimizer

    def zero_grad(self) -> None:
        """Discards complete logical batches that were not stepped, because the user cleared their gradients."""
        if self.passes.capture.state is CaptureState.PAUSED:
            return  # called inside check_loop
        self.writer.zero_grad(self.passes.buffer.parameters)
        self._apply(self.batches.cleared())

    def step(self, update: Callable[[], None]) -> bool:
        """Charges the batch, adds noise and updates the parameters. Returns False if the batch is incomplete."""
        if not self.prepare_step():
            return False
        with self.private_update():
            mean = self.passes.loss_reduction == "mean"
            self.write_gradients(self.plan.divisor(len(self.batches.logical_batches), mean=mean))
            update()
        return True

    def prepare_step(self) -> bool:
        """Clips a pass whose end callback was missed. Returns True if the logical batch is complete."""
        if self.passes.capture.state is CaptureState.PAUSED:
            raise step_inside_check_error("The private optimizer")
        self._settle()
        if self.batches.fetched:
            self._begin(self.batches.next_for_step())
        if self.batches.stage in NOT_RETURNED:
            self._check_before_charge(1)  # the loader may have ended because of the budget
        if not self.batches.is_ready or len(self.batches.logical_batches) > 1:
            check_step(self)
        if not self.batches.done:
            check_stale(self)
            self.batches.clipped()  # an empty batch may skip its backward pass
        return self.batches.stage is not Stage.OPEN

    @contextlib.contextmanager
    def private_update(self) -> Iterator[None]:
        """Charges a complete logical batch. Its update then runs in the context.

        An error in the update discards the batch, which is not charged a second time.
        """
        self._check_before_charge(len(self.batches.logical_batches))
        with self._discard_on_error():
            if missing := self.passes.missing(self.passes.update_buffer()):
                check_unused(self, missing)
            self._charge()
            plan, step = self.plan, self.batches.last_step  # the update may fetch the next batch, which changes both
            yield
            plan.clipping.finish_step(self.source, step, plan.expected_batch_size, self.passes.topology.total)
            if self.passes.capture.choice is not None:
                self.passes.capture.choice.share(self.passes.capture)  # may wait for other ranks, as finish_step() may
        self.passes.contributed.clear()
        self.batches.finished()
        self._apply_next_plan()

    def _settle(self) -> None:
        """Clips a pass whose end callback was missed; discards the batch of an interrupted one."""
        if self.passes.settle():
            self.discard()

    def _check_before_charge(self, count: int) -> None:
        """Warns if another engine trains on the data set; raises BudgetExceeded if ``count`` charges do not fit."""
        if self.dataset_check is not None and not self.dataset_check.is_last:
            self.dataset_check.before_charge(self.ledger)
        if self.budget.target_epsilon is None:
            return
        epsilon = self.budget.exceeding_epsilon(self.plan, self.ledger, count)
        if epsilon is None:
            return
        if self.batches.stage is Stage.CLIPPED:
            # Not charged: the budget check uses public values only, and no result of the batch is released.
            self.batches.drop_uncharged()
            self.passes.discard()
        raise BudgetExceeded(
            f"Step {self.ledger.steps + count:,} would reach epsilon {round_up(epsilon, 4)}, above the target.",
            fix="Training ended. Raise target_epsilon deliberately, or report now.",
        )

    def _charge(self) -> None:
        count = len(self.batches.logical_batches)
        if count > 1 and not self.plan.accounts_per_epoch:  # merging does not change the cost of an epoch
            warn_merged(self, count)
        event, before = self.plan.event(count), self.ledger.steps
        try:
            if isinstance(self.ledger, RunLedger):
                max_reserved = partial(self.budget.max_reserved, self.plan, self.ledger, self.batches.last_step, count)
                self.ledger.charge(event, count=count, max_reserved=max_reserved)
            else:
                self.ledger.charge(event, count=count)
        finally:
            if self.ledger.steps > before:  # an observer of the ledger may raise after the charge
                self.batches.charged()

    def write_gradients(self, divisor: float) -> None:
        """Adds noise to the sums, divides them by a public constant and writes them to ``p.grad`` without a copy."""
        buffer, topology, count = self.passes.buffer, self.passes.topology, len(self.batches.logical_batches)
        if buffer.deferred:
            buffer.settle()
        fingerprint = ("release", *self._fingerprint(), count, divisor)
        sums = buffer.drain()
        self.noise_drawn.update((self.source, flat.device.type) for flat in sums.flats.values())
        try:
            std, scale, ranks = self.plan.noise_std, 1 / divisor, topology.replicas
            step = self.batches.logical_batches[-1].step
            if ranks.size == 1:
                sums.add_noise(self.noise, std=std, step=step, scale=scale)
            else:
                add_noise(sums, self.noise, std=std, step=step, scale=scale, replicas=ranks, fingerprint=fingerprint)
        except BaseException:
            for flat in sums.flats.values():
                flat.zero_()
            raise
        self.writer.write(sums.views)

    def _fingerprint(self) -> tuple[object, ...]:
        """Returns values that must be equal on all ranks; an empty tuple in a single process."""
        if self.passes.topology.everyone.size == 1:
            return ()
        step = self.batches.logical_batches[-1].step if self.batches.logical_batches else None
        position = (step, self.batches.chunk, len(self.batches.logical_batches), self.batches.released)
        return (*position, self.plan.noise_std, *self.plan.clipping.bounds, self.ledger.steps)

    # The run

    def close(self) -> None:
        """Ends the run: discards unfinished batches and zeroes the sums, even if the charge fails."""
        self.loop.close()
        try:
            self._charge_discarded(self.batches.close().discarded)
        finally:
            self.passes.detach()
            forget_grad_samples(self.passes.model.parameters())
            self.writer.forget()
