"""From a run to its report: what the parts of the run say of themselves, put together."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from dpengine.accounting import Ledger, Relation
from dpengine.report import PrivacyReport, RunFacts
from dpengine.run import Run


def report_of_run(
    run: Run,
    ledger: Ledger,
    relation: Relation,
    data: Mapping[str, Any],
    utility: Mapping[str, Any],
    excludes: tuple[str, ...],
) -> PrivacyReport:
    """Makes the report of a run. It reads the parts of the run, the versions of two packages, and nothing else.

    Args:
        run: The run, which has the plan, the budget and the source of the noise.
        ledger: Everything that was charged, also by other runs of the engine.
        relation: Which data sets are neighbours, for all of these charges.
        data: ``name``, ``source``, ``licence``, ``sha256``.
        utility: ``metric``, ``value``, ``split``.
        excludes: Sentences on what else the guarantee does not cover.

    Returns:
        The report; ``save(directory)`` writes its files.
    """
    plan, budget = run.release.plan, run.budget
    device = next(run.model.parameters()).device.type
    facts = RunFacts(
        plan=plan.describe(),
        history=ledger.history,
        delta=budget.delta,
        relation=relation,
        accountant=budget.accountant,
        num_examples=plan.sampling.num_examples,
        # make_private states add-or-remove only for a run whose constants were all given.
        constants_declared=relation is Relation.ADD_OR_REMOVE_ONE,
        noise=run.release.source.describe(device),
        target_epsilon=budget.target_epsilon,
        planned_steps=budget.planned_steps,
        data=data,
        utility=utility,
        torch=torch.__version__,
        device=device,
        excludes=excludes,
    )
    return PrivacyReport(facts)
