"""What runs with cyclic Poisson batches share: their law, what it may claim, and the noise that a target needs."""

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
from .claims import claimed_noise, example_relation
from .run_plan import accounted_sample_rate


@dataclasses.dataclass(frozen=True, kw_only=True)
class PoissonBatches:
    """Batches of a run whose noise has no more bands than the cycle has groups.

    Attributes:
        cycle_length: Groups.
        sampling_prob: The probability of each example of the group.
        iterations: Steps of the run.
        truncated_batch_size: Larger batches are cut; None for no cut.
        num_examples: The size of the data set, where that is public.
    """

    cycle_length: int
    sampling_prob: float
    iterations: int
    truncated_batch_size: int | None
    num_examples: int | None

    @property
    def relation(self) -> Relation:
        """Which data sets are neighbours."""
        return example_relation(self.num_examples)

    @property
    def accountants(self) -> tuple[str, ...]:
        """Those that can judge such batches, the usual one first."""
        if self.truncated_batch_size is not None:
            return ("pld", "dp_accounting")
        return tuple(ACCOUNTANTS)

    @property
    def selection(self) -> CyclicPoissonSampling:
        """The law."""
        return CyclicPoissonSampling(
            sampling_prob=self.sampling_prob,
            iterations=self.iterations,
            truncated_batch_size=self.truncated_batch_size,
            cycle_length=self.cycle_length,
            partition_type=Partition.INDEPENDENT if self.num_examples is None else Partition.EQUAL_SPLIT,
        )

    def claim(self, noise_multiplier: float, run: str) -> Event:
        """What each step costs, in the engine's own terms."""
        if noise_multiplier == 0:
            return NonPrivateEvent()
        if self.truncated_batch_size is not None:
            return self._cut_claim(noise_multiplier, run)
        rate = accounted_sample_rate(self.sampling_prob)
        if self.cycle_length == 1:
            return release_event(noise_multiplier=noise_multiplier, sample_rate=rate)
        return CyclicGaussianEvent(rate, noise_multiplier, self.cycle_length, run)

    def _cut_claim(self, noise_multiplier: float, run: str) -> TruncatedGaussianEvent:
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
        """What the whole run releases, as an event of the dp-accounting library."""
        return to_dp_accounting(self.claim(noise_multiplier, ""), self.iterations)

    def epsilon(self, noise_multiplier: float, steps: int, delta: float, accountant: str | Accountant) -> float:
        """Epsilon of the first steps."""
        if self.truncated_batch_size is not None and noise_multiplier > 0:
            self._warn_of_cut(delta)
        return epsilon_of((Charge(self.claim(noise_multiplier, ""), steps),), delta, accountant, self.relation)

    def least_noise(self, target: float, delta: float, accountant: str | Accountant, tol: float) -> float:
        """The least noise at which the accountant finds a target kept."""
        if self.sampling_prob == 0:
            raise InvalidBudgetError(
                "sampling_prob=0 draws nobody: there is nothing to calibrate.", fix="Pass sampling_prob above 0."
            )
        if self.truncated_batch_size is not None:
            self._warn_of_cut(delta)
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

    def _warn_of_cut(self, delta: float) -> None:
        """Notices a cut that is steep: one that happens often beside delta."""
        assert self.num_examples is not None and self.truncated_batch_size is not None
        group, rounds = max(1, self.num_examples // self.cycle_length), self._cycles(self.iterations)
        enough = suggest_cap(group, self.sampling_prob, rounds=rounds, delta=delta)
        if self.truncated_batch_size < enough:
            often = cut_probability(group, self.sampling_prob, self.truncated_batch_size)
            notice(
                "DPE012",
                f"truncated_batch_size={self.truncated_batch_size} cuts a batch with probability {often:.2g}, which "
                f"costs privacy in each of {rounds:,} rounds. From {enough} on it costs nothing.",
                key="cut",
            )

    def _cycles(self, steps: int) -> int:
        return -(-steps // self.cycle_length)


def checked_cut(owner: str, size: Any, num_examples: int | None) -> int | None:
    """A size that no batch exceeds, or None. It follows from the number of examples what a cut does to privacy."""
    if size is None:
        return None
    if num_examples is None:
        raise ValueError(
            f"{owner}: truncated_batch_size={size!r} needs num_examples, since how often batches are cut hangs on it. "
            "Pass num_examples if that is public."
        )
    return checks.whole(owner, "truncated_batch_size", size, at_least=0)


def participation(owner: str, probability: Any, expected: Any, cycles: float) -> dict[str, float]:
    """Both ways to say how often an example takes part, from one of them; from neither, in every cycle."""
    if probability is None and expected is None:
        probability = 1.0
    if probability is None:
        wanted = checks.number(owner, "expected_participations", expected)
        if wanted > cycles * (1 + 1e-12):
            raise ValueError(
                f"{owner}: expected_participations={wanted:g} is more than the {cycles:g} cycles of the run."
            )
        return {"sampling_prob": min(1.0, wanted / cycles), "expected_participations": wanted}
    chance = checks.probability(owner, "sampling_prob", probability)
    if expected is None:
        return {"sampling_prob": chance, "expected_participations": chance * cycles}
    wanted = checks.number(owner, "expected_participations", expected)
    if not math.isclose(wanted, chance * cycles, rel_tol=1e-9, abs_tol=1e-12):
        raise ValueError(
            f"{owner}: sampling_prob={chance!r} means {chance * cycles:g} participations, and "
            f"expected_participations={wanted!r} was given. Pass one of them, the other as None."
        )
    return {"sampling_prob": chance, "expected_participations": wanted}


def known(probability: float | None) -> float:
    """A field that the config has filled in."""
    assert probability is not None
    return probability
