"""``dpengine calibrate`` and ``dpengine epsilon``: noise for a budget, what noise costs, both with a statement."""

from __future__ import annotations

import json
import textwrap
from argparse import Namespace

from dpengine.accounting import (
    Charge,
    Relation,
    calibration,
    check_delta,
    epsilon_of,
    release_event,
    sample_rate_of,
    steps_per_epoch,
    suggested_delta,
)
from dpengine.report import PrivacyReport, RunFacts, assumptions, round_up, statement

from .commands import CommandError
from .main import WRONG_USE
from .screen import strong

_LEAD = "A run that keeps to these settings would be stated so:"


def run(arguments: Namespace) -> int:
    """Prints the noise multiplier or epsilon, and what the statement of a run that keeps to it would say."""
    facts = _facts(arguments)
    epsilon_of(facts.history, facts.delta, facts.accountant, facts.relation)  # where there is no number, this raises
    if arguments.json:
        print(_json(facts))
    else:
        sigma = round_up(facts.plan["noise_multiplier"], 4)
        found = f"noise_multiplier = {sigma}\n\n" if facts.target_epsilon is not None else ""
        first, rest = _would_be(facts).split("\n", 1)
        print(f"{strong(found)}{_LEAD}\n\n{strong(first)}\n{rest}", end="")
    return 0


def _facts(arguments: Namespace) -> RunFacts:
    """The facts of a run that is over and kept to the arguments."""
    rate, steps = _rate_and_steps(arguments)
    delta = suggested_delta(arguments.n) if arguments.delta is None else arguments.delta
    check_delta(delta, arguments.n)
    target = arguments.epsilon if arguments.command == "calibrate" else None
    # As in make_private: what follows from the number of rows makes that number public.
    constants = None not in (arguments.sample_rate, arguments.delta)
    relation = Relation.ADD_OR_REMOVE_ONE if constants else Relation.ZERO_OUT
    if target is None:
        sigma = arguments.sigma
    else:
        sigma = calibration(
            target_epsilon=target,
            target_delta=delta,
            sample_rate=rate,
            steps=steps,
            accountant=arguments.accountant,
            relation=relation,
        ).noise_multiplier
    plan = {"sampling": "poisson", "sample_rate": rate, "expected_batch_size": float(arguments.batch)}
    return RunFacts(
        plan=plan | {"noise_multiplier": sigma},
        history=(Charge(release_event(noise_multiplier=sigma, sample_rate=rate), steps),),
        delta=delta,
        relation=relation,
        accountant=arguments.accountant,
        num_examples=arguments.n,
        constants_declared=constants,
        target_epsilon=target,
    )


def _rate_and_steps(arguments: Namespace) -> tuple[float, int]:
    if arguments.sample_rate is not None:
        if arguments.steps is None:
            raise CommandError("--sample-rate needs --steps: an epoch follows from N.", exit_code=WRONG_USE)
        return arguments.sample_rate, arguments.steps
    steps = arguments.steps
    if steps is None:
        steps = arguments.epochs * steps_per_epoch(arguments.n, arguments.batch)
    return sample_rate_of(arguments.n, arguments.batch), steps


def _would_be(facts: RunFacts) -> str:
    """The statement, less what only a run that took place can say: what was charged, and what was found to hold."""
    before, rest = statement(facts).split("Steps: ", 1)
    accounting = rest[rest.index("Accounting: ") : rest.index("Assumptions, ")]
    excludes = rest[rest.index("Not covered:") :]
    names = [f"  - {item.name}." for item in assumptions(facts) if item.critical]
    assumed = "".join(textwrap.fill(name, 100, subsequent_indent="    ") + "\n" for name in names)
    steps = f"Steps: {facts.steps:,} would be charged.\n"
    return f"{before}{steps}{accounting}What the guarantee would rest on:\n{assumed}{excludes}"


def _json(facts: RunFacts) -> str:
    report = PrivacyReport(facts).to_dict()
    numbers = report["guarantee"] | report["mechanism"] | {"accountant": report["accounting"]["accountant"]}
    return json.dumps(numbers | {"statement": _would_be(facts)}, ensure_ascii=False, indent=2)
