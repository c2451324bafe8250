"""The detectors on trial: each planted bug must be caught, and the engine as it is must not be accused."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from .bugs_clipping import BUGS as CLIPPING
from .bugs_ledger import BUGS as LEDGER
from .bugs_noise import BUGS as NOISE
from .bugs_sampling import BUGS as SAMPLING
from .direct import quick
from .finding import AuditFinding
from .planted import Planted, planted

BUGS = {
    bug.id: bug
    for bug in sorted((*NOISE, *CLIPPING, *SAMPLING, *LEDGER), key=lambda bug: int(re.sub(r"\D", "", bug.id)))
}


@dataclass(frozen=True)
class Trialled:
    """What became of one planted bug.

    Attributes:
        bug: The bug.
        finding: Of the detector that must catch it.
    """

    bug: Planted
    finding: AuditFinding

    @property
    def caught(self) -> bool:
        """Whether it was."""
        return self.finding.verdict == "violation"


def caught_by(bug: Planted, *, seed: int = 0) -> Trialled:
    """Plants a bug, and looks with the first of its detectors.

    Args:
        bug: A row of `BUGS`.
        seed: Of the detector.

    Returns:
        What came of it.
    """
    with planted(bug):
        (finding,) = quick(bug.make, detectors=bug.detectors[:1], seed=seed)
    return Trialled(bug, finding)


def self_test(ids: Iterable[str] | None = None, *, seed: int = 0) -> Iterator[Trialled]:
    """Plants bugs one after the other.

    Args:
        ids: Which of `BUGS`; None takes all.
        seed: Of the detectors.

    Yields:
        What came of each.
    """
    for name in BUGS if ids is None else ids:
        yield caught_by(BUGS[name], seed=seed)


def accusations(*, seed: int = 0) -> list[AuditFinding]:
    """What the detectors say of the engine as it is, wherever a bug is planted for them to find.

    A model that mixes rows is at fault itself, with or without a bug in the engine: it is left out.

    Args:
        seed: Of the detectors.

    Returns:
        All findings.
    """
    looked_at = {(bug.make, bug.detectors[0]) for bug in BUGS.values() if bug.detectors[0] != "DI"}
    ordered = sorted(looked_at, key=lambda one: one[1])
    return [finding for make, code in ordered for finding in quick(make, detectors=[code], seed=seed)]
