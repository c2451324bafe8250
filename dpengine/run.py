"""One run: what ``make_private`` builds around a model, and takes off again."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torch import nn
from torch.optim import Optimizer

from dpengine import companions
from dpengine import optimizer as private_optimizer
from dpengine.accounting import Ledger, epsilon
from dpengine.admission import attached_models
from dpengine.errors import notice
from dpengine.layers import from_twin, to_twin
from dpengine.release import Release


@dataclass(frozen=True)
class Budget:
    """What a run may spend.

    Attributes:
        target_epsilon: None if the noise was given instead.
        delta: The delta at which the target holds.
        planned_steps: Logical batches for which the noise was found.
        on_budget: ``"stop"``, ``"raise"`` or ``"warn"``.
        accountant: The accountant that decides.
    """

    target_epsilon: float | None
    delta: float
    planned_steps: int | None
    on_budget: str
    accountant: str

    def allows(self, release: Release, count: int) -> bool:
        """Whether so many more charges stay within the target."""
        plan = release.plan
        if self.target_epsilon is None or self.planned_steps is None or plan.noise_multiplier == 0:
            return True
        if release.charged + count <= self.planned_steps:
            return True
        trial = Ledger()
        trial.load_state_dict(release.ledger.state_dict())
        trial.charge(plan.event(), count=count)
        after = epsilon(trial.history, self.delta, accountant=self.accountant, relation=plan.relation)
        if after <= self.target_epsilon:
            return True
        if self.on_budget == "warn":
            notice("DPE011", f"The next step reaches epsilon={after:.3g} > {self.target_epsilon:g}.")
        return self.on_budget == "warn"


@dataclass(eq=False)
class Run:
    """A model, its optimizer and what makes them private."""

    model: nn.Module
    optimizer: Optimizer
    release: Release
    budget: Budget
    grad_scaler: Any = None
    lr_scheduler: Any = None
    attached: bool = False
    twins: list[nn.Module] = field(default_factory=list)

    def attach(self) -> None:
        """Puts everything on. The model's layers must be twins already where they have one."""
        private_optimizer.attach(self.optimizer, self.release)
        self.release.sums.attach()
        if self.grad_scaler is not None:
            self.release.loss_scale = lambda: float(self.grad_scaler.get_scale())
            companions.attach_scaler(self.grad_scaler)
        if self.lr_scheduler is not None:
            companions.attach_scheduler(self.lr_scheduler, self.optimizer)
        attached_models.add(self.model)
        self.attached = True

    def detach(self) -> None:
        """Takes everything off."""
        self.release.close()
        private_optimizer.detach(self.optimizer)
        for layer in self.twins:
            from_twin(layer)
        if self.grad_scaler is not None:
            companions.detach_scaler(self.grad_scaler)
        if self.lr_scheduler is not None:
            companions.detach_scheduler(self.lr_scheduler)
        attached_models.discard(self.model)
        self.attached = False


def make_twins(model: nn.Module) -> list[nn.Module]:
    """Turns layers that have a private twin into it, in place, and gives those that were turned."""
    return [layer for layer in model.modules() if to_twin(layer) is not None]
