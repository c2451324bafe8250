"""Privacy budget of a run: decides whether further charges fit a target epsilon."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from dpengine.accounting.accountant import epsilon_of
from dpengine.accounting.custom_accountant import Accountant
from dpengine.accounting.events import Event
from dpengine.accounting.ledger import Charge, Ledger
from dpengine.accounting.rounding import round_up
from dpengine.errors import notice
from dpengine.ledger_file.run_ledger import RunLedger
from dpengine.plan.run_plan import RunPlan

Charges = Ledger | RunLedger


@dataclass(eq=False)
class Budget:
    """Privacy budget of a run.

    Attributes:
        target_epsilon: Maximum epsilon; None for no limit.
        delta: The delta of the target epsilon.
        planned_steps: Number of logical batches for which the noise was calibrated.
        on_budget: Action when the next step would exceed the target: ``"stop"``, ``"raise"`` or ``"warn"``.
        accountant: The accountant that computes epsilon.
        fits_plan: True if the noise was calibrated for the planned steps. These steps then fit the budget, and epsilon
            is not computed for them.
    """

    target_epsilon: float | None = None
    delta: float = 0.0
    planned_steps: int | None = None
    on_budget: str = "warn"
    accountant: str | Accountant = "pld"
    fits_plan: bool = True
    # Cache, because computing epsilon can take a second: number of charges of an event that are known to fit, by event
    # and charges of other events.
    _fits: dict[tuple[Event, tuple[Charge, ...]], int] = field(default_factory=dict)

    def may_draw(self, plan: RunPlan, ledger: Charges, separate: int, together: int) -> bool:
        """Returns True if the loader may return one more logical batch. See `BatchState.upcoming` for the counts."""
        return self.on_budget != "stop" or self._exceeding_epsilon(plan, ledger, together, separate) is None

    def exceeding_epsilon(self, plan: RunPlan, ledger: Charges, count: int) -> float | None:
        """Returns epsilon after a step with ``count`` charges if it exceeds the target, else None.

        With ``on_budget="warn"``, warns and returns None.
        """
        epsilon = self._exceeding_epsilon(plan, ledger, count, 0)
        if epsilon is not None and self.on_budget == "warn":
            notice(
                "DPE011",
                f"The next step reaches epsilon={round_up(epsilon, 4)} > {self.target_epsilon:g}. Stop training, or "
                "raise target_epsilon.",
                of=self,
            )
            return None
        return epsilon

    def max_reserved(self, plan: RunPlan, ledger: Charges, last_step: int, count: int) -> int:
        """Returns the maximum number of charges to reserve: ``count`` plus planned charges that are known to fit."""
        reservable = plan.steps_after(last_step, self.planned_steps)
        if self.target_epsilon is not None and plan.noise_multiplier > 0:
            event, history = plan.event(count), ledger.totals
            others = tuple(charge for charge in history if charge.event != event)
            charged = sum(charge.count for charge in history if charge.event == event)
            reservable = min(reservable, self._fits.get((event, others), 0) - charged - count)
        return count + max(0, reservable)

    def _exceeding_epsilon(self, plan: RunPlan, ledger: Charges, count: int, separate: int) -> float | None:
        """Returns epsilon after further charges if it exceeds the target; else None."""
        if self.target_epsilon is None or plan.noise_multiplier == 0:
            return None
        event, history = plan.event(count), ledger.totals
        history += (Charge(plan.event(), separate),) if separate else ()
        others = tuple(charge for charge in history if charge.event != event)
        needed = count + sum(charge.count for charge in history if charge.event == event)
        calibrated = self.fits_plan and not others and event == plan.event()
        planned = self.planned_steps if calibrated else None
        fits = self._fits.get((event, others), planned or 0)

        def epsilon_after(number: int) -> float:
            charges = (*others, Charge(event, number))
            return epsilon_of(charges, self.delta, accountant=self.accountant, relation=plan.relation)

        if needed > fits:
            epsilon = epsilon_after(needed)
            if epsilon > self.target_epsilon:
                return epsilon
            fits = _largest_fitting(epsilon_after, self.target_epsilon, needed)
        self._fits = {(event, others): fits}
        return None


def _largest_fitting(epsilon: Callable[[int], float], target: float, fits: int) -> int:
    """Searches by bisection for the largest number of charges within the target.

    The result is at most ``max(8, fits // 8)`` above ``fits``, which are known to fit.
    """
    low, high = fits, fits + max(8, fits // 8)
    if epsilon(high) <= target:
        return high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if epsilon(middle) <= target else (low, middle)
    return low
