"""Sampling scheme and argument checks of configs with Poisson batches, and a warning about frequent truncation."""

from __future__ import annotations

import math
from typing import Any

from dpengine.accounting.run_events import TruncatedParticipation
from dpengine.errors import notice
from dpengine.sampling.cyclic import CyclicPoissonSampling, Partition
from dpengine.sampling.truncation import cut_probability, suggest_cap

from . import checks


def cyclic_sampling(
    num_examples: int | None, iterations: int, *, rate: float | None, groups: int, largest: int | None = None
) -> CyclicPoissonSampling:
    """Returns cyclic Poisson sampling; groups are independent if the number of examples is not public."""
    assert rate is not None  # the config has set it
    return CyclicPoissonSampling(
        sampling_prob=rate,
        iterations=iterations,
        truncated_batch_size=largest,
        cycle_length=groups,
        partition_type=Partition.INDEPENDENT if num_examples is None else Partition.EQUAL_SPLIT,
    )


def warn_about_truncation(
    participation: TruncatedParticipation, num_examples: int, iterations: int, delta: float
) -> None:
    """Warns if truncation is so frequent that it increases the privacy cost."""
    size, rate, groups = (
        participation.largest_batch,
        participation.drawn.sample_rate,
        participation.drawn.cycle_length,
    )
    group_size, rounds = max(1, num_examples // groups), -(-iterations // groups)
    suggested = suggest_cap(group_size, rate, rounds=rounds, delta=delta)
    if size < suggested:
        notice(
            "DPE012",
            f"truncated_batch_size={size} truncates a batch with probability "
            f"{cut_probability(group_size, rate, size):.2g}, which costs privacy in each of {rounds:,} rounds. The "
            f"cost is negligible from {suggested} on.",
            key=f"cut {participation} {iterations}",
        )


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


def checked_participation(owner: str, probability: Any, expected: Any, cycles: float) -> dict[str, float]:
    """Returns the sampling probability and the expected participations, computing one from the other.

    If neither is given, every example participates in each cycle.
    """
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
