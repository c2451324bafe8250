"""Cyclic Poisson sampling of a run: scheme, privacy events and noise calibration."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

from dpengine.accounting.accountant import ACCOUNTANTS, epsilon_of
from dpengine.accounting.batch_events import TruncatedGaussianEvent
from dpengine.accounting.events import CyclicGaussianEvent, Event, NonPrivateEvent, Relation, release_event
from dpengine.accounting.ledger import Charge
from dpengine.accounting.library_events import to_dp_accounting
from dpengine.accounting.noise_calibration import calibration
from dpengine.accounting.own_accountant import Accountant
from dpengine.batch_selection.cyclic_poisson import CyclicPoissonSampling
from dpengine.batch_selection.truncation import cut_probability, suggest_cap
from dpengine.errors import InvalidBudgetError, notice
from dpengine.sampling.cyclic import Partition

from . import checks
from .claims import ONE_RUN, claimed_noise, example_relation
from .run_plan import accounted_sample_rate


@dataclasses.dataclass(frozen=True, kw_only=True)
class PoissonBatches:
    """Batches of a run whose noise has at most as many bands as the cycle has groups.

    Attributes:
        cycle_length: Number of groups.
        sampling_prob: Probability of each example of the group.
        iterations: Number of steps in the run.
        truncated_batch_size: Larger batches are truncated; None for no truncation.
        num_examples: Number of examples in the data set, if public.
    """

    cycle_length: int
    sampling_prob: float
    iterations: int
    truncated_batch_size: int | None
    num_examples: int | None

    @property
    def relation(self) -> Relation:
        """Neighboring relation of the guarantee."""
        return example_relation(self.num_examples)

    @property
    def accountants(self) -> tuple[str, ...]:
        """Supported accountants, the default first."""
        if self.truncated_batch_size is not None:
            return ("pld", "dp_accounting")
        return tuple(ACCOUNTANTS)

    @property
    def selection(self) -> CyclicPoissonSampling:
        """The sampling scheme."""
        return CyclicPoissonSampling(
            sampling_prob=self.sampling_prob,
            iterations=self.iterations,
            truncated_batch_size=self.truncated_batch_size,
            cycle_length=self.cycle_length,
            partition_type=Partition.INDEPENDENT if self.num_examples is None else Partition.EQUAL_SPLIT,
        )

    def claim(self, noise_multiplier: float, run: str) -> Event:
        """Returns the privacy event of each step for the engine's ledger."""
        if noise_multiplier == 0:
            return NonPrivateEvent()
        if self.truncated_batch_size is not None:
            return self._truncated_event(noise_multiplier, run)
        rate = accounted_sample_rate(self.sampling_prob)
        if self.cycle_length == 1:
            return release_event(noise_multiplier=noise_multiplier, sample_rate=rate)
        return CyclicGaussianEvent(rate, noise_multiplier, self.cycle_length, run)

    def _truncated_event(self, noise_multiplier: float, run: str) -> TruncatedGaussianEvent:
        assert self.num_examples is not None and self.truncated_batch_size is not None
        return TruncatedGaussianEvent(
            num_examples=max(1, self.num_examples // self.cycle_length),
            sample_rate=accounted_sample_rate(self.sampling_prob),
            largest_batch=self.truncated_batch_size,
            noise_multiplier=noise_multiplier,
            cycle_length=self.cycle_length,
            run=run if self.cycle_length > 1 else "",
        )

    def library_event(self, noise_multiplier: float) -> Any:
        """Returns the privacy event of the run, for the dp-accounting library."""
        return to_dp_accounting(self.claim(noise_multiplier, ONE_RUN), self.iterations)

    def epsilon(self, noise_multiplier: float, steps: int, delta: float, accountant: str | Accountant) -> float:
        """Returns epsilon of the first steps."""
        if self.truncated_batch_size is not None and noise_multiplier > 0:
            self._warn_about_truncation(delta)
        return epsilon_of((Charge(self.claim(noise_multiplier, ONE_RUN), steps),), delta, accountant, self.relation)

    def least_noise(self, target: float, delta: float, accountant: str | Accountant, tol: float) -> float:
        """Returns the smallest noise multiplier with which an accountant's epsilon meets the target."""
        if self.sampling_prob == 0:
            raise InvalidBudgetError(
                "sampling_prob=0 selects no examples, so there is no noise to calibrate.",
                fix="Pass a positive sampling_prob.",
            )
        if self.truncated_batch_size is not None:
            self._warn_about_truncation(delta)
        if self.truncated_batch_size is not None or not isinstance(accountant, str):
            return claimed_noise(self, self.iterations, target, delta, accountant, tol)
        return calibration(
            target_epsilon=target,
            target_delta=delta,
            sample_rate=accounted_sample_rate(self.sampling_prob),
            steps=self._cycles(self.iterations),
            accountant=accountant,
            relation=self.relation,
            tol=tol,
        ).noise_multiplier

    def _warn_about_truncation(self, delta: float) -> None:
        """Warns if truncation is so frequent that it costs privacy."""
        assert self.num_examples is not None and self.truncated_batch_size is not None
        group, rounds = max(1, self.num_examples // self.cycle_length), self._cycles(self.iterations)
        free = suggest_cap(group, self.sampling_prob, rounds=rounds, delta=delta)
        if self.truncated_batch_size < free:
            probability = cut_probability(group, self.sampling_prob, self.truncated_batch_size)
            notice(
                "DPE012",
                f"truncated_batch_size={self.truncated_batch_size} truncates a batch with probability "
                f"{probability:.2g}, which costs privacy in each of {rounds:,} rounds. From {free} on the cost is "
                "negligible.",
                key=f"cut {self}",
            )

    def _cycles(self, steps: int) -> int:
        return -(-steps // self.cycle_length)


def checked_truncation(owner: str, size: Any, num_examples: int | None) -> int | None:
    """Returns the checked maximum batch size; None for no truncation. Its cost needs the number of examples."""
    if size is None:
        return None
    if num_examples is None:
        raise ValueError(
            f"{owner}: truncated_batch_size={size!r} needs num_examples, because the truncation probability depends on "
            "it. Pass num_examples if that is public."
        )
    return checks.integer(owner, "truncated_batch_size", size, at_least=0)


def participation(owner: str, probability: Any, expected: Any, cycles: float) -> dict[str, float]:
    """Returns sampling probability and expected participations, given one of them; if none, for each cycle."""
    if probability is None and expected is None:
        probability = 1.0
    if probability is None:
        participations = checks.number(owner, "expected_participations", expected)
        if participations > cycles * (1 + 1e-12):
            raise ValueError(
                f"{owner}: expected_participations={participations:g} is more than the {cycles:g} cycles of the run."
            )
        return {"sampling_prob": min(1.0, participations / cycles), "expected_participations": participations}
    rate = checks.probability(owner, "sampling_prob", probability)
    if expected is None:
        return {"sampling_prob": rate, "expected_participations": rate * cycles}
    participations = checks.number(owner, "expected_participations", expected)
    if not math.isclose(participations, rate * cycles, rel_tol=1e-9, abs_tol=1e-12):
        raise ValueError(
            f"{owner}: sampling_prob={rate!r} means {rate * cycles:g} participations, but "
            f"expected_participations={participations!r}. Pass one of them, and None for the other."
        )
    return {"sampling_prob": rate, "expected_participations": participations}


def not_none(probability: float | None) -> float:
    """Returns a field that the config has set."""
    assert probability is not None
    return probability
