"""What stands between a model and private training, layer by layer, before anything is changed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from dpengine.capture import Kind, Watch, watch_list
from dpengine.errors import UnsupportedLayerError
from dpengine.grad_samplers import REGISTERED, sampler_for
from dpengine.layers import TWINS
from dpengine.names import suggests_names

from .obstacles import obstacle_of

SUPPORTED, TWIN, FALLBACK, BLOCKED, NOTHING = "supported", "twin", "fallback", "blocked", "no trainable parameters"
_PRIVATE = frozenset(TWINS.values())


@dataclass(frozen=True)
class Finding:
    """What is known about one layer.

    Attributes:
        name: Dotted name in the model, empty for the model itself.
        type: Name of its class.
        verdict: ``"supported"``, ``"twin"``, ``"fallback"``, ``"blocked"`` or ``"no trainable parameters"``.
        how: The rule that gives its per-sample gradients.
        why: For a blocked layer, what it does, as the rest of a sentence that begins with its name.
        remedy: For a blocked layer, what to do.
    """

    name: str
    type: str
    verdict: str
    how: str = ""
    why: str = ""
    remedy: str = ""

    @property
    def where(self) -> str:
        """Name and type, for messages."""
        return f"{self.name or 'The model'} ({self.type})"


@dataclass(frozen=True)
class CheckReport:
    """The findings, in the order of ``model.named_modules()``. ``str(report)`` is a table."""

    findings: tuple[Finding, ...]

    @property
    def blocked(self) -> tuple[Finding, ...]:
        """The findings that forbid private training."""
        return tuple(finding for finding in self.findings if finding.verdict == BLOCKED)

    @property
    def ok(self) -> bool:
        """Whether nothing is blocked."""
        return not self.blocked

    def raise_if_blocked(self) -> None:
        """Refuses a model with blocked layers.

        Raises:
            UnsupportedLayerError: With the reason and the remedy of the first, and the names of the others.
        """
        if self.ok:
            return
        first, *others = self.blocked
        also = f" Also blocked: {', '.join(other.where for other in others)}." if others else ""
        raise UnsupportedLayerError(f"{first.where} {first.why}.{also}", fix=first.remedy)

    def __str__(self) -> str:
        header = ("layer", "type", "verdict", "how")
        rows = [header, *((f.name or "(model)", f.type, f.verdict, f.how) for f in self.findings)]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
        notes = [f"{finding.where} {finding.why}. {finding.remedy}" for finding in self.blocked]
        return "\n".join([lines[0], "-" * max(map(len, lines)), *lines[1:], *([""] if notes else []), *notes])


@suggests_names
def check(model: nn.Module) -> CheckReport:
    """Says for each layer of a model how its per-sample gradients are found, or why it cannot be trained privately.

    Looks at layers one by one, and changes nothing. That a layer of unknown kind, or the loss, keeps rows apart is
    something only a batch can show: see ``check_loss``.

    Args:
        model: The model, before or after ``fix``.

    Returns:
        A report with one row for each layer: what owns parameters, what has no children, and all that is blocked.

    Raises:
        TypeError: If the model is no ``torch.nn.Module``.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"check: model is {torch.typename(model)}; pass an instance of torch.nn.Module.")
    lookup = _Lookup()
    watches = {watch.module: watch for watch in watch_list(model, lookup, lambda module: None)}
    inside = {m for watch in watches.values() if watch.kind is Kind.UNIT for m in watch.module.modules()}
    findings = []
    for name, module in model.named_modules():
        watch = watches.get(module)
        finding = _blocked(name, module, lookup) or (None if watch is None else _watched(name, watch))
        if finding is None and module not in inside and not any(True for _ in module.children()):
            finding = Finding(name, type(module).__name__, NOTHING)
        if finding is not None:
            findings.append(finding)
    if not any(parameter.requires_grad for parameter in model.parameters()):
        why = "has no trainable parameter, so there is nothing to train"
        remedy = "Thaw what shall be trained: model.requires_grad_(True)"
        findings.insert(0, Finding("", type(model).__name__, BLOCKED, why=why, remedy=remedy))
    return CheckReport(tuple(findings))


class _Lookup:
    """``sampler_for``, which remembers what it refused."""

    def __init__(self) -> None:
        self.refusals: dict[nn.Module, UnsupportedLayerError] = {}

    def __call__(self, module: nn.Module) -> Any:
        if obstacle_of(module) is not None:
            return {}
        try:
            return sampler_for(module)
        except UnsupportedLayerError as refusal:
            self.refusals[module] = refusal
            return {}


def _blocked(name: str, module: nn.Module, lookup: _Lookup) -> Finding | None:
    obstacle, refusal = obstacle_of(module), lookup.refusals.get(module)
    if obstacle is not None:
        return Finding(name, type(module).__name__, BLOCKED, why=obstacle.why, remedy=obstacle.remedy)
    if refusal is not None:
        return Finding(name, type(module).__name__, BLOCKED, why=f"was refused: {refusal}", remedy=refusal.fix)
    return None


def _watched(name: str, watch: Watch) -> Finding:
    """What capture would do with a layer that owns parameters, or holds them in a parametrization."""
    kind = type(watch.module)
    if not any(getattr(owner._parameters[slot], "requires_grad", False) for owner, slot, _ in watch.slots()):
        return Finding(name, kind.__name__, NOTHING, "frozen")
    if kind in TWINS or kind in _PRIVATE:
        return Finding(name, kind.__name__, TWIN, f"{TWINS.get(kind, kind).__name__}, operation by operation")
    if watch.kind is Kind.OPERATIONS:
        return Finding(name, kind.__name__, SUPPORTED, "bare parameter, operation by operation")
    if watch.kind is Kind.UNIT:
        return Finding(name, kind.__name__, FALLBACK, "each row alone, by torch.func")
    builtin = isinstance(watch.rule, Mapping) and kind not in REGISTERED
    return Finding(name, kind.__name__, SUPPORTED, "built-in rule" if builtin else "registered rule")
