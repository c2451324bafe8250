"""All planted bugs by id, and trials of the detectors: with each bug planted, and on the unmodified engine."""

from __future__ import annotations

import re

from dpengine.auditing import AuditFinding, quick

from .bugs_clipping import BUGS as CLIPPING
from .bugs_ledger import BUGS as LEDGER
from .bugs_noise import BUGS as NOISE
from .bugs_sampling import BUGS as SAMPLING
from .planted import Planted, planted

BUGS = {
    bug.id: bug
    for bug in sorted((*NOISE, *CLIPPING, *SAMPLING, *LEDGER), key=lambda bug: int(re.sub(r"\D", "", bug.id)))
}


def finding_with(bug: Planted, *, seed: int = 0) -> AuditFinding:
    """Plants a bug and returns the finding of the first of its detectors."""
    with planted(bug):
        (finding,) = quick(bug.make, detectors=bug.detectors[:1], seed=seed)
    return finding


def findings_without_bugs(*, seed: int = 0) -> list[AuditFinding]:
    """Returns the findings on the unmodified engine, for each training run and detector of `BUGS`.

    Excludes runs for the independence detector (``"DI"``), whose models mix samples even without a bug.
    """
    looked_at = {(bug.make, bug.detectors[0]) for bug in BUGS.values() if bug.detectors[0] != "DI"}
    ordered = sorted(looked_at, key=lambda one: one[1])
    return [finding for make, code in ordered for finding in quick(make, detectors=[code], seed=seed)]
