"""Audit report: the test statistic, the bound derived from it, and the verdict."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from dpengine.report.document import json_values

VERDICTS = {"pass": 0, "violation": 1, "inconclusive": 2}
"""Exit code by verdict."""

_SENTENCES = {
    "pass": "no violation found",
    "violation": "VIOLATION: the claim is refuted",
    "inconclusive": "inconclusive",
}


@dataclass(frozen=True)
class AuditReport:
    """Result of an audit.

    A pass means that no violation was found. It does not prove that a run is private.

    Attributes:
        detector: Code of the detector, such as ``"DC"`` for canaries.
        statistic: The test statistic.
        n: Number of independent trials.
        verdict: A key of ``VERDICTS``.
        p: P-value of the claim; None if it was not computed.
        bound: Lower bound on epsilon with confidence ``1 - alpha``; None if there is none.
        claimed: The claimed epsilon; None if there is no claim.
        seed: Seed of the audit's random numbers; None if the operating system provided them.
        cost: Duration in seconds.
        details: Further values, as plain JSON values.
        caveats: Sentences that qualify the verdict.

    Raises:
        ValueError: If the verdict is unknown.
    """

    detector: str
    statistic: float
    n: int
    verdict: str
    p: float | None = None
    bound: float | None = None
    claimed: float | None = None
    seed: int | None = None
    cost: float = 0.0
    details: Mapping[str, Any] = field(default_factory=dict)
    caveats: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.verdict not in VERDICTS:
            raise ValueError(f"verdict={self.verdict!r} is not known. Choose one of: {', '.join(map(repr, VERDICTS))}.")

    @property
    def exit_code(self) -> int:
        """Exit code of a command: 0 for a pass, 1 for a violation, 2 if the audit is inconclusive."""
        return VERDICTS[self.verdict]

    def to_dict(self) -> dict[str, Any]:
        """Returns the report as plain JSON values. Infinity is ``"inf"``."""
        fields: dict[str, Any] = {name: getattr(self, name) for name in self.__dataclass_fields__}
        fields |= {"details": dict(self.details), "caveats": list(self.caveats)}
        return json_values(fields)  # type: ignore[no-any-return]

    def summary(self) -> dict[str, Any]:
        """Returns the values for a privacy report: ``engine.report().with_audit(audit.summary())``."""
        fields = {name: getattr(self, name) for name in ("detector", "n", "bound", "claimed", "verdict")}
        fields |= {name: self.details.get(name) for name in ("kind", "delta", "alpha")}
        return json_values(fields)  # type: ignore[no-any-return]

    def to_json(self) -> str:
        """Returns the report as JSON."""
        return json.dumps(self.to_dict(), ensure_ascii=False, indent=2, allow_nan=False)

    def __str__(self) -> str:
        lines = [f"{self.detector}: {_SENTENCES[self.verdict]}."]
        if self.bound is not None:
            claim = "nothing is claimed" if self.claimed is None else f"claimed: epsilon = {self.claimed:.4g}"
            lines.append(f"audited: epsilon >= {self.bound:.4g}; {claim}")
        if self.p is not None:
            lines.append(f"p of the claim: {self.p:.3g}")
        lines += [f"{name.replace('_', ' ')}: {_formatted(value)}" for name, value in self.details.items()]
        lines += [f"- {caveat}" for caveat in self.caveats]
        return "\n".join(lines)


def _formatted(value: Any) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{name.replace('_', ' ')} {_formatted(item)}" for name, item in value.items())
    if isinstance(value, (list, tuple)):
        return ", ".join(map(_formatted, value)) or "none"
    return f"{value:.4g}" if isinstance(value, float) else str(value)
