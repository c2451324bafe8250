"""``dpengine calibrate`` and ``dpengine epsilon``: noise for a budget, what noise costs, both with their statement."""

from __future__ import annotations

import json
from argparse import Namespace

from dpengine.accounting import (
    Charge,
    Relation,
    calibrate,
    check_delta,
    epsilon,
    release_event,
    sample_rate_of,
    steps_per_epoch,
    suggested_delta,
)
from dpengine.report import PrivacyReport, RunFacts, round_up, statement

from .screen import strong

_LEAD = "If a run keeps to these settings, this is its statement:"


def run(arguments: Namespace) -> int:
    """Prints the noise multiplier or epsilon, and the statement of a run that would keep to it."""
    rate = sample_rate_of(arguments.n, arguments.batch)
    steps = arguments.steps
    if steps is None:
        steps = arguments.epochs * steps_per_epoch(arguments.n, arguments.batch)
    delta = suggested_delta(arguments.n) if arguments.delta is None else arguments.delta
    check_delta(delta, arguments.n)
    target = arguments.epsilon if arguments.command == "calibrate" else None
    if target is None:
        sigma = arguments.sigma
    else:
        found = calibrate(
            target_epsilon=target, target_delta=delta, sample_rate=rate, steps=steps, accountant=arguments.accountant
        )
        sigma = found.noise_multiplier
    plan = {"sampling": "poisson", "sample_rate": rate, "expected_batch_size": float(arguments.batch)}
    facts = RunFacts(
        plan=plan | {"noise_multiplier": sigma},
        history=(Charge(release_event(noise_multiplier=sigma, sample_rate=rate), steps),),
        delta=delta,
        relation=Relation.ADD_OR_REMOVE_ONE,
        accountant=arguments.accountant,
        target_epsilon=target,
        planned_steps=steps,
    )
    epsilon(facts.history, delta, facts.accountant, facts.relation)  # where there is no number, this raises
    if arguments.json:
        print(_json(facts))
    else:
        found_text = f"noise_multiplier = {round_up(sigma, 4)}\n\n" if target is not None else ""
        first, rest = statement(facts).split("\n", 1)
        print(f"{strong(found_text)}{_LEAD}\n\n{strong(first)}\n{rest}", end="")
    return 0


def _json(facts: RunFacts) -> str:
    report = PrivacyReport(facts).to_dict()
    numbers = report["guarantee"] | report["mechanism"] | {"accountant": report["accounting"]["accountant"]}
    return json.dumps(numbers | {"statement": statement(facts)}, ensure_ascii=False, indent=2)
