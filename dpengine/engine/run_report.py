"""Builds the privacy report of a run from the descriptions of its parts."""

from __future__ import annotations

import contextlib
import difflib
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from numbers import Real
from typing import TYPE_CHECKING, Any

import torch

from dpengine.accounting.custom_accountant import name_of
from dpengine.accounting.events import Relation
from dpengine.accounting.ledger import Charge, Ledger
from dpengine.accounting.origin import Origin, relation_of
from dpengine.accounting.overviews import html_table, text_line
from dpengine.accounting.rounding import round_up, round_up_delta
from dpengine.errors import AccountingRefusedError
from dpengine.ledger_file.run_ledger import RunLedger
from dpengine.noise.source import NoiseSource
from dpengine.report.all_runs import excludes_of_all, loss_checked_of_all, noise_of_all
from dpengine.report.facts import AccountingFacts, DatasetFacts, EnvironmentFacts, RunFacts
from dpengine.report.report import PrivacyReport
from dpengine.validation.loss import loss_was_checked

if TYPE_CHECKING:
    from .privacy_engine import PrivacyEngine
    from .run import Run

_TEXT = (str, type(None))
_KEYS: dict[str, dict[str, tuple[type, ...]]] = {
    "data": {"name": _TEXT, "source": _TEXT, "licence": _TEXT, "sha256": (*_TEXT, Mapping)},
    "utility": {"metric": _TEXT, "value": (*_TEXT, Real), "split": _TEXT},
}
"""Keys of the arguments of a report, with the types of their values."""


def check_report_arguments(data: Any, utility: Any, excludes: Any) -> None:
    """Raises if an argument has an unknown key or a value of the wrong type."""
    for argument, mapping in (("data", data), ("utility", utility)):
        if mapping is not None and not isinstance(mapping, Mapping):
            raise TypeError(
                f"{argument} is a {type(mapping).__name__}; pass a dictionary with {', '.join(_KEYS[argument])}."
            )
        for key, value in (mapping or {}).items():
            if key not in _KEYS[argument]:
                matches = difflib.get_close_matches(str(key), _KEYS[argument], n=1)
                hint = f"Did you mean {matches[0]!r}?" if matches else f"Valid keys: {', '.join(_KEYS[argument])}."
                raise ValueError(f"{argument} has no key {key!r}. {hint}")
            if not isinstance(value, _KEYS[argument][key]) or isinstance(value, bool):
                expected = " or ".join(kind.__name__ for kind in _KEYS[argument][key])
                raise TypeError(f"{argument}[{key!r}] is a {type(value).__name__}, not {expected}.")
    kind = type(excludes).__name__
    if isinstance(excludes, Sequence) and not isinstance(excludes, (str, bytes)):
        wrong = next((sentence for sentence in excludes if not isinstance(sentence, str)), None)
        if wrong is None and None not in excludes:
            return
        kind = f"{kind} that holds a {type(wrong).__name__}"
    raise TypeError(f"excludes is a {kind}; pass a list of sentences, such as ['the tuning of the rates'].")


def run_facts(run: Run) -> dict[str, Any]:
    """Returns the public facts about a run for the ledger file, without private values and machine details."""
    budget = run.budget
    target = {"target_epsilon": budget.target_epsilon, "delta": budget.delta, "planned_steps": budget.planned_steps}
    return {"unit": run.unit, **target, **run.step.plan.describe()}


def origin_of(run: Run) -> Origin:
    """Returns the facts about a run that a report needs."""
    plan, ledger, noise = run.step.plan, run.step.ledger, noise_of(run)
    return Origin(
        sampling=plan.sampling.name,
        relation=plan.relation,
        unit=run.unit,
        kind=noise["kind"],
        cryptographic=noise["cryptographic"],
        insecure_seed=noise["insecure_seed"],
        loss_checked=_loss_check(run)[0],
        processes=run.step.passes.topology.everyone.size,
        resumed=run.resumed and not (isinstance(ledger, RunLedger) and ledger.has_later_charges),
    )


def _loss_check(run: Run) -> tuple[bool | None, str]:
    """Returns True if the loss of a run was checked in this process (otherwise None), and a text about the check."""
    loop = run.step.loop
    steps = f"no mixing of samples was seen in {loop.checked} probed step{'s' if loop.checked != 1 else ''}"
    if loss_was_checked(run.model) and loop.for_check_loop:
        user_check = "check_loss or check_loop found no mixing of samples"
        return True, f"{user_check}; {steps}" if loop.checked else user_check
    if loop.unchecked_reason is not None:
        return None, f"{steps}, but {loop.unchecked_reason}" if loop.checked else loop.unchecked_reason
    return (True, steps) if loop.checked else (None, "no step was probed")


def _loss_evidence(run: Run, checked: bool | None) -> str:
    """Returns the text about the loss check of the last run; an empty text if the result for all runs differs."""
    checked_here, evidence = _loss_check(run)
    return evidence if checked_here is checked else ""


def noise_of(run: Run) -> dict[str, Any]:
    """Describes all noise of a run so far. Before the first step, describes the noise of the first step."""
    sources = [source.describe(device) for source, device in _noise_drawn(run)]
    return {
        "kind": ", ".join(sorted({source["kind"] for source in sources})),
        "cryptographic": all(source["cryptographic"] for source in sources),
        "insecure_seed": any(source["insecure_seed"] for source in sources),
        "largest_normal": min(source["largest_normal"] for source in sources),
    }


def _noise_drawn(run: Run) -> Collection[tuple[NoiseSource, str]]:
    parameters = list(run.model.parameters())
    trainable = [parameter for parameter in parameters if parameter.requires_grad] or parameters
    return run.step.noise_drawn or {(run.step.source, parameter.device.type) for parameter in trainable}


def origins_of(engine: PrivacyEngine, *new_runs: Run) -> frozenset[Origin]:
    """Returns the origins of all charges in the ledger of an engine, and of new runs that it does not contain yet."""
    names = {run.step.ledger.run for run in engine.runs if isinstance(run.step.ledger, RunLedger)}
    return frozenset(map(origin_of, (*engine.runs, *new_runs))) | engine._engine_ledger.origins(without=names)


def report_of_run(
    run: Run,
    ledger: Ledger,
    origins: Collection[Origin],
    data: Mapping[str, Any] | None,
    utility: Mapping[str, Any] | None,
    excludes: Sequence[str],
) -> PrivacyReport:
    """Creates the report of a ledger and its last run. ``origins`` are those of all charges in the ledger."""
    plan, budget, relation = run.step.plan, run.budget, relation_of(origins)
    device = ", ".join(sorted({device for _, device in _noise_drawn(run)}))
    topology = run.step.passes.topology
    distributed = topology.everyone.size > 1
    facts = RunFacts(
        plan=plan.describe(),
        accounting=AccountingFacts(
            history=ledger.history,
            delta=budget.delta,
            relation=relation,
            accountant=budget.accountant,
            unit=run.unit,
            unamplified=_unamplified(ledger.history) if plan.counts_epochs else (),
            # make_private claims add-or-remove only for a run whose constants were all passed.
            constants_declared=relation is Relation.ADD_OR_REMOVE_ONE,
            target_epsilon=budget.target_epsilon,
            planned_steps=budget.planned_steps,
            ledger_on_disk=isinstance(run.step.ledger, RunLedger),
        ),
        dataset=DatasetFacts(
            # The number stays private if the last run claims add-or-remove, even if another run does not.
            num_examples=None if plan.relation is Relation.ADD_OR_REMOVE_ONE else plan.sampling.num_examples,
            description=data or {},
        ),
        environment=EnvironmentFacts(
            torch=torch.__version__,
            device=f"{device}, {topology.everyone.size} processes ({topology.name})" if distributed else device,
        ),
        noise={"largest_normal": noise_of(run)["largest_normal"], **noise_of_all(origins)},
        loss_checked=loss_checked_of_all(origins),
        loss_evidence=_loss_evidence(run, loss_checked_of_all(origins)),
        other_samplings=tuple(origin.sampling for origin in origins),
        excludes=(*excludes, *excludes_of_all(origins)),
        utility=utility or {},
    )
    return PrivacyReport(facts)


def _unamplified(history: Sequence[Charge]) -> tuple[Charge, ...]:
    """Returns the charges without amplification by sampling; an empty tuple if an event has no such form."""
    events = [getattr(charge.event, "unamplified", charge.event) for charge in history]
    if None in events:
        return ()
    return tuple(replace(charge, event=event) for charge, event in zip(history, events, strict=True) if event)


def text_of_engine(engine: PrivacyEngine) -> str:
    """Returns the accountant, the number of runs and steps, and the privacy cost, rounded up."""
    return text_line(type(engine).__name__, _overview(engine))


def table_of_engine(engine: PrivacyEngine) -> str:
    """Returns the values of `text_of_engine` as an HTML table, for notebooks."""
    return html_table(type(engine).__name__, _overview(engine))


def _overview(engine: PrivacyEngine) -> dict[str, Any]:
    values = {"accountant": name_of(engine.accountant), "runs": len(engine.runs), "steps": engine.ledger.steps}
    if not engine.runs:
        return values
    try:
        epsilon = round_up(engine.epsilon)
    except AccountingRefusedError:
        epsilon = "not claimed"
    return {**values, "epsilon": epsilon, "delta": round_up_delta(engine.delta)}


def metrics_of_run(
    run: Run, ledger: Ledger, delta: float, epsilon_at: Callable[[float], float], *, nonprivate: bool
) -> dict[str, float]:
    """Returns the metrics of ``PrivacyEngine.metrics``."""
    values: dict[str, float] = {
        "privacy/delta": delta,
        "privacy/noise_multiplier": run.step.plan.noise_multiplier,
        "privacy/step": ledger.steps,
    }
    with contextlib.suppress(AccountingRefusedError):  # no epsilon to log
        values["privacy/epsilon"] = epsilon_at(delta)
        if run.budget.target_epsilon is not None:
            values["privacy/budget_used"] = values["privacy/epsilon"] / run.budget.target_epsilon
    if nonprivate:
        statistics = run.step.statistics
        values["nonprivate/clip_fraction"] = statistics.clipped / max(statistics.samples, 1)
        values["nonprivate/largest_norm"] = statistics.largest_norm
        values["nonprivate/dropped_rows"] = run.step.dropped_samples
    return values
