"""``dpengine audit quick``, ``replay``, ``noise``, ``sampler`` and ``self-test``: the direct detectors."""

from __future__ import annotations

import contextlib
import json
import sys
from argparse import Namespace
from collections.abc import Callable, Sequence
from typing import Any

from dpengine.auditing import (
    BUGS,
    QUICK,
    TESTS,
    VERDICTS,
    AuditFinding,
    Trialled,
    accusations,
    caught_by,
    noise_law,
    quick,
    replay,
    sampler_law,
    small,
    timed,
    worst_verdict,
)

from .check_model import named
from .commands import CommandError
from .main import DONE, FAILED, WRONG_USE
from .screen import strong, table

_TEXTS = {
    "pass": "No violation found.",
    "violation": "A violation was found.",
    "inconclusive": "No violation found, but a detector could not tell.",
}
_LOOKS: dict[str, tuple[str, Callable[..., AuditFinding], str]] = {
    "replay": ("DR", replay, "pairs"),
    "noise": ("DN", noise_law, "coords"),
    "sampler": ("DS", sampler_law, "draws"),
}


def run(arguments: Namespace) -> int:
    """Prints what was found; the exit code is 0 for a pass, 1 for a violation, 2 if nothing can be said."""
    if arguments.action == "self-test":
        return _self_test(arguments)
    with contextlib.redirect_stdout(sys.stderr):  # what the user's module prints is no part of the answer
        findings = _findings(arguments)
    verdict = worst_verdict(findings)
    if arguments.json:
        print(json.dumps({"verdict": verdict, "findings": [finding.to_dict() for finding in findings]}, indent=2))
    else:
        print("\n".join(map(str, findings)))
        print(strong(_TEXTS[verdict]))
    return VERDICTS[verdict]


def _findings(arguments: Namespace) -> list[AuditFinding]:
    make: Any = small() if arguments.make is None else named(arguments.make)
    if not callable(make):
        raise CommandError(f"{arguments.make} is a {type(make).__name__}, no function.", exit_code=WRONG_USE)
    if arguments.action == "quick":
        try:
            return quick(make, detectors=arguments.only or QUICK, seed=arguments.seed)
        except (Exception, SystemExit) as error:
            raise CommandError(
                f"The audit could not begin: {type(error).__name__}: {error}", exit_code=WRONG_USE
            ) from error
    code, look, size = _LOOKS[arguments.action]
    return [timed(code, arguments.seed, lambda: look(make, seed=arguments.seed, **{size: arguments.size}))]


def _self_test(arguments: Namespace) -> int:
    ids = arguments.only or list(BUGS)
    if unknown := [name for name in ids if name not in BUGS]:
        raise CommandError(f"{unknown[0]!r} is no planted bug; they are PB-1 to PB-{len(BUGS)}.", exit_code=WRONG_USE)
    trials = []
    for name in ids:
        trials.append(caught_by(BUGS[name], seed=arguments.seed))
        if not arguments.json:
            print(".", end="", file=sys.stderr, flush=True)
    accused = [] if arguments.only else [f for f in accusations(seed=arguments.seed) if f.verdict == "violation"]
    survived = [one.bug.id for one in trials if not one.caught]
    if arguments.json:
        print(json.dumps(_as_data(trials, accused), indent=2))
    else:
        print(f"\n{_table(trials)}")
        print("\n".join(f"accused without a bug: {finding}" for finding in accused), end="\n" if accused else "")
        print(strong(f"{len(trials) - len(survived)} of {len(trials)} planted bugs were caught."))
    return FAILED if survived or accused else DONE


def _as_data(trials: Sequence[Trialled], accused: Sequence[AuditFinding]) -> dict[str, Any]:
    rows = [
        {
            "id": one.bug.id,
            "bug": one.bug.what,
            "caught": one.caught,
            "detectors": list(one.bug.detectors),
            "test": f"tests/{TESTS[one.bug.id]}",
            "instead": one.bug.instead,
            "finding": one.finding.to_dict(),
        }
        for one in trials
    ]
    return {"bugs": rows, "accused": [finding.to_dict() for finding in accused]}


def _table(trials: Sequence[Trialled]) -> str:
    rows = [
        (
            one.bug.id + ("*" if one.bug.instead else ""),
            one.bug.what,
            " ".join(one.bug.detectors),
            "yes" if one.caught else "NO",
            TESTS[one.bug.id].partition("[")[0],
        )
        for one in trials
    ]
    notes = [f"* {one.bug.id}: {one.bug.instead}" for one in trials if one.bug.instead]
    return "\n".join(
        [table(("id", "bug", "detectors", "caught", "ordinary test that fails too"), rows, "<<<^<"), *notes]
    )
