"""DR: releases with equal noise and masks on a data set and on its neighbor with one more unit.

With equal seeds the noise cancels in the difference of two releases, which is the effect of the unit. If the unit was
drawn, the difference must be at most the sensitivity; if not, the releases must be equal to the last bit. Both runs
must have the same number of releases.
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
from .subject import Maker, Step, Trial, made, with_constants, without_target

_RATES = (0.15, 0.15, 0.3, 0.3, 0.6, 0.6)
_STEPS = 13  # approximate number of logical batches of each data set
_SIZES = (13, 0, 19, 6, 0, 26)  # of the data set without the unit: N q crosses an integer at all but 0
_STRIDE = 3  # through UNUSUAL, so that each is combined with data sets of all sizes
_COPIES = 4  # examples of a privacy unit
_ROUNDING = 2e-6  # of the sensitivity: float32 sums of some rows


UNUSUAL: dict[str, Callable[[Tensor], Tensor]] = {
    "as any other": lambda t: t,
    "a thousand times as large": lambda t: t * 1e3,
    "NaN": lambda t: torch.full_like(t, math.nan),
    "1e30": lambda t: torch.full_like(t, 1e30),
    "infinite": lambda t: torch.full_like(t, math.inf),
    "minus infinity": lambda t: torch.full_like(t, -math.inf),
    "large and opposite": lambda t: t * -1e2,
    "tiny": lambda t: t * 1e-30,
}
"""Unusual examples by name: functions of the tensors of an ordinary example."""


def replay(make: Maker, *, pairs: int = 20, seed: int = 0) -> AuditFinding:
    """Compares releases on neighboring data sets.

    Rate and divisor are declared constants, so both data sets have the same ones. Dropout is disabled.

    Args:
        make: Returns the subject.
        pairs: Number of pairs of data sets; in a third of them one data set is empty.
        seed: Seed of masks and noise.

    Returns:
        The finding. Its statistic is the largest change by a unit, over the sensitivity.
    """
    evidence = Evidence("DR", seed)
    pair_of = _replacing if _keeps_size(made(make).options) else _adding
    for number in range(pairs):
        unusual = [*UNUSUAL][_STRIDE * number % len(UNUSUAL)]
        _compare(evidence, pair_of(make, number, seed + number, unusual), unusual)
    return evidence.finding()


class Pair(NamedTuple):
    """Runs on neighboring data sets, the rows of the unit, and 2 if it replaces another unit, else 1."""

    without: Callable[[], Trial]
    having: Callable[[], Trial]
    new: set[int]
    times: float


def _keeps_size(options: Any) -> bool:
    """Returns True if masks or groups depend on the number of rows: neighbors then have the same number."""
    given = (options.get("plan"), options.get("noise"))
    return any(one is not None for one in given) or options.get("sampling", "poisson") != "poisson"


def _adding(make: Maker, number: int, seed: int, unusual: str) -> Pair:
    subject = made(make)
    dataset: Any = subject.loader.dataset
    given = subject.options.get("privacy_unit")
    units, copies = (None, 1) if given is None else (unit_numbers(given, dataset), _COPIES)
    size = min(_SIZES[number % len(_SIZES)], len(dataset))
    place = number % len(dataset)
    extra = [_changed(dataset[place], unusual)] * copies
    base = [dataset[index] for index in range(size)]
    ids = units[:size] if units is not None else None

    def trial(examples: Sequence[Any], new: int) -> Trial:
        changes = with_constants(subject, _RATES[number % len(_RATES)])
        if subject.options.get("target_epsilon") is not None:
            changes |= without_target(subject.options, 1.0)
        if ids is not None:
            top = int(ids.max(initial=-1)) + 1
            changes["privacy_unit"] = [*ids.tolist(), *[top] * new]
        return Trial(make, seed=seed, dataset=examples, changes=changes)

    new = set(range(size, size + copies))
    return Pair(lambda: trial(base, 0), lambda: trial([*base, *extra], copies), new, 1.0)


def _replacing(make: Maker, number: int, seed: int, unusual: str) -> Pair:
    dataset: Any = made(make).loader.dataset
    place = number % len(dataset)
    one, other = ([dataset[i] for i in range(len(dataset))] for _ in range(2))
    other[place] = _changed(dataset[(place + 1) % len(dataset)], unusual)
    without, having = (functools.partial(Trial, make, seed=seed, dataset=listed) for listed in (one, other))
    return Pair(without, having, {place}, 2.0)


def _changed(example: Any, unusual: str) -> Any:
    def changed(leaf: Any) -> Any:
        return UNUSUAL[unusual](leaf) if isinstance(leaf, Tensor) and leaf.is_floating_point() else leaf

    return pytree.tree_map(changed, example)


def _compare(evidence: Evidence, pair: Pair, unusual: str) -> None:
    one, other = _run(pair.without), _run(pair.having)
    if isinstance(one, Exception) and isinstance(other, Exception):
        evidence.unknown(f"the run is rejected: {one}".splitlines()[0])
        return
    if isinstance(one, Exception) or isinstance(other, Exception):
        evidence.fault(f"a run is rejected on only one of two neighbors (a unit that is {unusual})")
        return
    (trial, steps), (_, others) = one, other
    scale = (trial.divisor, 4 * max(trial.rounding, torch.finfo(torch.float32).eps))
    if len(steps) != len(others):
        evidence.fault(f"{len(steps)} releases without the unit, {len(others)} with it")
    if _engine_ledger(trial) != _engine_ledger(other[0]):
        evidence.fault("the ledgers of neighbors differ")
    for before, after in zip(steps, others, strict=False):
        if before.bounds != after.bounds:  # the clipping norm depends on a private count, released with its own noise
            break
        evidence.n += 1
        _compare_steps(evidence, before, after, pair, unusual, scale)


def _engine_ledger(trial: Trial) -> list[Any]:
    """Returns the charges without the name of their run."""
    return [
        (type(charge.event), {**vars(charge.event), "run": None}, charge.count, charge.kind)
        for charge in trial.engine.ledger.history
    ]


def _compare_steps(
    evidence: Evidence, before: Step, after: Step, pair: Pair, unusual: str, scale: tuple[float, float]
) -> None:
    new = pair.new
    common = sorted(index for index in before.drawn if pair.times == 1.0 or index not in new)
    if common != sorted(index for index in after.drawn if index not in new):
        evidence.fault("the sampling of other rows depends on the unit")
        return
    if not (bool(before.flat.isfinite().all()) and bool(after.flat.isfinite().all())):
        evidence.fault(f"a release is not finite (a unit that is {unusual})")
        return
    if not new & {*before.drawn, *after.drawn}:
        if not torch.equal(before.flat, after.flat):
            evidence.fault("a unit that was not drawn changed a release")
        return
    divisor, rounded = scale
    moved = float((after.flat - before.flat).norm()) * divisor
    rounding = rounded * float(before.flat.norm()) * divisor
    limit = pair.times * before.sensitivity * (1 + _ROUNDING) + rounding
    evidence.ratio(f"change by a unit that is {unusual}", moved / limit)


def _run(make: Callable[[], Trial]) -> Any:
    """Returns the trial and its steps, or the error that rejects it."""
    try:
        trial = make()
        return trial, trial.passes(max(1, math.ceil(_STEPS / len(trial.loader))))
    except PrivacyError as error:
        return error
