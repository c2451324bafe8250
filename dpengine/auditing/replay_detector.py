"""Detector DR: compares releases with the same seed on a data set and on its neighbor with one more unit.

With equal seeds, the noise cancels in the difference of two releases, which is then the effect of the unit. If the unit
was drawn, the difference must be at most the sensitivity. Otherwise the releases must be bit-identical. Both runs must
have the same number of releases.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from dpengine.errors import PrivacyError
from dpengine.sampling.units import unit_numbers

from .finding import AuditFinding, Evidence
from .subject import Maker, Step, Trial, declare_constants, new_subject, replace_target

_RATES = (0.15, 0.15, 0.3, 0.3, 0.6, 0.6)
_STEPS = 13  # approximate number of logical batches of each data set
# Sizes N of the data set without the unit. For all but 0, the unit increases N * sample_rate past an integer.
_SIZES = (13, 0, 19, 6, 0, 26)
_STRIDE = 3  # stride through UNUSUAL that combines each entry with data sets of all sizes
_COPIES = 4  # number of examples of a privacy unit
_ROUNDING = 2e-6  # rounding error of float32 sums, relative to the sensitivity


UNUSUAL: dict[str, Callable[[Tensor], Tensor]] = {
    "ordinary": lambda t: t,
    "a thousand times as large": lambda t: t * 1e3,
    "NaN": lambda t: torch.full_like(t, math.nan),
    "1e30": lambda t: torch.full_like(t, 1e30),
    "infinite": lambda t: torch.full_like(t, math.inf),
    "minus infinity": lambda t: torch.full_like(t, -math.inf),
    "large and opposite": lambda t: t * -1e2,
    "tiny": lambda t: t * 1e-30,
}
"""Functions that change the tensors of an ordinary example, by name."""


def replay(make: Maker, *, pairs: int = 20, seed: int = 0) -> AuditFinding:
    """Compares releases on neighboring data sets.

    Sampling rate and divisor are declared constants, so they are equal for both data sets. Dropout is disabled.

    Args:
        make: Returns the subject.
        pairs: Number of pairs of data sets; in a third of them one data set is empty.
        seed: Seed of batches and noise.

    Returns:
        The finding. Its statistic is the largest change by a unit, relative to the sensitivity.
    """
    evidence = Evidence("DR", seed)
    pair_of = _replaced_pair if _keeps_size(new_subject(make).options) else _added_pair
    for number in range(pairs):
        unusual = [*UNUSUAL][_STRIDE * number % len(UNUSUAL)]
        _compare(evidence, pair_of(make, number, seed + number, unusual), unusual)
    return evidence.finding()


class Pair(NamedTuple):
    """Runs on neighboring data sets."""

    without_unit: Callable[[], Trial]
    with_unit: Callable[[], Trial]
    unit: set[int]  # indices of the unit's examples
    factor: float  # limit of the change, over the sensitivity: 2 if the unit replaces another one, else 1


def _keeps_size(options: Any) -> bool:
    """Returns True if neighbors must have equal size, because batches or groups depend on the number of examples."""
    if options.get("plan") is not None or options.get("noise") is not None:
        return True
    return options.get("sampling", "poisson") != "poisson"


def _added_pair(make: Maker, number: int, seed: int, unusual: str) -> Pair:
    subject = new_subject(make)
    dataset: Any = subject.loader.dataset
    privacy_unit = subject.options.get("privacy_unit")
    units, copies = (None, 1) if privacy_unit is None else (unit_numbers(privacy_unit, dataset), _COPIES)
    size = min(_SIZES[number % len(_SIZES)], len(dataset))
    extra = [_changed(dataset[number % len(dataset)], unusual)] * copies
    base = [dataset[index] for index in range(size)]
    ids = units[:size] if units is not None else None

    def trial(examples: Sequence[Any], new: int) -> Trial:
        changes = declare_constants(subject, _RATES[number % len(_RATES)])
        if subject.options.get("target_epsilon") is not None:
            changes |= replace_target(subject.options, 1.0)
        if ids is not None:
            new_id = int(ids.max(initial=-1)) + 1
            changes["privacy_unit"] = [*ids.tolist(), *[new_id] * new]
        return Trial(make, seed=seed, dataset=examples, changes=changes)

    unit = set(range(size, size + copies))
    return Pair(lambda: trial(base, 0), lambda: trial([*base, *extra], copies), unit, 1.0)


def _replaced_pair(make: Maker, number: int, seed: int, unusual: str) -> Pair:
    dataset: Any = new_subject(make).loader.dataset
    index = number % len(dataset)
    original, replaced = ([dataset[i] for i in range(len(dataset))] for _ in range(2))
    replaced[index] = _changed(dataset[(index + 1) % len(dataset)], unusual)
    without_unit, with_unit = (
        functools.partial(Trial, make, seed=seed, dataset=dataset) for dataset in (original, replaced)
    )
    return Pair(without_unit, with_unit, {index}, 2.0)


def _changed(example: Any, unusual: str) -> Any:
    def changed(leaf: Any) -> Any:
        return UNUSUAL[unusual](leaf) if isinstance(leaf, Tensor) and leaf.is_floating_point() else leaf

    return pytree.tree_map(changed, example)


def _compare(evidence: Evidence, pair: Pair, unusual: str) -> None:
    first, second = _run(pair.without_unit), _run(pair.with_unit)
    if isinstance(first, Exception) and isinstance(second, Exception):
        evidence.inconclusive(f"the run is rejected: {first}".splitlines()[0])
        return
    if isinstance(first, Exception) or isinstance(second, Exception):
        evidence.violation(f"the run is rejected on only one of two neighbors (unit: {unusual})")
        return
    (trial, steps), (other_trial, other_steps) = first, second
    divisor, rounding = trial.divisor, 4 * max(trial.rounding, torch.finfo(torch.float32).eps)
    if len(steps) != len(other_steps):
        evidence.violation(f"{len(steps)} releases without the unit, but {len(other_steps)} with it")
    if _charges(trial) != _charges(other_trial):
        evidence.violation("the ledgers of neighbors differ")
    for before, after in zip(steps, other_steps, strict=False):
        if before.bounds != after.bounds:  # the clipping norm depends on a count that is released with its own noise
            break
        evidence.n += 1
        _compare_steps(evidence, before, after, pair, unusual, divisor, rounding)


def _charges(trial: Trial) -> list[Any]:
    """Returns the charges without the names of their runs."""
    return [
        (type(charge.event), {**vars(charge.event), "run": None}, charge.count, charge.kind)
        for charge in trial.engine.ledger.history
    ]


def _compare_steps(
    evidence: Evidence, before: Step, after: Step, pair: Pair, unusual: str, divisor: float, rounding: float
) -> None:
    common = sorted(index for index in before.drawn if pair.factor == 1.0 or index not in pair.unit)
    if common != sorted(index for index in after.drawn if index not in pair.unit):
        evidence.violation("the sampling of other examples depends on the unit")
        return
    if not (bool(before.flat.isfinite().all()) and bool(after.flat.isfinite().all())):
        evidence.violation(f"a release is not finite (unit: {unusual})")
        return
    if not pair.unit & {*before.drawn, *after.drawn}:
        if not torch.equal(before.flat, after.flat):
            evidence.violation("a unit that was not drawn changed a release")
        return
    change = float((after.flat - before.flat).norm()) * divisor
    slack = rounding * float(before.flat.norm()) * divisor
    limit = pair.factor * before.sensitivity * (1 + _ROUNDING) + slack
    evidence.ratio(f"change by a unit ({unusual})", change / limit)


def _run(make: Callable[[], Trial]) -> Any:
    """Returns the trial and its steps, or the error that rejects the run."""
    try:
        trial = make()
        return trial, trial.passes(max(1, math.ceil(_STEPS / len(trial.loader))))
    except PrivacyError as error:
        return error
