"""Checks custom sampling schemes: compares trial batches with the declared participation of examples."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from dpengine.accounting.run_events import (
    EpochParticipation,
    FixedSizeParticipation,
    Participation,
    PoissonParticipation,
    SeparatedParticipation,
    TruncatedParticipation,
    UnknownParticipation,
)
from dpengine.errors import ExtensionError

from .poisson import checked_batch_size
from .scheme import (
    Draws,
    IndexBatch,
    KeyedWords,
    SamplingScheme,
    WordStream,
    checked_integer,
    checked_scheme,
)

CUSTOM_PREFIX = "own: "
"""Prefix of the name of a custom sampling scheme."""

_TRIAL_EXAMPLES, _TRIAL_STEPS = 240, 120
_DEVIATIONS = 7.0  # limit in standard deviations, which a correct scheme exceeds once in 10**11 trials


@dataclasses.dataclass(frozen=True)
class CustomScheme(SamplingScheme):
    """Custom sampling scheme. On construction, trial batches are compared with the declared participation.

    Args:
        scheme: Object with ``over``, ``participation``, ``expected_batch_size`` and ``steps_per_epoch``.

    Raises:
        TypeError: If a member is missing.
        ExtensionError: If trial batches contradict the declared participation.
    """

    scheme: Any

    accounting: ClassVar[str] = "by the declared participation pattern"

    def __post_init__(self) -> None:
        check_draws(checked_scheme("sampling", self.scheme))

    @property
    def name(self) -> str:  # type: ignore[override]
        """Name of the scheme."""
        return CUSTOM_PREFIX + type(self.scheme).__name__

    @property
    def iterations(self) -> int | None:  # type: ignore[override]
        """Number of batches in the run, if the scheme states it."""
        return getattr(self.scheme, "iterations", None)

    def over(self, num_examples: int) -> Draws:
        """See `SamplingScheme.over`."""
        name = type(self.scheme).__name__
        size = checked_batch_size(name, self.expected_batch_size(num_examples))
        steps = checked_integer(name, "steps_per_epoch", self.scheme.steps_per_epoch(num_examples), at_least=1)
        rate = min(1.0, size / max(num_examples, 1))
        draws = self.scheme.over(num_examples)
        return CustomDraws(num_examples, rate, size, steps, name, _stated(self.scheme, draws), draws)

    def participation(self) -> Participation:
        """See `SamplingScheme.participation`."""
        return self.scheme.participation()  # type: ignore[no-any-return]

    def expected_batch_size(self, num_examples: int) -> float:
        """See `SamplingScheme.expected_batch_size`."""
        return float(self.scheme.expected_batch_size(num_examples))


@dataclasses.dataclass(frozen=True)
class CustomDraws(Draws):
    """Batches of a custom sampling scheme.

    Attributes:
        class_name: Name of the class of the scheme.
        stated: Participation that the scheme states.
        draws: Sampler returned by ``scheme.over``.
    """

    num_examples: int
    sample_rate: float
    expected_batch_size: float
    steps_per_epoch: int
    class_name: str
    stated: Participation
    draws: Any = dataclasses.field(repr=False, compare=False)

    @property
    def name(self) -> str:  # type: ignore[override]
        """Name of the scheme."""
        return CUSTOM_PREFIX + self.class_name

    @property
    def participation(self) -> Participation:
        """See `Draws.participation`."""
        return self.stated

    def draw(self, step: int, words: WordStream) -> IndexBatch:
        """Returns the examples of one logical batch, sorted. See `Draws.draw`."""
        return checked_batch(self.class_name, self.draws.draw(step, words), self.num_examples)


def checked_batch(owner: str, batch: Any, num_examples: int) -> IndexBatch:
    """Returns the examples of a batch, sorted. Raises ExtensionError if they are repeated or out of range."""
    indices = np.sort(np.asarray(batch).reshape(-1))
    distinct = not len(indices) or (indices.dtype.kind in "iu" and bool((np.diff(indices) > 0).all()))
    if not distinct or (len(indices) and not (indices[0] >= 0 and indices[-1] < num_examples)):
        raise ExtensionError(
            f"{owner}.over(...).draw() did not return distinct indices of the {num_examples:,} examples.",
            fix="Return an integer array in which no example occurs twice.",
        )
    return indices.astype(np.int64)


def _stated(scheme: Any, draws: Any) -> Participation:
    """Returns the participation that ``draws`` declares, or else that of ``scheme``."""
    stated = (draws if callable(getattr(draws, "participation", None)) else scheme).participation()
    if type(stated) not in _PARTICIPATION_CHECKS:
        types = ", ".join(kind.__name__ for kind in _PARTICIPATION_CHECKS)
        raise ExtensionError(f"{type(scheme).__name__}.participation() is {stated!r}.", fix=f"Return one of {types}.")
    return stated  # type: ignore[no-any-return]


def check_draws(scheme: Any) -> None:
    """Draws trial batches. Raises ExtensionError if they contradict the participation that a scheme declares.

    The trial has 240 examples, or twice the batch size if that is fixed and larger. It detects sampling rates and batch
    sizes that differ from the declared ones, participations that are too close, and batches that do not depend on the
    random words. It cannot detect a scheme that behaves differently for other data sets, or depends on the data.
    """
    name, participation = type(scheme).__name__, _stated(scheme, None)
    examples = max(_TRIAL_EXAMPLES, 2 * getattr(participation, "batch_size", 0))
    draws, words = scheme.over(examples), KeyedWords((1, 2))
    participation = _stated(scheme, draws)
    limit = getattr(scheme, "iterations", None)
    steps = _TRIAL_STEPS if limit is None else min(_TRIAL_STEPS, limit)
    batches, repeated, others = (
        [checked_batch(name, draws.draw(step, stream), examples) for step in range(steps)]
        for stream in (words, words, KeyedWords((3, 4)))
    )
    if not all(map(np.array_equal, batches, repeated)):
        raise ExtensionError(
            f"{name}.over(...).draw(step, words) returned two different batches for the same step and words.",
            fix="Take all randomness from words(count, step=step, block=0), and keep no state between calls.",
        )
    if _is_secret(participation) and any(map(len, batches)) and all(map(np.array_equal, batches, others)):
        raise ExtensionError(
            f"{name}.over(...).draw(step, words) returned the same batches for other words, so they are not secret.",
            fix="Take all randomness from words(count, step=step, block=0).",
        )
    drawn_TN = np.zeros((steps, examples), dtype=bool)
    for step, batch in enumerate(batches):
        drawn_TN[step, batch] = True
    fault = _PARTICIPATION_CHECKS[type(participation)](participation, drawn_TN)
    if fault:
        raise ExtensionError(
            f"{name} states {participation}, but in a trial of {steps} batches of {examples} examples {fault}.",
            fix="Correct draw() or participation(): the noise is calibrated to what participation() states.",
        )


Drawn = npt.NDArray[np.bool_]


def _is_secret(participation: Participation) -> bool:
    """Returns True if the privacy analysis requires batches that cannot be predicted."""
    kinds = (PoissonParticipation, TruncatedParticipation, FixedSizeParticipation)
    drawn = getattr(participation, "drawn", participation)
    return type(participation) in kinds and getattr(drawn, "sample_rate", 0.0) != 1


def _check_poisson(stated: PoissonParticipation, drawn_TN: Drawn, *, truncated: bool = False) -> str:
    cycle, rate = stated.cycle_length, stated.sample_rate
    groups_TN = np.arange(len(drawn_TN))[:, None] % cycle
    if cycle > 1 and any(len(set(groups_TN[column, 0])) > 1 for column in drawn_TN.T):
        return f"an example is in batches that are not {cycle} steps apart"
    if stated.equal_groups:
        examples = drawn_TN.shape[1] // cycle
        group_sizes = [int(drawn_TN[group::cycle].any(axis=0).sum()) for group in range(cycle)]
        if max(group_sizes) > examples:
            return f"a group has {max(group_sizes)} examples, more than an equal share of {examples}"
    trials = drawn_TN.size / cycle
    excess = int(drawn_TN.sum()) - trials * rate
    # If the number of groups does not divide the number of examples or steps, the number of trials changes by at most
    # one row and one column.
    limit = _DEVIATIONS * math.sqrt(max(trials * rate * (1 - rate), 1.0)) + (sum(drawn_TN.shape) if cycle > 1 else 0)
    if excess > limit or (excess < -limit and not truncated):
        return f"{int(drawn_TN.sum()):,} examples were drawn instead of {trials * rate:,.0f}"
    fault = _check_counts(drawn_TN, rate, cycle)
    if fault or truncated:
        return fault
    sizes, variance = drawn_TN.sum(axis=1), drawn_TN.shape[1] / cycle * rate * (1 - rate)
    if len(sizes) >= 32 and variance > 1 and np.var(sizes) < variance / 4:
        return f"the batch sizes have a variance of {np.var(sizes):.2g} instead of {variance:.2g}"
    return ""


def _check_counts(drawn_TN: Drawn, rate: float, cycle: int = 1) -> str:
    """Returns a message if an example is drawn much more often than the rate implies; else an empty string."""
    mean = math.ceil(len(drawn_TN) / cycle) * rate
    largest = int(drawn_TN.sum(axis=0).max(initial=0))
    exceeds = largest > mean + _DEVIATIONS * (math.sqrt(mean * (1 - rate)) + 1)
    return f"an example is in {largest} batches instead of about {mean:.3g}" if exceeds else ""


def _check_truncated(stated: TruncatedParticipation, drawn_TN: Drawn) -> str:
    largest = int(drawn_TN.sum(axis=1).max(initial=0))
    if largest > stated.largest_batch:
        return f"a batch has {largest} examples"
    return _check_poisson(stated.drawn, drawn_TN, truncated=True)


def _check_fixed_size(stated: FixedSizeParticipation, drawn_TN: Drawn) -> str:
    sizes = set(drawn_TN.sum(axis=1).tolist())
    if sizes <= {stated.batch_size}:
        return _check_counts(drawn_TN, stated.batch_size / drawn_TN.shape[1])
    return f"batches have sizes {sorted(sizes)[:5]}"


def _check_epochs(stated: EpochParticipation, drawn_TN: Drawn) -> str:
    starts = range(0, len(drawn_TN), max(1, stated.steps))
    repeated = any(drawn_TN[start : start + stated.steps].sum(axis=0).max(initial=0) > 1 for start in starts)
    return "an example is in two batches of one epoch" if repeated else ""


def _check_separated(stated: SeparatedParticipation, drawn_TN: Drawn) -> str:
    gaps = [np.diff(np.flatnonzero(column)) for column in drawn_TN.T]
    smallest = min((int(gap.min()) for gap in gaps if len(gap)), default=stated.separation)
    return f"an example is in batches that are {smallest} steps apart" if smallest < stated.separation else ""


_PARTICIPATION_CHECKS: dict[type, Callable[[Any, Drawn], str]] = {
    PoissonParticipation: _check_poisson,
    TruncatedParticipation: _check_truncated,
    FixedSizeParticipation: _check_fixed_size,
    EpochParticipation: _check_epochs,
    SeparatedParticipation: _check_separated,
    UnknownParticipation: lambda stated, drawn_TN: "",
}
