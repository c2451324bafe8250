"""Audit findings: verdict, test statistic, sample size."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

_TEXTS = {"pass": "no violation found", "violation": "VIOLATION", "inconclusive": "inconclusive"}

P_VALUE_THRESHOLD = 1e-6
"""P-value after Bonferroni correction below which a statistic is a violation."""


@dataclass(frozen=True)
class AuditFinding:
    """Result of one detector. A pass means that no violation was found; it does not prove privacy.

    Attributes:
        detector: Code of the detector, such as ``"DN"``.
        statistic: Name and value of the most extreme statistic.
        n: Number of tested values, pairs or steps.
        bound: Threshold of the statistic: a p-value, or a limit.
        verdict: ``"pass"``, ``"violation"`` or ``"inconclusive"``.
        seed: Seed that reproduces the finding.
        seconds: Duration.
        reason: The violation, or the reason why the test is inconclusive.
    """

    detector: str
    statistic: str
    n: int
    bound: float
    verdict: str
    seed: int
    seconds: float = 0.0
    reason: str = ""

    def to_dict(self) -> dict[str, Any]:
        """Returns the fields as JSON values, with the duration as ``cost``."""
        fields = asdict(self)
        return fields | {"cost": {"seconds": round(fields.pop("seconds"), 3)}}

    def __str__(self) -> str:
        reason = f": {self.reason}" if self.reason else ""
        return f"{self.detector}  {_TEXTS[self.verdict]}{reason}  [{self.statistic}, n={self.n}, {self.seconds:.1f} s]"


@dataclass
class Evidence:
    """Observations of a detector, from which its finding is derived."""

    detector: str
    seed: int
    n: int = 0
    faults: list[str] = field(default_factory=list)
    gaps: list[str] = field(default_factory=list)
    probabilities: dict[str, float] = field(default_factory=dict)
    ratios: dict[str, float] = field(default_factory=dict)

    def fault(self, violation: str) -> None:
        """Records a violation, once."""
        if violation not in self.faults:
            self.faults.append(violation)

    def unknown(self, reason: str) -> None:
        """Records the reason why something cannot be tested, once."""
        if reason not in self.gaps:
            self.gaps.append(reason)

    def probability(self, name: str, p: float) -> None:
        """Records the p-value of a statistic; the smallest of each name counts."""
        self.probabilities[name] = min(p, self.probabilities.get(name, 1.0))

    def ratio(self, name: str, value: float) -> None:
        """Records a value relative to its limit; the largest of each name counts. NaN counts as infinite."""
        value = value if value == value else float("inf")
        self.ratios[name] = max(value, self.ratios.get(name, 0.0))

    def finding(self) -> AuditFinding:
        """Returns the finding."""
        tests = max(1, len(self.probabilities))
        faults = list(self.faults)
        faults += [f"{name}: p={p:.1e}" for name, p in self.probabilities.items() if p * tests < P_VALUE_THRESHOLD]
        faults += [f"{name}: {value:.4g} times the limit" for name, value in self.ratios.items() if value > 1]
        statistic, bound = self._most_extreme(tests)
        verdict = "violation" if faults else "pass"
        if not faults and (self.gaps or not self.n):
            verdict = "inconclusive"
        reason = "; ".join(faults[:3] or self.gaps[:3] or ([] if self.n else ["nothing was tested"]))
        return AuditFinding(self.detector, statistic, self.n, bound, verdict, self.seed, reason=reason)

    def _most_extreme(self, tests: int) -> tuple[str, float]:
        if self.probabilities:
            name = min(self.probabilities, key=self.probabilities.__getitem__)
            return f"{name} p={self.probabilities[name]:.2g}", P_VALUE_THRESHOLD / tests
        if self.ratios:
            name = max(self.ratios, key=self.ratios.__getitem__)
            return f"{name} {self.ratios[name]:.4g} of its limit", 1.0
        return f"{len(self.faults)} faults", 0.0


def timed(detector: str, seed: int, run: Callable[[], AuditFinding]) -> AuditFinding:
    """Runs a detector and returns its finding with the duration. A detector that raises is inconclusive."""
    began = time.perf_counter()
    try:
        finding = run()
    except Exception as error:  # a model may raise any exception
        text = f"{type(error).__name__}: {error}".splitlines()[0]
        finding = AuditFinding(detector, "none", 0, 0.0, "inconclusive", seed, reason=text)
    return replace(finding, seconds=time.perf_counter() - began)


def worst_verdict(findings: Sequence[AuditFinding]) -> str:
    """Returns ``"violation"`` if any verdict is that, else ``"inconclusive"`` if any is that, else ``"pass"``."""
    verdicts = {finding.verdict for finding in findings}
    return next((verdict for verdict in ("violation", "inconclusive") if verdict in verdicts), "pass")
