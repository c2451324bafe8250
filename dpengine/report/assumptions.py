"""Checks the assumptions of the accounting against the facts of a run."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

from dpengine.accounting.events import Relation
from dpengine.accounting.ledger import UNKNOWN_SAMPLING
from dpengine.sampling.custom_scheme import CUSTOM_PREFIX

from .facts import DECLARED, NO_RATE, SAMPLING_ASSUMPTIONS, UNDECLARED, RunFacts, delta_floor

if TYPE_CHECKING:
    from .figures import Figures

Holds = Literal["yes", "no", "not checked"]
Light = Literal["green", "amber", "red"]

_RATE_TOLERANCE = 2.0**-59  # the ledger charges a rate that exceeds the sampler's by 2**-60, or by one float
_NEGLIGIBLE_FRACTION = 1e-3  # an addition to delta below this fraction of it is negligible

_OTHER_STAMP = "ASSUMPTION NOT MET"
_WORST_FIRST = ("NOT PRIVATE", "NOT CLAIMED", _OTHER_STAMP, "INSECURE_SEED", "generator: not cryptographic")


@dataclass(frozen=True)
class Assumption:
    """An assumption of the accounting, and the result of its check.

    Attributes:
        name: The statement that is assumed.
        holds: ``"yes"``, ``"no"`` or ``"not checked"``.
        evidence: The reason for ``holds``.
        critical: True if there is no guarantee without the assumption; False if the guarantee is weaker without it.
        stamp: The warning that is added to every epsilon if the assumption does not hold.
    """

    name: str
    holds: Holds
    evidence: str
    critical: bool = True
    stamp: str = _OTHER_STAMP

    @property
    def light(self) -> Light:
        """Green if it holds, red if there is no guarantee without it, else amber."""
        if self.holds == "yes":
            return "green"
        return "red" if self.holds == "no" and self.critical else "amber"


def assumptions(facts: RunFacts) -> list[Assumption]:
    """Returns all assumptions of the accounting, in the order of the stages of a step."""
    return [check(facts) for check in _CHECKS]


def stamps(facts: RunFacts, figures: Figures | None = None) -> tuple[str, ...]:
    """Returns the warnings that are added to every epsilon of a run, the most serious first."""
    failed = {item.stamp for item in assumptions(facts) if item.holds == "no"}
    if figures is not None and figures.spent is not None and math.isinf(figures.spent.epsilon):
        failed.add("NOT PRIVATE")
    return tuple(stamp for stamp in _WORST_FIRST if stamp in failed)


_IN_OTHER_RUNS = {
    DECLARED: "the rate of another run was declared by the user; dpengine drew none of its batches",
    UNDECLARED: "the training loop drew the batches of another run, without a declared rate",
    UNKNOWN_SAMPLING: "some loaded charges do not name their sampling scheme",
}
"""Evidence for a sampling scheme of ``RunFacts.other_samplings``."""


def _sampling(facts: RunFacts) -> Assumption:
    """Checks the sampling of all runs in the history. Batches that dpengine did not draw are not checked."""
    others = facts.other_samplings
    name = SAMPLING_ASSUMPTIONS.get(str(facts.plan.get("sampling")), SAMPLING_ASSUMPTIONS["poisson"])
    of_others = dict.fromkeys(SAMPLING_ASSUMPTIONS[scheme] for scheme in others if scheme in SAMPLING_ASSUMPTIONS)
    different = [text[0].lower() + text[1:] for text in of_others if text != name]
    of_plan = _sampling_of_plan(facts, "; in other runs: ".join([name, " / ".join(different)]) if different else name)
    if of_plan.holds == "no" or not others:
        return of_plan
    other_evidence = (_IN_OTHER_RUNS.get(scheme, f"another run drew {scheme} batches") for scheme in others)
    checked = all(scheme in SAMPLING_ASSUMPTIONS and scheme != DECLARED for scheme in others)
    evidence = "; ".join([of_plan.evidence, *other_evidence])
    return replace(of_plan, holds=of_plan.holds if checked else "not checked", evidence=evidence)


def _sampling_of_plan(facts: RunFacts, name: str) -> Assumption:
    sampling = facts.plan.get("sampling", "an unknown scheme")
    if sampling == UNDECLARED:
        return Assumption(name, "no", NO_RATE, stamp="NOT CLAIMED")
    if not facts.sampling_is_known:
        known = (*SAMPLING_ASSUMPTIONS, UNKNOWN_SAMPLING)
        earlier = ", ".join(name for name in facts.other_samplings if name not in known) or "another scheme"
        scheme = f"{earlier}, in an earlier run" if sampling in SAMPLING_ASSUMPTIONS else sampling
        return Assumption(name, "no", f"batches were drawn by {scheme}", stamp="NOT CLAIMED")
    if sampling.startswith(CUSTOM_PREFIX):
        name = f"The sampling scheme {sampling.removeprefix(CUSTOM_PREFIX)} draws batches as it states"
        return Assumption(name, "not checked", "it is not part of dpengine, which only compared trial batches with it")
    rates = sorted({rate for charge in facts.accounting.history if (rate := charge.event.inclusion_rate) is not None})
    planned = facts.plan.get("sample_rate")
    if sampling == DECLARED:
        declared = "its rate" if planned is None else f"the rate {planned:.6g}"
        others = f"; the ledger has {_listed(rates)}" if len(rates) > 1 else ""
        return Assumption(name, "not checked", f"{declared} was declared by the user; dpengine drew no batch{others}")
    if not rates:
        return Assumption(name, "yes", "the plan's sampler draws batches this way; no charge depends on it yet")
    if planned is not None and not any(
        0 <= rate - planned <= max(_RATE_TOLERANCE, math.ulp(planned)) for rate in rates
    ):
        differing = f"the ledger's rates ({_listed(rates)}) differ from the plan's ({planned:.6g})"
        return Assumption(name, "not checked", differing)
    if len(rates) > 1:
        return Assumption(name, "yes", f"each step was charged at its own rate: {_listed(rates)}")
    return Assumption(name, "yes", f"the sampler and the ledger use the same rate {rates[0]:.6g}")


def _constants(facts: RunFacts) -> Assumption:
    name = "Rate, divisor and delta do not depend on private data"
    if facts.accounting.relation is not Relation.ADD_OR_REMOVE_ONE:
        return Assumption(name, "yes", "they may follow from the number of rows, which this relation makes public")
    return {
        True: Assumption(name, "yes", "they were given as constants"),
        False: Assumption(name, "no", "they were derived from the number of rows, which this relation keeps private"),
        None: Assumption(name, "not checked", "they were not declared to be constants"),
    }[facts.accounting.constants_declared]


def _independence(facts: RunFacts) -> Assumption:
    name = "The loss of a row depends on that row alone"
    why = f" ({facts.loss_evidence})" if facts.loss_evidence else "; only layers that mix rows are rejected"
    return {
        True: Assumption(name, "yes", facts.loss_evidence or "no mixing of samples was seen when it was checked"),
        False: Assumption(name, "no", "a probe found that rows change each other's gradients"),
        None: Assumption(name, "not checked", f"the loss was not checked{why}"),
    }[facts.loss_checked]


def _parameters(facts: RunFacts) -> Assumption:
    return Assumption(
        "Every gradient is clipped: each trainable parameter is used in a watched layer only",
        "yes",
        "checked at each step; a gradient from any other use raises an error",
    )


def _noise(facts: RunFacts) -> Assumption:
    name, sigma = "Every step has noise", facts.plan.get("noise_multiplier")
    if facts.is_private:
        planned = f"; the plan's multiplier is {sigma:.6g}" if sigma else ""
        return Assumption(name, "yes", f"every charge has noise{planned}")
    evidence = "noise_multiplier=0: sums of gradients are released without noise"
    return Assumption(name, "no", evidence, stamp="NOT PRIVATE")


def _key(facts: RunFacts) -> Assumption:
    name = "The key of all noise and batches is secret, from the operating system's entropy"
    if facts.noise.get("insecure_seed") is None:
        return Assumption(name, "not checked", "the source of the noise is not known")
    if facts.noise["insecure_seed"]:
        evidence = "INSECURE_SEED: anyone who knows or guesses the seed can subtract the noise"
        return Assumption(name, "no", evidence, stamp="INSECURE_SEED")
    return Assumption(name, "yes", "256 bits were taken from it when the run began")


def _generator(facts: RunFacts) -> Assumption:
    name = "The generator of the noise is cryptographic"
    kind = facts.noise.get("kind", "unknown")
    if facts.noise.get("cryptographic") is None:
        return Assumption(name, "not checked", "the source of the noise is not known", critical=False)
    if facts.noise["cryptographic"]:
        return Assumption(name, "yes", f"drawn by {kind}, keyed anew for each use", critical=False)
    stamp = "generator: not cryptographic"
    return Assumption(name, "no", f"{stamp} ({kind})", critical=False, stamp=stamp)


def _float_model(facts: RunFacts) -> Assumption:
    name = "Floating point stands in for real arithmetic"
    floor = delta_floor(facts)
    widths = "norms, factors, sums and noise are float32 or wider"
    if floor is None:
        return Assumption(name, "not checked", widths, critical=False)
    tail = f"normals reach {facts.noise['largest_normal']:.2f} standard deviations, which adds {floor:.1e} to delta"
    if floor > _NEGLIGIBLE_FRACTION * facts.accounting.delta:
        return Assumption(name, "no", f"{tail}; use more noise")
    return Assumption(name, "not checked", f"{widths}; {tail}; results do not lie on a public grid", critical=False)


def _ledger(facts: RunFacts) -> Assumption:
    name = "Each charge is on disk before the result of its step is released"
    if facts.accounting.ledger_on_disk:
        return Assumption(name, "yes", "the ledger is a file, and a step waits for it", critical=False)
    evidence = "the ledger is in memory: a crash loses the charges since the last save"
    return Assumption(name, "no", evidence, critical=False, stamp="")


_CHECKS: tuple[Callable[[RunFacts], Assumption], ...] = (
    *(_sampling, _constants, _independence, _parameters),
    *(_noise, _key, _generator, _float_model, _ledger),
)


def _listed(rates: list[float]) -> str:
    shown = ", ".join(f"{rate:.6g}" for rate in rates[:4])
    return shown if len(rates) <= 4 else f"{shown} and {len(rates) - 4} more"
