"""Converts a report to a document of JSON values and back. All other forms of the report are derived from it."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from typing import Any

from dpengine.accounting.accountant import PrivacySpent
from dpengine.accounting.events import Relation

from . import sentences
from .assumptions import assumptions
from .facts import AccountingFacts, DatasetFacts, EnvironmentFacts, RunFacts
from .figures import Figures
from .history_rows import charges_of, rows_of

SCHEMA_VERSION = 2

_COSTS = {"epsilon": "epsilon", "mu_gdp": "mu", "advantage": "advantage"}
"""Maps keys of the document to fields of `PrivacySpent`."""
_ACCOUNTANT = {"accountant": "accountant", "library": "library", "version": "version", "discretization": "grid"}
"""Maps keys of the document to fields of `Figures`."""
_PLAN = ("noise_multiplier", "clipping", "sampling", "sample_rate", "expected_batch_size", "correlated_noise")
_ENVIRONMENT = ("torch", "device", "git")
_ACCOUNTING = ("target_epsilon", "planned_steps", "ledger_on_disk", "constants_declared")
_DATA = ("name", "source", "licence", "sha256")
_UTILITY = ("metric", "value", "split")
_AUDIT = ("detector", "kind", "n", "bound", "claimed", "delta", "alpha", "verdict")
_SEED_POLICIES = {True: "INSECURE_SEED", False: "operating-system entropy", None: "unknown"}


def document_of(facts: RunFacts, figures: Figures) -> dict[str, Any]:
    """Returns the report of a run as JSON values, in the form of ``schema.json``. Infinity is ``"inf"``."""
    document: dict[str, Any] = {
        "schema_version": SCHEMA_VERSION,
        "guarantee": _guarantee(facts, figures),
        "mechanism": {key: facts.plan.get(key) for key in _PLAN} | {"steps": facts.steps},
        "accounting": {
            **{key: getattr(figures, name) for key, name in _ACCOUNTANT.items()},
            "assumptions": [
                {"name": item.name, "holds": item.holds, "evidence": item.evidence} for item in assumptions(facts)
            ],
        },
        "coverage": {
            "covers": sentences.covers(facts),
            "excludes": sentences.excludes(facts),
            "excludes_added": list(facts.excludes),
        },
        "profile": [list(point) for point in figures.profile],
        "history": rows_of(facts.accounting.history),
        "history_unamplified": rows_of(facts.accounting.unamplified),
        "run": _run(facts, figures),
        "data": _data(facts),
        "utility": {key: facts.utility.get(key) for key in _UTILITY},
    }
    if facts.other_samplings:  # this key and the two below are missing in reports of earlier versions
        document["mechanism"]["other_samplings"] = list(facts.other_samplings)
    if facts.loss_evidence:
        document["run"]["loss_evidence"] = facts.loss_evidence
    if facts.audit:
        document["audit"] = {key: facts.audit.get(key) for key in _AUDIT}
    document = json_values(document)
    return document | {"digest": digest_of(document)}


def digest_of(document: Mapping[str, Any]) -> str:
    """Returns the hash of all entries except the digest.

    The digest detects accidental changes. It is not a signature: anyone who edits the document can recompute it.
    """
    content = {key: value for key, value in document.items() if key != "digest"}
    text = json.dumps(content, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()


def facts_of(document: Mapping[str, Any]) -> RunFacts:
    """Restores the facts from a document."""
    guarantee, run, data = document["guarantee"], document["run"], document["data"]
    rng = {key: value for key, value in run["rng"].items() if value is not None}
    insecure_seed = next(key for key, policy in _SEED_POLICIES.items() if policy == run["seed_policy"])
    return RunFacts(
        plan={key: document["mechanism"][key] for key in _PLAN if document["mechanism"][key] is not None},
        accounting=AccountingFacts(
            history=charges_of(document["history"]),
            delta=guarantee["delta"],
            relation=Relation(guarantee["adjacency"]),
            accountant=document["accounting"]["accountant"],
            unit=guarantee["unit"],
            unamplified=charges_of(document["history_unamplified"]),
            **{key: run[key] for key in _ACCOUNTING},
        ),
        dataset=DatasetFacts(data["n"]["value"], data["n"]["public"], {key: data[key] for key in _DATA}),
        environment=EnvironmentFacts(**{key: run[key] for key in _ENVIRONMENT}),
        noise=rng | ({} if insecure_seed is None else {"insecure_seed": insecure_seed}),
        loss_checked=run["loss_checked"],
        loss_evidence=run.get("loss_evidence", ""),
        other_samplings=tuple(document["mechanism"].get("other_samplings", ())),
        excludes=tuple(document["coverage"]["excludes_added"]),
        utility=document["utility"],
        audit=document.get("audit", {}),
    )


def figures_in(document: Mapping[str, Any]) -> Figures:
    """Restores the figures from a document."""
    guarantee, accounting = document["guarantee"], document["accounting"]
    spent = None
    if guarantee["epsilon"] is not None:
        costs = {name: _number(guarantee[key]) for key, name in _COSTS.items()}
        run = {"steps": document["mechanism"]["steps"], "accountant_used": accounting["accountant"]}
        spent = PrivacySpent(delta=guarantee["delta"], **costs, **run)
    return Figures(
        spent=spent,
        refusal=guarantee["refusal"] or "",
        profile=tuple((delta, _number(epsilon)) for delta, epsilon in document["profile"]),
        unamplified=_number(guarantee["epsilon_unamplified"]),
        **{name: accounting[key] for key, name in _ACCOUNTANT.items()},
    )


def _guarantee(facts: RunFacts, figures: Figures) -> dict[str, Any]:
    costs = {key: getattr(figures.spent, name, None) for key, name in _COSTS.items()}
    return costs | {
        "delta": facts.accounting.delta,
        "refusal": figures.refusal or None,
        "epsilon_unamplified": figures.unamplified,
        "adjacency": facts.accounting.relation.value,
        "unit": facts.accounting.unit,
        "setting": sentences.SETTING,
    }


def _run(facts: RunFacts, figures: Figures) -> dict[str, Any]:
    run = {
        "seed_policy": _SEED_POLICIES[facts.noise.get("insecure_seed")],
        "rng": {key: facts.noise.get(key) for key in ("kind", "cryptographic", "largest_normal")},
        "dpengine": figures.version,
        "loss_checked": facts.loss_checked,
    }
    run |= {key: getattr(facts.environment, key) for key in _ENVIRONMENT}
    return run | {key: getattr(facts.accounting, key) for key in _ACCOUNTING}


def _data(facts: RunFacts) -> dict[str, Any]:
    public = facts.num_examples_is_public
    # Under add-or-remove the exact number of examples is private.
    size = {"value": facts.dataset.num_examples if public else None, "public": public}
    return {"n": size} | {key: facts.dataset.description.get(key) for key in _DATA}


def json_values(value: Any) -> Any:
    """Returns the value with infinities as strings and NaN as None, which any JSON parser can read."""
    if isinstance(value, dict):
        return {key: json_values(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [json_values(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None if math.isnan(value) else ("inf" if value > 0 else "-inf")
    return value


def _number(value: Any) -> Any:
    return math.inf if value == "inf" else value
