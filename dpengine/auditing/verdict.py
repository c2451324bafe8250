"""What an audit found: a number, the bound that follows from it, and a verdict that claims no more than that."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

VERDICTS = {"pass": 0, "violation": 1, "inconclusive": 2}
"""Exit code by verdict."""

_SENTENCES = {
    "pass": "no violation found",
    "violation": "VIOLATION: the claim is refuted",
    "inconclusive": "inconclusive: nothing can be said",
}


@dataclass(frozen=True)
class AuditReport:
    """The result of one detector.

    A pass says that no violation was found. It never says that a run is private.

    Attributes:
        detector: Its code, such as ``"DC"`` for canaries.
        statistic: The number that was measured.
        n: How many independent trials it rests on.
        verdict: A key of ``VERDICTS``.
        p: The chance of such a statistic if the claim held; None where it is not computed.
        bound: What epsilon is at least, with confidence ``1 - alpha``; None where there is no such bound.
        claimed: The epsilon that was claimed; None if there was none.
        seed: Of the audit's own randomness; None if that came from the operating system.
        cost: Seconds.
        details: More numbers, as plain JSON values.
        caveats: Sentences that belong to the verdict.

    Raises:
        ValueError: If the verdict is not known.
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
        """Refuses a verdict that has no meaning."""
        if self.verdict not in VERDICTS:
            raise ValueError(f"verdict={self.verdict!r} is not known. Choose one of: {', '.join(map(repr, VERDICTS))}.")

    @property
    def exit_code(self) -> int:
        """What a command ends with: 0 for a pass, 1 for a violation, 2 if nothing can be said."""
        return VERDICTS[self.verdict]

    def to_dict(self) -> dict[str, Any]:
        """The report as plain JSON values. Infinity is ``"inf"``."""
        own: dict[str, Any] = {name: getattr(self, name) for name in self.__dataclass_fields__}
        return _strict(own | {"details": dict(self.details), "caveats": list(self.caveats)})  # type: ignore[no-any-return]

    def summary(self) -> dict[str, Any]:
        """What a privacy report says of the audit: ``engine.report().with_audit(audit.summary())``."""
        own = {name: getattr(self, name) for name in ("detector", "n", "bound", "claimed", "verdict")}
        return _strict(own | {name: self.details.get(name) for name in ("kind", "delta", "alpha")})  # type: ignore[no-any-return]

    def to_json(self) -> str:
        """The report as JSON."""
        return json.dumps(self.to_dict(), ensure_ascii=False, indent=2, allow_nan=False)

    def __str__(self) -> str:
        lines = [f"{self.detector}: {_SENTENCES[self.verdict]}."]
        if self.bound is not None:
            claim = "nothing is claimed" if self.claimed is None else f"claimed: epsilon = {self.claimed:.4g}"
            lines.append(f"audited: epsilon >= {self.bound:.4g}; {claim}")
        if self.p is not None:
            lines.append(f"p of the claim: {self.p:.3g}")
        lines += [f"{name.replace('_', ' ')}: {_shown(value)}" for name, value in self.details.items()]
        lines += [f"- {caveat}" for caveat in self.caveats]
        return "\n".join(lines)


def _shown(value: Any) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{name.replace('_', ' ')} {_shown(one)}" for name, one in value.items())
    if isinstance(value, (list, tuple)):
        return ", ".join(map(_shown, value)) or "none"
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _strict(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _strict(one) for key, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [_strict(one) for one in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None if math.isnan(value) else ("inf" if value > 0 else "-inf")
    return value
