"""Sentences that the statement, model card and page share."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from dpengine.accounting.batch_events import FixedSizeGaussianEvent, MixtureGaussianEvent, TruncatedGaussianEvent
from dpengine.accounting.events import (
    CyclicGaussianEvent,
    GaussianEvent,
    MatrixGaussianEvent,
    NonPrivateEvent,
    PoissonGaussianEvent,
    Relation,
)
from dpengine.accounting.ledger import UNKNOWN_SAMPLING
from dpengine.accounting.rounding import percent_up, round_up, round_up_delta
from dpengine.accounting.sampled_matrix import SampledMatrixEvent
from dpengine.accounting.tuning import RepeatAndSelectEvent

from .assumptions import stamps
from .facts import DECLARED, DEFAULT_UNIT, UNDECLARED, RunFacts
from .figures import USER, Figures, true_positives_at

SETTING = "central"
_ALARM_RATE = 0.01  # false positive rate in the explanation
_MAX_LISTED = 6  # number of list items in a sentence
_NOT_AS_DECLARED = (
    "batches that the training loop did not draw as declared: independently, with the declared rate, in secret, and "
    "none left out or repeated because of its content"
)
_NOT_AS_CHARGED = (
    "batches of loaded charges that were not drawn as charged: these charges do not name their sampling scheme"
)
_OF_LOOP = "batches of the training loop"
_OTHER_BATCHES = {
    DECLARED: f"{_OF_LOOP} at a declared rate",
    UNDECLARED: _OF_LOOP,
    UNKNOWN_SAMPLING: "loaded charges of unknown sampling",
}

_NEIGHBORS = {
    Relation.ADD_OR_REMOVE_ONE: "one has one {unit} more than the other (add or remove one); their number is private",
    Relation.ZERO_OUT: "one {unit} of the first contributes nothing in the second (zero-out); their number is public",
    Relation.REPLACE_ONE: "they differ in one {unit} (replace one); their number is public",
}


def headline(facts: RunFacts, figures: Figures) -> str:
    """Returns the guarantee in one line, with its stamps."""
    claimed = figures.spent is not None
    shown = "".join(f" [{stamp}]" for stamp in stamps(facts, figures) if stamp != "NOT CLAIMED" or claimed)
    if figures.spent is None:
        return f"ε not claimed: {figures.refusal}{shown}"
    eps, delta = round_up(figures.spent.epsilon), round_up_delta(facts.accounting.delta)
    if math.isinf(figures.spent.epsilon):
        return f"ε = ∞ at δ = {delta}: no differential privacy for any {facts.accounting.unit}{shown}"
    return f"(ε = {eps}, δ = {delta})-differential privacy for each {facts.accounting.unit}{shown}"


def neighbors(facts: RunFacts) -> str:
    """Returns a sentence on the neighboring relation."""
    number, relation = facts.dataset.num_examples, facts.accounting.relation
    size = f" ({number:,})" if number is not None and facts.num_examples_is_public else ""
    return f"two data sets are neighbors if {_NEIGHBORS[relation].format(unit=facts.accounting.unit)}{size}."


def other_measures(facts: RunFacts, figures: Figures) -> str:
    """Explains mu and the advantage of a membership test."""
    spent = figures.spent
    if spent is None:
        return "none, since no ε is claimed."
    exact = (GaussianEvent, MatrixGaussianEvent, NonPrivateEvent)
    if any(not isinstance(charge.event, exact) for charge in facts.accounting.history) and figures.profile:
        smallest = min(delta for delta, _ in figures.profile)
        range_ = f"a Gaussian curve above this run's for δ from {round_up_delta(smallest)} up"
    else:
        range_ = "exact"
    return (
        f"μ-GDP {round_up(spent.mu)} ({range_}); "
        f"membership advantage ≤ {percent_up(spent.advantage)} (true minus false positive rate of any test)."
    )


def explanation(facts: RunFacts, figures: Figures) -> str:
    """Returns a paragraph that explains the guarantee to readers who do not know epsilon."""
    unit = facts.accounting.unit
    if figures.spent is None:
        return (
            f"No privacy guarantee is stated for this run. The reason: {figures.refusal}. Someone may be able to find "
            f"out whether a given {unit} was used."
        )
    if math.isinf(figures.spent.epsilon):
        return (
            f"This run is not private. Someone who sees the model may be able to tell for sure whether a given {unit} "
            "was used to train it, and to recover parts of it."
        )
    right = percent_up((1 + figures.spent.advantage) / 2)
    found = percent_up(true_positives_at(facts, figures, _ALARM_RATE))
    conditions = ", as long as the seed of the noise stays secret" if "INSECURE_SEED" in stamps(facts) else ""
    conditions += ", if the training loop drew the batches as declared" if DECLARED in facts.samplings else ""
    unknown = UNKNOWN_SAMPLING in facts.other_samplings
    conditions += ", if the batches of loaded charges were drawn as charged" if unknown else ""
    return (
        f"Someone who knows every other record, and sees every model that this run produced, tries to find out whether "
        f"one particular {unit} was used. If used and not used are equally likely, a coin flip is right 50 % of the "
        f"time; they are right at most {right} of the time{conditions}. If they accept {percent_up(_ALARM_RATE)} false "
        f"alarms, they detect at most {found} of the cases in which it was used."
    )


def budget(facts: RunFacts, figures: Figures) -> str:
    """Returns the number of charged steps, and the planned steps and the target epsilon if they exist."""
    steps, epsilon = facts.accounting.planned_steps, facts.accounting.target_epsilon
    planned = f" of {steps:,} planned" if steps is not None else ""
    target = f"; target ε = {epsilon:g}" if epsilon is not None and figures.spent else ""
    return f"{facts.steps:,} step{'s' if facts.steps != 1 else ''} charged{planned}{target}."


def mechanism(facts: RunFacts) -> str:
    """Describes the mechanism in one line."""
    plan = facts.plan
    correlated = plan.get("correlated_noise")
    name = "DP-SGD" if correlated is None else f"DP-SGD with {_correlated_noise(correlated)}"
    sampling = plan.get("sampling", "unknown")
    of_loop = sampling in (UNDECLARED, DECLARED)
    parts = [
        f"{name}, {_OF_LOOP if of_loop else f'{sampling} batches'}",
        _labeled("declared rate" if of_loop else "rate", plan.get("sample_rate")),
        _labeled("noise multiplier", plan.get("noise_multiplier")),
        _labeled("clipping", policy_text(plan.get("clipping"))),
        _labeled("sums divided by", plan.get("expected_batch_size")),
    ]
    others = ", ".join(_OTHER_BATCHES.get(scheme, f"{scheme} batches") for scheme in facts.other_samplings)
    return ", ".join(part for part in parts if part) + (f"; in other runs: {others}." if others else ".")


def _correlated_noise(facts: Mapping[str, Any]) -> str:
    """Returns the name of noise that is correlated across steps."""
    banded = f"noise of {facts.get('bands')} bands (BandMF)"
    names = {"blt": "buffered linear Toeplitz noise (BLT)", "banded-inverse": "banded inverse noise"}
    name = str(facts.get("noise", "banded-toeplitz"))
    return banded if name == "banded-toeplitz" else names.get(name, f"correlated noise {name}, which is not dpengine's")


def policy_text(value: Any) -> Any:
    """Formats the description of a clipping policy; other values are returned unchanged."""
    if not isinstance(value, dict):
        return value
    options = [f"{key}={_number(item)}" for key, item in value.items() if key != "policy"]
    return " ".join([str(value.get("policy", "")), f"({', '.join(options)})"]).strip()


def accounting(figures: Figures) -> str:
    """Describes the accountant and the rounding of its numbers."""
    grid = f", on a pessimistic grid of spacing {figures.grid:.3g}" if figures.grid is not None else ""
    if figures.library == USER:
        return f"computed by {figures.accountant}, not verified; rounded up at the last digit."
    accountant = f"accountant {figures.accountant!r} of dpengine {figures.version}{grid}"
    return f"{accountant}; upper bounds, rounded up at the last digit."


def unamplified(facts: RunFacts, figures: Figures) -> str:
    """Returns the bound of a shuffled run without amplification; an empty text if there is none."""
    if figures.unamplified is None:
        return ""
    bound, delta = round_up(figures.unamplified), round_up_delta(facts.accounting.delta)
    return f"no amplification: {bound} at δ = {delta}, without any credit for the random order of the examples."


def covers(facts: RunFacts) -> list[str]:
    """Returns the data accesses and results that the guarantee covers."""
    accesses = {
        GaussianEvent: "every row",
        PoissonGaussianEvent: "a Poisson batch",
        CyclicGaussianEvent: "a Poisson batch of one group of rows",
        MatrixGaussianEvent: "one group of rows, in cyclic order",
        SampledMatrixEvent: "a batch of random rows",
        TruncatedGaussianEvent: "a Poisson batch that was cut where it was too large",
        FixedSizeGaussianEvent: "a uniform subset of one size",
        MixtureGaussianEvent: "a batch that may hold several rows of a unit",
        RepeatAndSelectEvent: "the best of several runs",
    }
    seen = {accesses[type(charge.event)] for charge in facts.accounting.history if type(charge.event) in accesses}
    of = f" ({' or '.join(sorted(seen))} each)" if seen else ""
    return [
        f"all accesses to the training data by the {facts.steps:,} steps of the ledger{of}, discarded batches included",
        "the weights after each of these steps, all of them together, and the state of the optimizer",
        "results computed from these without the training data",
    ]


def excludes(facts: RunFacts) -> list[str]:
    """Returns the outputs and accesses that the guarantee does not cover."""
    metric, split = facts.utility.get("metric"), facts.utility.get("split")
    score = f"the evaluation figures ({metric} on {split or 'held-out data'})" if metric else "evaluation figures"
    batches = [_NOT_AS_DECLARED] if DECLARED in facts.samplings else []
    batches += [_NOT_AS_CHARGED] if UNKNOWN_SAMPLING in facts.other_samplings else []
    several_rows = [] if facts.accounting.unit != DEFAULT_UNIT else ["people with several rows: the unit is one row"]
    return [
        "the choice of hyper-parameters, of the number of steps, and of the model that is kept",
        f"{score}, such as test scores",
        "the training loss, gradient norms, sizes of batches and other logs of the run",
        "data used before or outside this run: pre-training, preprocessing that was fitted to rows",
        "other runs on the same rows that are not in this ledger",
        *several_rows,
        *batches,
        "side channels, such as time and memory, and the machine and people that hold the training data",
        *facts.excludes,
    ]


def utility(facts: RunFacts) -> str:
    """Returns the utility of the model; an empty text if it is unknown."""
    metric, value, split = (facts.utility.get(key) for key in ("metric", "value", "split"))
    if value is None:
        return ""
    return f"{metric or 'score'} {_number(value)}{f' on {split}' if split else ''}; not covered by the guarantee"


def audit(facts: RunFacts) -> str:
    """Returns the result of an audit; an empty text if there is none. Its lower bound is rounded down."""
    summary = facts.audit
    if not summary:
        return ""
    verdicts = {"pass": "no violation found", "violation": "THE CLAIM IS REFUTED"}
    verdict = verdicts.get(summary["verdict"], "inconclusive")
    bound, claimed, alpha = summary.get("bound"), summary.get("claimed"), summary.get("alpha")
    trials = f"{summary['n']:,} {summary['kind']} canaries" if summary.get("kind") else f"{summary['n']:,} trials"
    lower = "" if bound is None else f"; ε is at least {_rounded_down(bound)}"
    confidence = "" if bound is None or alpha is None else f" with {100 * (1 - alpha):g} % confidence"
    against = "" if claimed is None else f", where {_number(claimed)} was claimed"
    result = f"{verdict}{lower}{confidence}{against}"
    return f"{summary['detector']}, {trials}: {result}. An experiment, not part of the guarantee."


def _rounded_down(value: float | str) -> str:
    if isinstance(value, str) or not math.isfinite(value):
        return "∞"
    return f"{math.floor(1000 * value) / 1000:g}"


def _labeled(name: str, value: Any) -> str:
    if value is None:
        return ""
    return f"{name} {_number(value)}"


def _number(value: Any) -> str:
    if isinstance(value, list):
        shown = ", ".join(_number(item) for item in value[:_MAX_LISTED])
        return f"[{shown}, and {len(value) - _MAX_LISTED} more]" if len(value) > _MAX_LISTED else f"[{shown}]"
    if isinstance(value, dict):
        return _number([f"{key} {_number(item)}" for key, item in value.items()])
    return f"{value:.6g}" if isinstance(value, float) else str(value)
