"""Executes private steps: from the draw of a logical batch to the parameter update.

A logical batch, identified by a `Ticket`, is OPEN once returned, CLIPPED when all its chunks went through a backward
pass, and RELEASED when the step is accounted, noised and applied. A batch that ends earlier is VOID (discarded): its
sums are destroyed, and it is accounted all the same, since the reason may depend on the data.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from dpengine.accounting.ledger import Ledger
from dpengine.accounting.rounding import round_up
from dpengine.errors import BudgetExceeded, TicketError, UnknownParameterError, notice
from dpengine.grad_modes.flat_buffer import FlatBuffer
from dpengine.grad_modes.materialize import forget_grad_samples
from dpengine.grad_modes.rows import Units
from dpengine.ledger_file.run_ledger import RunLedger
from dpengine.noise.correlated import mechanism_for
from dpengine.noise.share import add_noise
from dpengine.noise.source import NoiseSource
from dpengine.plan.run_plan import RunPlan
from dpengine.sampling.batches import Ticket

from .batch_state import Stage
from .clipped_sums import ClippedSums, ClipStatistics
from .grad_writer import WrittenGradients
from .step_checks import refuse_backward, refuse_stale, refuse_step, refuse_unused


@dataclass(eq=False)
class Release:
    """Turns tickets into releases, one at a time.

    Attributes:
        plan: What the run does.
        sums: Where clipped gradients add up.
        source: Where private randomness comes from.
        ledger: What was spent; where it is on disk too, a charge is there before it counts here.
        unused_parameters: ``"error"`` or ``"zero"``: what to do with a parameter that took no part in a step.
        overspend: Epsilon after so many more charges, where that passes the target; else None.
        loss_scale: What the loss is multiplied by before ``backward``.
        ahead: How many chunks a trainer fetches before it uses the first. Above 0, backward passes take chunks in the
            order of the loader, and the trainer must be one that runs one backward pass for each.
        unit_reduction: ``"mean"`` or ``"sum"``: what a unit's gradient is of those of its rows, where units are drawn.
        statistics: Of the last backward pass. Not private.
    """

    plan: RunPlan
    sums: ClippedSums
    source: NoiseSource
    ledger: Ledger | RunLedger
    unused_parameters: str = "error"
    overspend: Callable[[int], float | None] = lambda count: None
    loss_scale: Callable[[], float] = lambda: 1.0
    ahead: int = 0
    unit_reduction: str = "mean"
    stage: Stage = Stage.IDLE
    statistics: ClipStatistics = field(default_factory=ClipStatistics)
    dropped_rows: int = 0
    tickets: list[Ticket] = field(default_factory=list)  # logical batches whose gradients are in the sums
    fetched: deque[tuple[Ticket, int]] = field(default_factory=deque)  # chunks that wait for their backward pass
    last_step: int = -1  # of the newest ticket
    joined: int = 1  # tickets in the last release
    released: int = 0  # how often weights were changed
    given_up: int = 0  # batches, which are charged too
    chunk: int = 0  # of the last ticket
    done: bool = False  # whether this chunk went through backward
    passed_over: bool = False  # whether the batch before this one went through none
    hand_fed: bool = False  # whether batches come from elsewhere: each backward pass makes a ticket of its own
    goes_on: bool = False  # where hand-fed: whether the next backward pass is of the same logical batch
    pads_empty: bool = False  # whether a batch without rows comes with one of no meaning, whose gradient is dropped
    changed: bool = False  # whether the plan is another than the one that the run began with
    _next_plan: RunPlan | None = None  # waits until no gradient that was clipped by the present one is in the sums

    def __post_init__(self) -> None:
        """Makes the mechanism that draws from the source."""
        self.noise = mechanism_for(self.source, self.plan.noise)
        self.gradients = WrittenGradients(self.sums.topology)
        self.sums.facts = self._facts

    # From the loader

    def handed_out(self, ticket: Ticket, chunk: int) -> None:
        """A chunk is given to the user."""
        if self.stage is Stage.CLOSED:
            return
        if self.sums.waits_for_owner and self.stage in {Stage.IDLE, Stage.RELEASED}:
            self.sums.drop_pass()  # for another model's sake, as of a generator
        self.sums.keep_shown()
        self._settle()
        waiting = self.stage is Stage.OPEN and not self.done
        if self.fetched or (waiting and self.ahead):
            self.fetched.append((ticket, chunk))
            if len(self.fetched) > self.ahead:
                self._begin(*self.fetched.popleft())
        else:
            self._begin(ticket, chunk)

    def _begin(self, ticket: Ticket, chunk: int) -> None:
        if chunk == 0:
            self._next_ticket(ticket)
        elif self.stage is Stage.VOID or (not self.done and self.rows > 0):
            self.void()  # a chunk was left out, now or before
            return
        self.chunk, self.done = chunk, False

    def _next_ticket(self, ticket: Ticket) -> None:
        if ticket.step <= self.last_step:
            # Noise is addressed by the step: the difference of two releases with one address would have none.
            self.void()
            raise TicketError(
                f"Step {ticket.step} was handed out before in this run; its noise must not be used again.",
                fix="Do not set the loader back: detach the model and call make_private again.",
            )
        self.plan.refuse_step(ticket.step)
        self.plan = self.plan.at_step(ticket.step, first=self.last_step < 0)
        if self.last_step >= 0 and self.plan.takes_turns:  # who takes part hangs on the step: those jumped over count
            self._charge_void(ticket.step - self.last_step - 1)
        self.last_step = ticket.step
        self.passed_over = untouched = self.stage is Stage.OPEN and self.chunk == 0 and not self.done
        if self.stage is Stage.OPEN:
            if untouched and len(self.tickets) > 1:
                self._charge_void(len([self.tickets.pop()]))  # the batches before it stay in the sums
            else:
                self.void()
        if self.stage is not Stage.CLIPPED:  # clipped batches that were not stepped join the next release
            self.tickets = self.tickets if self.stage is Stage.OPEN else []
        self.tickets.append(ticket)
        self.stage = Stage.OPEN
        self._follow_plan()

    def change(self, **constants: Any) -> None:
        """Goes on with other constants of the plan, for clip, noise and ledger alike, or refuses (InvalidBudgetError).

        A logical batch of which something was clipped is released as it was clipped.
        """
        self._next_plan = (self._next_plan or self.plan).changed(self._first_uncharged, **constants)
        self._follow_plan()

    @property
    def asked_plan(self) -> RunPlan:
        """The plan of the next release, as far as is known."""
        return self._next_plan or self.plan

    @property
    def _first_uncharged(self) -> int:
        return self.tickets[0].step if self.stage in {Stage.OPEN, Stage.CLIPPED} else self.last_step + 1

    def _follow_plan(self) -> None:
        if self._next_plan is None or not self.sums.buffer.clean:
            return
        self.plan = self._next_plan.changed(self._first_uncharged)
        self.sums.policy, self._next_plan, self.changed = self.plan.clipping, None, True

    def _make_ticket(self) -> None:
        """A ticket for a backward pass over rows that came from elsewhere."""
        rows = self.sums.rows_pending
        if self.stage is Stage.CLIPPED and self.goes_on:
            self.tickets[-1] = replace(self.tickets[-1], rows=(*self.tickets[-1].rows, rows))
            self.stage, self.chunk, self.done = Stage.OPEN, self.chunk + 1, False
        else:
            self._begin(Ticket(self.last_step + 1, (rows,)), 0)

    @property
    def rows(self) -> int:
        """Rows of the chunk that was handed out last."""
        return self.tickets[-1].rows[self.chunk]

    def _units(self) -> Units | None:
        """Which rows of this chunk belong together."""
        units = self.tickets[-1].units
        if not units or not self.rows:
            return None
        place_B = torch.from_numpy(units[self.chunk])
        return Units(place_B, int(place_B[-1]) + 1, mean=self.unit_reduction == "mean")

    # From capture

    def backward_ended(self) -> None:
        """A backward pass over the model is over. One that must not count is refused, and its batch given up."""
        if not (self.sums.pending or self.sums.trainable()):
            self.sums.forget_pass()  # a model that is frozen as a whole hands gradients on, and has none itself
            return
        try:
            if self.hand_fed:
                self._make_ticket()
            elif self.pads_empty and self.rows == 0 and self.stage is Stage.OPEN and not self.done:
                self.sums.drop_pass()
                self._chunk_done()
                return
            self._take_fetched()
            refuse_backward(self)
            self._follow_parameters()
            self.statistics = self.sums.clip(rows=self.rows, loss_scale=self.loss_scale(), units=self._units())
        except BaseException:  # whatever it is: the sums may hold a part of the batch
            self.sums.forget_pass()
            self.void()
            raise
        self.dropped_rows += self.statistics.dropped
        self._chunk_done()

    def _next_is_empty(self) -> bool:
        """Whether ``step`` is for a chunk fetched ahead that has no rows, and so perhaps no backward pass."""
        ticket, chunk = self.fetched[0]
        free = self.done if self.stage is Stage.OPEN else self.stage is not Stage.CLIPPED
        return free and ticket.rows[chunk] == 0

    def _take_fetched(self) -> None:
        """Finds the chunk that a backward pass is over, among those fetched ahead: one that was left out is void."""
        seen = self.sums.strategy.rows.values()
        while self.fetched and (self.stage is not Stage.OPEN or self.done or self.rows not in seen):
            self._begin(*self.fetched.popleft())

    def _follow_parameters(self) -> None:
        """Makes the sums those of the parameters that train now; within a release they may not change."""
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

    def _chunk_done(self) -> None:
        self.done = True
        if self.chunk == len(self.tickets[-1].rows) - 1:
            self.stage = Stage.CLIPPED

    # From the optimizer

    def zero_grad(self) -> None:
        """The user cleared the gradients: logical batches that are complete and were not stepped are given up."""
        self.gradients.zero_grad(self.sums.buffer.parameters)
        if self.stage is Stage.RELEASED:
            self.tickets, self.stage = [], Stage.IDLE
        elif self.stage is Stage.CLIPPED:
            self.void()
        elif self.stage is Stage.OPEN and len(self.tickets) > 1 and self.chunk == 0 and not self.done:
            present = self.tickets.pop()
            self.void()
            self.tickets, self.stage = [present], Stage.OPEN

    def step(self, apply: Callable[[], None]) -> bool:
        """Charges, noises and applies the sums, if the logical batch is complete."""
        if not self.gather():
            return False
        with self.leaving():
            self._write_gradients()
            apply()
        return True

    def gather(self) -> bool:
        """Brings what waits into the sums; whether the logical batch is complete then, and may be released."""
        self._settle()
        if self.fetched and self._next_is_empty():
            self._begin(*self.fetched.popleft())
        if self.stage in {Stage.IDLE, Stage.RELEASED}:
            self._refuse_over_budget(1)  # the loader may have ended for that reason
        refuse_step(self)
        if self.rows == 0 and not self.done:
            refuse_stale(self)
            self._chunk_done()  # an empty batch may skip its backward pass
        return self.stage is not Stage.OPEN

    @contextlib.contextmanager
    def leaving(self) -> Iterator[None]:
        """Charges a logical batch that is complete; what leaves of it leaves inside. An error there voids it."""
        self._refuse_over_budget(len(self.tickets))
        try:
            self._follow_parameters()
            refuse_unused(self)
            self._charge()
            yield
            step, size, total = self.tickets[-1].step, self.plan.expected_batch_size, self.sums.topology.total
            self.plan.clipping.finish_step(self.source, step, size, total)  # it may wait for other ranks
        except BaseException:
            self.void()
            raise
        self.sums.contributed.clear()
        self.stage, self.released = Stage.RELEASED, self.released + 1
        self._follow_plan()

    def _settle(self) -> None:
        """Finishes a backward pass whose end nobody told of; gives up one that broke off."""
        if self.sums.capture.backward_broke_off:
            self.sums.forget_pass()
            self.void()
        while self.sums.pending:
            self.backward_ended()

    def _refuse_over_budget(self, count: int) -> None:
        reached = self.overspend(count)
        if reached is None:
            return
        if self.stage is Stage.CLIPPED:
            # Not charged: that this step is one too many is public, and nothing of its batch leaves.
            self.tickets, self.stage = [], Stage.VOID
            self.sums.discard()
        raise BudgetExceeded(
            f"Step {self.ledger.steps + count:,} would reach epsilon {round_up(reached, 4)}, above the target.",
            fix="Training ended. Raise target_epsilon deliberately, or report now.",
        )

    def _charge(self) -> None:
        count = len(self.tickets)
        if count > 1 and not self.plan.claims_passes:  # a pass costs the same, however many of its batches are joined
            notice(
                "DPE006",
                f"{count} sampled batches went into one step; both are accounted. "
                f"accumulation_steps={count} of dpengine.PrivacyEngine costs less privacy.",
            )
        self.ledger.charge(self.plan.event(count), count=count)
        self.joined = count
        self.stage = Stage.CHARGED

    def watch(self, sums: ClippedSums) -> None:
        """Takes sums from elsewhere. Those of a logical batch at hand are given up."""
        if not self.sums.buffer.clean:
            self.void()
        self.sums, sums.policy, sums.facts = sums, self.plan.clipping, self._facts

    def draw_from(self, source: NoiseSource) -> None:
        """Draws noise from another source, from the next release on."""
        self.source = source
        self.noise = mechanism_for(source, self.plan.noise)

    def _write_gradients(self, *, divides: bool = True) -> None:
        """Noise on the sums, then the division by public constants, then ``p.grad``, in the memory of the sums."""
        buffer, std, step = self.sums.buffer, self.plan.noise_std, self.tickets[-1].step
        mean = self.sums.loss_reduction == "mean"
        divisor = self.plan.divisor(len(self.tickets), mean=mean) if divides else 1.0
        topology, facts = self.sums.topology, ("release", *self._facts(), len(self.tickets), divisor)
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
        """What every rank must have alike at this moment."""
        ticket = self.tickets[-1] if self.tickets else None
        place = (None if ticket is None else ticket.step, self.chunk, len(self.tickets), self.released)
        return (*place, self.plan.noise_std, *self.plan.clipping.bounds, self.ledger.steps)

    # The end

    def upcoming(self) -> tuple[int, int]:
        """What the next logical batch leads to: batches charged apart from it, and those charged with it."""
        if self.stage is Stage.CLIPPED:
            return 0, max(len(self.tickets) + 1, self.joined)
        apart = len(self.tickets) if self.stage is Stage.OPEN else 0
        return apart + sum(chunk == 0 for _, chunk in self.fetched), self.joined

    def void(self) -> None:
        """Gives up the tickets at hand: destroys their sums and charges them."""
        try:
            if self.stage in {Stage.OPEN, Stage.CLIPPED}:
                self._charge_void(len(self.tickets))
        finally:
            self.tickets = []
            self.sums.discard_sums()
            self.stage = Stage.CLOSED if self.stage is Stage.CLOSED else Stage.VOID
            self._follow_plan()

    def _charge_void(self, tickets: int) -> None:
        if tickets:
            self.given_up += tickets
            self.ledger.charge(self.plan.event(), count=tickets, kind="void")

    def close(self) -> None:
        """Gives up what is unfinished and destroys the sums, for good, also where that cannot be charged."""
        try:
            if self.stage in {Stage.OPEN, Stage.CLIPPED}:
                self.void()
            self._charge_void(sum(chunk == 0 for _, chunk in self.fetched))
        finally:
            self.fetched.clear()
            self.sums.detach()
            forget_grad_samples(self.sums.model.parameters())
            self.gradients.forget()
            self.stage = Stage.CLOSED
