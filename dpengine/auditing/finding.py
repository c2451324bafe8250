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
        bound: Threshold of the statistic: a p-value or a limit.
        verdict: ``"pass"``, ``"violation"`` or ``"inconclusive"``.
        seed: Seed that reproduces the finding.
        seconds: Duration.
        reason: The violations, or why the test is inconclusive.
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
    violations: list[str] = field(default_factory=list)
    untested: list[str] = field(default_factory=list)
    p_values: dict[str, float] = field(default_factory=dict)
    ratios: dict[str, float] = field(default_factory=dict)

    def violation(self, text: str) -> None:
        """Records a violation, once."""
        if text not in self.violations:
            self.violations.append(text)

    def inconclusive(self, reason: str) -> None:
        """Records a reason why a property cannot be tested, once."""
        if reason not in self.untested:
            self.untested.append(reason)

    def p_value(self, name: str, p: float) -> None:
        """Records a p-value of a statistic, and keeps the smallest of each name."""
        self.p_values[name] = min(p, self.p_values.get(name, 1.0))

    def ratio(self, name: str, value: float) -> None:
        """Records a value relative to its limit, and keeps the largest of each name. NaN counts as infinite."""
        value = value if value == value else float("inf")
        self.ratios[name] = max(value, self.ratios.get(name, 0.0))

    def finding(self) -> AuditFinding:
        """Returns the finding."""
        tests = max(1, len(self.p_values))
        violations = list(self.violations)
        violations += [f"{name}: p={p:.1e}" for name, p in self.p_values.items() if p * tests < P_VALUE_THRESHOLD]
        violations += [f"{name}: {value:.4g} times the limit" for name, value in self.ratios.items() if value > 1]
        statistic, bound = self._most_extreme(tests)
        verdict = "violation" if violations else "pass"
        if not violations and (self.untested or not self.n):
            verdict = "inconclusive"
        reason = "; ".join(violations[:3] or self.untested[:3] or ([] if self.n else ["nothing was tested"]))
        return AuditFinding(self.detector, statistic, self.n, bound, verdict, self.seed, reason=reason)

    def _most_extreme(self, tests: int) -> tuple[str, float]:
        if self.p_values:
            name = min(self.p_values, key=self.p_values.__getitem__)
            return f"{name} p={self.p_values[name]:.2g}", P_VALUE_THRESHOLD / tests
        if self.ratios:
            name = max(self.ratios, key=self.ratios.__getitem__)
            return f"{name} {self.ratios[name]:.4g} of its limit", 1.0
        return f"{len(self.violations)} violations", 0.0


def timed(detector: str, seed: int, run: Callable[[], AuditFinding]) -> AuditFinding:
    """Runs a detector and returns its finding with the duration. A detector that raises is inconclusive."""
    start = time.perf_counter()
    try:
        finding = run()
    except Exception as error:  # a model may raise any exception
        text = f"{type(error).__name__}: {error}".splitlines()[0]
        finding = AuditFinding(detector, "none", 0, 0.0, "inconclusive", seed, reason=text)
    return replace(finding, seconds=time.perf_counter() - start)


def worst_verdict(findings: Sequence[AuditFinding]) -> str:
    """Returns the worst verdict of the findings: ``"violation"``, then ``"inconclusive"``, then ``"pass"``."""
    verdicts = {finding.verdict for finding in findings}
    return next((verdict for verdict in ("violation", "inconclusive") if verdict in verdicts), "pass")
