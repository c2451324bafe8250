"""Parts that ``make_private`` builds around a model and removes again, and the budget of the run."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from dpengine.accounting.accountant import epsilon_of
from dpengine.accounting.events import Event
from dpengine.accounting.ledger import Charge
from dpengine.accounting.rounding import round_up
from dpengine.errors import BatchDependentLossError, BatchMismatchError, UnsupportedLayerError, notice
from dpengine.kernels.memory import keep_freed_memory
from dpengine.ledger_file.run_ledger import RunLedger
from dpengine.report.facts import RunFacts
from dpengine.sampling.cyclic import PARTITION_STEP
from dpengine.sampling.loader import private_loader
from dpengine.sampling.units import UnitIds, UnitStrategy

from . import amp_and_lr_schedulers as companions
from . import optimizer as private_optimizer
from .argument_checks import attached_models
from .release import Release
from .shared_dataset_check import notice_other_engine

if TYPE_CHECKING:
    from .compiled_backward import CompiledBackward


@dataclass(eq=False)
class Budget:
    """What a run may spend.

    Attributes:
        target_epsilon: None if the noise was given instead.
        delta: The delta at which the target holds.
        planned_steps: Logical batches for which the noise was found.
        on_budget: ``"stop"``, ``"raise"`` or ``"warn"``.
        accountant: The accountant that decides.
        fits_plan: Whether the noise was found for the planned steps, so that they are known to fit.
    """

    target_epsilon: float | None
    delta: float
    planned_steps: int | None
    on_budget: str
    accountant: str
    fits_plan: bool = True
    # How many charges of an event fit beside a history, as far as is known: an evaluation may cost a second.
    _fits: dict[tuple[Event, tuple[Charge, ...]], int] = field(default_factory=dict)

    def may_draw(self, release: Release) -> bool:
        """Whether the loader may hand out one more logical batch."""
        apart, together = release.batches.upcoming()
        return self.on_budget != "stop" or self._reached(release, together, apart) is None

    def overspend(self, release: Release, count: int) -> float | None:
        """Epsilon after ``count`` more charges, for one release, if that is above the target and not allowed."""
        reached = self._reached(release, count, 0)
        if reached is not None and self.on_budget == "warn":
            notice("DPE011", f"The next step reaches epsilon={round_up(reached, 4)} > {self.target_epsilon:g}.")
            return None
        return reached

    def room(self, release: Release, event: Event, count: int) -> int:
        """How many charges of an event may be reserved, ``count`` of which are due now; no more than fit."""
        ahead = release.plan.steps_after(release.batches.last_step, self.planned_steps)
        if self.target_epsilon is not None and release.plan.noise_multiplier > 0:
            history = release.ledger.totals
            beside = tuple(charge for charge in history if charge.event != event)
            charged = sum(charge.count for charge in history if charge.event == event)
            ahead = min(ahead, self._fits.get((event, beside), 0) - charged - count)
        return count + max(0, ahead)

    def _reached(self, release: Release, count: int, apart: int) -> float | None:
        if self.target_epsilon is None or release.plan.noise_multiplier == 0:
            return None
        event, history = release.plan.event(count), release.ledger.totals
        history += (Charge(release.plan.event(), apart),) if apart else ()
        beside = tuple(charge for charge in history if charge.event != event)
        needed = count + sum(charge.count for charge in history if charge.event == event)
        known = self.fits_plan and not release.changed and not beside and event == release.plan.event()
        planned = self.planned_steps if known else None
        fits = self._fits.get((event, beside), planned or 0)

        def epsilon(number: int) -> float:
            charges = (*beside, Charge(event, number))
            return epsilon_of(charges, self.delta, accountant=self.accountant, relation=release.plan.relation)

        if needed > fits:
            reached = epsilon(needed)
            if reached > self.target_epsilon:
                return reached
            fits = _look_ahead(epsilon, self.target_epsilon, needed)
        self._fits = {(event, beside): fits}
        return None


def _look_ahead(epsilon: Callable[[int], float], target: float, fits: int) -> int:
    """A number of charges that fits, found by halving: the largest, or an eighth more than is known to fit."""
    low, high = fits, fits + max(8, fits // 8)
    if epsilon(high) <= target:
        return high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if epsilon(middle) <= target else (low, middle)
    return low


@dataclass(eq=False)
class Run:
    """A model, its optimizer and what makes them private."""

    model: nn.Module
    optimizer: Optimizer
    release: Release
    budget: Budget
    grad_scaler: Any = None
    lr_scheduler: Any = None
    units: UnitIds | None = None  # of each example, where a unit of privacy has several
    unit: str = RunFacts.unit  # what a unit is called
    attached: bool = False
    first_life: int | None = None  # of the source, where it is another now: who is in which group was drawn in it
    batches: Any = None  # the private loader
    known: Callable[[], Iterable[Charge]] = tuple  # what the account of this run holds besides its ledger
    resumed: bool = False  # whether it goes on with a run that was saved

    def __post_init__(self) -> None:
        """Lets the release ask the budget, and hear of backward passes."""
        self.release.overspend = self._overspend
        self.release.sums.on_backward_end = self.release.backward_ended
        if isinstance(self.release.ledger, RunLedger):
            self.release.ledger.room = lambda event, count: self.budget.room(self.release, event, count)

    def _overspend(self, count: int) -> float | None:
        if self.batches is not None:
            charged = self.release.ledger
            notice_other_engine(
                self.batches.dataset, charged.ledger if isinstance(charged, RunLedger) else charged, self.known
            )
        return self.budget.overspend(self.release, count)

    def attach(self) -> None:
        """Puts everything on, or nothing: what raises in between is undone first."""
        with contextlib.ExitStack() as undo:
            private_optimizer.attach(self.optimizer, self.release)
            undo.callback(private_optimizer.detach, self.optimizer)
            undo.callback(self.release.sums.detach)  # before it begins, since it may stop between two hooks
            self.release.sums.attach()
            if self.grad_scaler is not None:
                companions.attach_scaler(self.grad_scaler)
                undo.callback(companions.detach, self.grad_scaler)
            if self.lr_scheduler is not None:
                companions.attach_scheduler(self.lr_scheduler)
                undo.callback(companions.detach, self.lr_scheduler)
            attached_models.add(self.model)
            undo.pop_all()  # all is well: nothing is undone
        self.attached = True
        if any(parameter.device.type == "cpu" for parameter in self.model.parameters()):
            keep_freed_memory()

    def loader(
        self,
        data_loader: DataLoader[Any],
        physical_batch_size: int | None,
        accumulation_steps: int,
        batch_first: bool,
        example_input: Any,
    ) -> DataLoader[Any]:
        """The private loader of this run, which tells its release what is handed out."""
        strategy = self.release.plan.sampling
        loader = private_loader(
            data_loader,
            strategy=strategy if self.units is None else UnitStrategy(strategy, self.units),
            words=self._mask_words,
            physical_batch_size=physical_batch_size,
            accumulation_steps=accumulation_steps,
            batch_first=batch_first,
            on_handout=self.release.handed_out,
            may_draw=self._may_draw,
            example_input=example_input,
            share=(self.release.sums.topology.rank, self.release.sums.topology.ranks),
        )
        self.batches = loader
        return loader

    def _mask_words(self, count: int, *, step: int, block: int) -> Any:
        """The words that batches are drawn with."""
        # A request is less than 2**32 of the source's blocks long, so the next one of the step does not repeat it.
        life = self.first_life if step >= PARTITION_STEP else None
        return self.release.source.words(count, domain="mask", step=step, block=block << 32, incarnation=life)

    def _may_draw(self, step: int) -> bool:
        return self.release.plan.has_step(step) and self.budget.may_draw(self.release)

    def describe(self) -> dict[str, Any]:
        """The plan as plain data, and how many steps were charged of how many planned."""
        steps = {"steps": self.release.ledger.steps, "planned_steps": self.budget.planned_steps}
        return self.release.plan.describe() | steps

    def backward(self, loss_B: Tensor) -> None:
        """The backward pass of a loss with one number for each row."""
        if loss_B.dim() != 1:
            raise BatchDependentLossError(
                f"loss_per_example has shape {tuple(loss_B.shape)}; one number for each row is needed: a loss "
                "that is reduced already may mix rows.",
                fix='Compute it with reduction="none", and reduce every axis but the first.',
            )
        batches = self.release.batches
        if batches.batches and loss_B.shape[0] != batches.samples:
            raise BatchMismatchError(
                f"loss_per_example has {loss_B.shape[0]} numbers for the {batches.samples} rows of this batch.",
                fix="Reduce every axis but the first, which is the batch.",
            )
        mean = self.release.sums.loss_reduction == "mean"
        loss = loss_B.sum() / (max(len(loss_B), 1) if mean else 1)
        (loss if self.grad_scaler is None else self.grad_scaler.scale(loss)).backward()

    def compile_backward(
        self, loss_fn: Callable[..., Tensor], multiple_of: int | None, backend: Any
    ) -> CompiledBackward:
        """What takes the place of ``loss.backward()``, compiled as a whole."""
        sums = self.release.sums
        for wrong, name, wanted in (
            (sums.mode != "auto", "grad_sample_mode", "'auto'"),
            (not sums.capture.batch_first, "batch_first", "True"),
            (self.units is not None, "privacy_unit", "None"),
            (self.grad_scaler is not None, "grad_scaler", "None: use bfloat16, or no autocast"),
        ):
            if wrong:
                raise UnsupportedLayerError(f"A compiled pass needs {name}={wanted}.", fix="Pass that to make_private.")
        if not sums.topology.runs_by_itself:
            raise UnsupportedLayerError(
                "A compiled pass needs all of the model in one process.", fix="Call loss.backward() instead."
            )
        if multiple_of is None:
            multiple_of = max(1, round(math.sqrt(self.release.plan.sampling.expected_batch_size)))
        if isinstance(multiple_of, bool) or not isinstance(multiple_of, int) or multiple_of < 1:
            raise ValueError(f"multiple_of={multiple_of!r}; expected a whole number of at least 1.")
        if not callable(loss_fn):
            raise TypeError(f"loss_fn is {torch.typename(loss_fn)}; pass a function of a batch that gives its loss.")
        from .compiled_backward import CompiledBackward  # brings the compiler, which takes a second

        return CompiledBackward(sums, loss_fn, multiple_of=multiple_of, backend=backend)

    def detach(self) -> None:
        """Takes everything off, also where the ledger file cannot be written."""
        try:
            self.release.close()
            if isinstance(self.release.ledger, RunLedger):
                self.release.ledger.close()
        finally:
            private_optimizer.detach(self.optimizer)
            for companion in (self.grad_scaler, self.lr_scheduler):
                if companion is not None:
                    companions.detach(companion)
            attached_models.discard(self.model)
            self.attached = False
