"""``dpengine audit quick``, ``replay``, ``noise`` and ``sampler``: the direct detectors."""

from __future__ import annotations

import contextlib
import json
import sys
from argparse import Namespace
from collections.abc import Callable
from typing import Any

from dpengine.auditing.direct import DETECTORS, quick
from dpengine.auditing.finding import AuditFinding, timed, worst_verdict
from dpengine.auditing.noise_detector import noise_distribution
from dpengine.auditing.replay_detector import replay
from dpengine.auditing.sampler_detector import batch_distribution
from dpengine.auditing.subject import small
from dpengine.auditing.verdict import VERDICTS

from .check_model import imported
from .commands import CommandError
from .screen import strong

_TEXTS = {
    "pass": "No violation was found.",
    "violation": "A violation was found.",
    "inconclusive": "No violation was found, but a detector was inconclusive.",
}
# Code and function of each detector, and the name of its size argument.
_DETECTORS: dict[str, tuple[str, Callable[..., AuditFinding], str]] = {
    "replay": ("DR", replay, "pairs"),
    "noise": ("DN", noise_distribution, "coords"),
    "sampler": ("DS", batch_distribution, "draws"),
}


def run(arguments: Namespace) -> int:
    """Prints the findings. Returns 0 for a pass, 1 for a violation, 2 if the result is inconclusive."""
    with contextlib.redirect_stdout(sys.stderr):  # output of the user's module
        findings = _findings(arguments)
    verdict = worst_verdict(findings)
    if arguments.json:
        print(json.dumps({"verdict": verdict, "findings": [finding.to_dict() for finding in findings]}, indent=2))
    else:
        print("\n".join(map(str, findings)))
        print(strong(_TEXTS[verdict]))
    return VERDICTS[verdict]


def _findings(arguments: Namespace) -> list[AuditFinding]:
    make: Any = small() if arguments.make is None else imported(arguments.make)
    if not callable(make):
        raise CommandError(f"{arguments.make} is a {type(make).__name__}, not a function.")
    if arguments.action == "quick":
        try:
            return quick(make, detectors=arguments.only or tuple(DETECTORS), seed=arguments.seed)
        except (Exception, SystemExit) as error:
            raise CommandError(f"The audit could not start: {type(error).__name__}: {error}") from error
    code, detector, size_argument = _DETECTORS[arguments.action]
    return [timed(code, arguments.seed, lambda: detector(make, seed=arguments.seed, **{size_argument: arguments.size}))]
