"""``dpengine calibrate`` and ``dpengine epsilon``: noise multiplier for a budget, and privacy cost of a run."""

from __future__ import annotations

import json
import math
import re
import textwrap
from argparse import Namespace
from typing import Any

from dpengine.accounting.accountant import ACCOUNTANTS, accountant_name, bounds_of, epsilon_of
from dpengine.accounting.arguments import MAX_COUNT
from dpengine.accounting.constants import check_delta, sample_rate_of, steps_per_epoch, suggested_delta
from dpengine.accounting.events import Relation, release_event
from dpengine.accounting.ledger import Charge
from dpengine.accounting.noise_calibration import calibration
from dpengine.accounting.rounding import round_up
from dpengine.errors import AccountingRefusedError, PrivacyError
from dpengine.report.assumptions import assumptions
from dpengine.report.document import json_values
from dpengine.report.facts import AccountingFacts, DatasetFacts, RunFacts
from dpengine.report.privacy_statement import statement
from dpengine.report.report import PrivacyReport

from .commands import CommandError
from .screen import strong

_ARGUMENT = re.compile(r"\b(accountant)='(\w+)'")  # Python arguments in messages, replaced by options
_LEAD = "The statement of a run with these settings would be:"


def run(arguments: Namespace) -> int:
    """Prints the noise multiplier or epsilon, alone or with the statement of a run with these settings."""
    try:
        facts = _facts(arguments)
        terms = facts.accounting
        cost = epsilon_of(
            terms.history, terms.delta, terms.accountant, terms.relation
        )  # raises if no epsilon is defined
        shown = _json(facts) if arguments.json else _text(facts) if arguments.full else _line(facts, cost)
    except AccountingRefusedError as error:
        raise CommandError(_ARGUMENT.sub(r"--\1 \2", str(error))) from error
    except PrivacyError:
        raise
    except (ArithmeticError, ValueError) as error:
        raise CommandError(
            f"these numbers are too large or too small to account for: {error}. Check --n, --steps, the noise and the "
            "budget."
        ) from error
    print(shown)
    return 0


def _line(facts: RunFacts, cost: float) -> str:
    terms = facts.accounting
    epsilon = f"ε = {round_up(cost) if math.isfinite(cost) else '∞ [NOT PRIVATE]'}"
    text = f"δ = {terms.delta:g}, {facts.steps:,} steps, {terms.relation.value}, accountant {terms.accountant}"
    if terms.target_epsilon is None:
        return f"{strong(epsilon)} ({text})"
    return f"{strong(_sigma(facts))} ({epsilon}, {text})"


def _sigma(facts: RunFacts) -> str:
    return f"noise_multiplier = {round_up(facts.plan['noise_multiplier'], 4)}"


def _text(facts: RunFacts) -> str:
    sigma = f"{_sigma(facts)}\n\n" if facts.accounting.target_epsilon is not None else ""
    first, rest = _planned_statement(facts).split("\n", 1)
    return f"{strong(sigma)}{_LEAD}\n\n{strong(first)}\n{rest}".removesuffix("\n")


def _facts(arguments: Namespace) -> RunFacts:
    """Returns the facts of a completed run with these arguments."""
    rate, steps = _rate_and_steps(arguments)
    delta = suggested_delta(arguments.n) if arguments.delta is None else arguments.delta
    check_delta(delta, arguments.n)
    target = arguments.epsilon if arguments.command == "calibrate" else None
    constants = None not in (arguments.sample_rate, arguments.delta)
    relation = _relation(arguments.relation, constants)
    accounting: dict[str, Any] = {"accountant": arguments.accountant, "relation": relation}
    if target is None:
        sigma = arguments.sigma
    else:
        run: dict[str, Any] = {"sample_rate": rate, "steps": steps}
        sigma = calibration(target_epsilon=target, target_delta=delta, **run, **accounting).noise_multiplier
    plan = {"sampling": "poisson", "sample_rate": rate, "expected_batch_size": float(arguments.batch)}
    return RunFacts(
        plan=plan | {"noise_multiplier": sigma},
        accounting=AccountingFacts(
            history=(Charge(release_event(noise_multiplier=sigma, sample_rate=rate), steps),),
            delta=delta,
            **accounting,
            constants_declared=constants,
            target_epsilon=target,
        ),
        dataset=DatasetFacts(num_examples=arguments.n),
    )


def _relation(option: str | None, constants: bool) -> Relation:
    """Chooses the relation as `make_private` does. The number of examples is public if constants depend on it."""
    if option is None:
        return Relation.ADD_OR_REMOVE_ONE if constants else Relation.ZERO_OUT
    relation = Relation(option)
    if relation is Relation.ADD_OR_REMOVE_ONE and not constants:
        raise CommandError(
            "--relation add-remove keeps N private, but the rate or delta is derived from N. Pass --sample-rate with "
            "--steps, and --delta, as constants; or pass --relation zero-out, which gives the same numbers."
        )
    return relation


def _rate_and_steps(arguments: Namespace) -> tuple[float, int]:
    if arguments.batch > arguments.n > 0:
        raise CommandError(f"--batch {arguments.batch} is more than the {arguments.n} examples of --n.")
    if arguments.sample_rate is not None:
        if arguments.steps is None:
            raise CommandError("--sample-rate needs --steps, because the length of an epoch depends on N.")
        return arguments.sample_rate, arguments.steps
    steps = arguments.steps
    if steps is None:
        steps = arguments.epochs * steps_per_epoch(arguments.n, arguments.batch)
        if steps > MAX_COUNT:
            raise CommandError(
                f"--epochs {arguments.epochs:,} of --n {arguments.n:,} examples in batches of {arguments.batch:,} are "
                "more than 2**62 steps, which is the limit."
            )
    return sample_rate_of(arguments.n, arguments.batch), steps


def _planned_statement(facts: RunFacts) -> str:
    """Returns the statement of a planned run, without the results of the checks of its assumptions."""
    beginning, rest = statement(facts).split("Steps: ", 1)
    accounting = rest[rest.index("Accounting: ") : rest.index("Assumptions, ")]
    excludes = rest[rest.index("Not covered:") :]
    names = [f"  - {item.name}." for item in assumptions(facts) if item.critical]
    assumed = "".join(textwrap.fill(name, 100, subsequent_indent="    ") + "\n" for name in names)
    steps = f"Steps: {facts.steps:,} would be charged.\n"
    return f"{beginning}{steps}{accounting}Assumptions of the guarantee:\n{assumed}{excludes}"


def _json(facts: RunFacts) -> str:
    report, terms = PrivacyReport(facts).to_dict(), facts.accounting
    numbers = report["guarantee"] | report["mechanism"] | {"accountant": report["accounting"]["accountant"]}
    bounds = None
    if ACCOUNTANTS[accountant_name(terms.accountant)].bounds is not None:
        interval = bounds_of(terms.history, terms.delta, terms.accountant, terms.relation)
        bounds = json_values(dict(zip(("lower", "estimate", "upper"), interval, strict=True)))
    return json.dumps(
        numbers | {"bounds": bounds, "statement": _planned_statement(facts)}, ensure_ascii=False, indent=2
    )
