"""What stands between a model and private training, layer by layer, before anything is changed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from dpengine.capture.watch import Kind, Watch, watch_list
from dpengine.errors import BatchDependentLossError, PrivacyError, ReductionError, UnsupportedLayerError, suggests_names
from dpengine.grad_samplers.registered import REGISTERED
from dpengine.grad_samplers.table import sampler_for
from dpengine.independence.copy_probe import Company
from dpengine.layers.replacements import TWINS, is_made_of_operations

from .loss import LossFunction, parts_of, refuse_mixing
from .obstacles import obstacle_of

SUPPORTED, TWIN, FALLBACK, BLOCKED, NOTHING = "supported", "twin", "fallback", "blocked", "no trainable parameters"
LAYER, LOSS = "layer", "loss"

_WHOLE = {LAYER: "model", LOSS: "loss"}


@dataclass(frozen=True)
class Finding:
    """What is known about one layer, or about the loss.

    Attributes:
        name: Dotted name in the model, empty for the model itself and for the loss.
        type: Name of its class, or of the loss function.
        verdict: ``"supported"``, ``"twin"``, ``"fallback"``, ``"blocked"`` or ``"no trainable parameters"``.
        how: The rule that gives its per-sample gradients.
        why: For a blocked layer, what it does, as the rest of a sentence that begins with its name.
        remedy: For a blocked layer, what to do.
        part: ``"layer"`` or ``"loss"``.
    """

    name: str
    type: str
    verdict: str
    how: str = ""
    why: str = ""
    remedy: str = ""
    part: str = LAYER

    @property
    def where(self) -> str:
        """Name and type, for messages."""
        return f"{self.name or f'The {_WHOLE[self.part]}'} ({self.type})"


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
            BatchDependentLossError: The same, where the first is the loss.
        """  # noqa: DOC502 - one of the two
        if self.ok:
            return
        first, *others = self.blocked
        also = f" Also blocked: {', '.join(other.where for other in others)}." if others else ""
        kind: type[PrivacyError] = BatchDependentLossError if first.part == LOSS else UnsupportedLayerError
        raise kind(f"{first.where} {first.why}.{also}", fix=first.remedy)

    def __str__(self) -> str:
        header = ("layer", "type", "verdict", "how")
        rows = [header, *((f.name or f"({_WHOLE[f.part]})", f.type, f.verdict, f.how) for f in self.findings)]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
        notes = [f"{finding.where} {finding.why}. {finding.remedy}" for finding in self.blocked]
        return "\n".join([lines[0], "-" * max(map(len, lines)), *lines[1:], *([""] if notes else []), *notes])


@suggests_names
def check(
    model: nn.Module,
    loss_fn: LossFunction | None = None,
    batch: tuple[Any, Any] | None = None,
    *,
    loss_reduction: str = "mean",
) -> CheckReport:
    """Says for each layer of a model how its per-sample gradients are found, or why it cannot be trained privately.

    Looks at layers one by one. That a layer of unknown kind, or the loss, keeps the rows of a batch apart is something
    that only a batch can show. With ``loss_fn`` and ``batch`` the model, in train mode, runs on the batch again and
    again, while some of its rows get the data of others; the loss is asked the same, and each of two rows also alone.
    The first layer in which a row notices other rows, or the batch before, is blocked, and so is such a loss. What the
    data of the batch do not bring about is not found: a mean over tokens needs rows of different lengths.

    The model is not changed. The batch runs on a copy of it.

    Args:
        model: The model, before or after ``fix``.
        loss_fn: Called as ``loss_fn(model(inputs), targets)``.
        batch: ``(inputs, targets)`` with at least two rows, on axis 0; inputs may be a tensor, a tuple of positional or
            a mapping of keyword inputs.
        loss_reduction: What will be declared to ``make_private``: ``"mean"`` or ``"sum"``.

    Returns:
        A report with one row for each layer: what owns parameters, what has no children, and all that is blocked.

    Raises:
        TypeError: If the model is no ``torch.nn.Module``, or only one of ``loss_fn`` and ``batch`` is given, or one
            is of a wrong kind.
        ValueError: If the batch has fewer than two rows or the model gives none, or ``loss_reduction`` is not known.
    """  # noqa: DOC502 - what is called raises on our behalf
    if not isinstance(model, nn.Module):
        raise TypeError(f"check: model is {torch.typename(model)}; pass an instance of torch.nn.Module.")
    findings = _of_layers(model)
    if loss_fn is not None or batch is not None:
        inputs, targets, size = parts_of("check", model, loss_fn, batch, loss_reduction)
        assert loss_fn is not None  # parts_of has refused that
        findings += _of_a_batch(findings, model, loss_fn, inputs, targets, size, loss_reduction)
    return CheckReport(tuple(findings))


def _of_a_batch(
    known: list[Finding], model: nn.Module, loss_fn: LossFunction, inputs: Any, targets: Any, size: int, reduction: str
) -> list[Finding]:
    """What a batch shows beside what is known."""
    found = []
    coupling, outputs = Company(model, inputs, size).ask()
    if coupling is not None and coupling.name not in {one.name for one in known if one.verdict == BLOCKED}:
        found.append(Finding(coupling.name, coupling.type, BLOCKED, why=coupling.why, remedy=coupling.remedy))
    try:
        refuse_mixing(outputs, targets, loss_fn, size, reduction)
    except (BatchDependentLossError, ReductionError) as refusal:
        name = getattr(loss_fn, "__name__", type(loss_fn).__name__)
        said = str(refusal).removeprefix(f"[{refusal.code}] ").removesuffix(refusal.fix).rstrip(" .")
        found.append(Finding("", name, BLOCKED, why=f"was refused: {said}", remedy=refusal.fix, part=LOSS))
    return found


def _of_layers(model: nn.Module) -> list[Finding]:
    """What is known of each layer by itself."""
    lookup = _Lookup(model.training)
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
    return findings


class _Lookup:
    """``sampler_for``, which remembers what it refused."""

    def __init__(self, model_trains: bool) -> None:
        self.model_trains = model_trains
        self.refusals: dict[nn.Module, UnsupportedLayerError] = {}

    def __call__(self, module: nn.Module) -> Any:
        if obstacle_of(module, model_trains=self.model_trains) is not None:
            return {}
        try:
            return sampler_for(module)
        except UnsupportedLayerError as refusal:
            self.refusals[module] = refusal
            return {}


def _blocked(name: str, module: nn.Module, lookup: _Lookup) -> Finding | None:
    obstacle = obstacle_of(module, model_trains=lookup.model_trains)
    refusal = lookup.refusals.get(module)
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
    if kind in TWINS or (watch.kind is Kind.OPERATIONS and is_made_of_operations(watch.module)):
        return Finding(name, kind.__name__, TWIN, f"{TWINS.get(kind, kind).__name__}, operation by operation")
    if watch.kind is Kind.OPERATIONS:
        return Finding(name, kind.__name__, SUPPORTED, "bare parameter, operation by operation")
    if watch.kind is Kind.UNIT:
        return Finding(name, kind.__name__, FALLBACK, "each row alone, by torch.func")
    builtin = isinstance(watch.rule, Mapping) and kind not in REGISTERED
    return Finding(name, kind.__name__, SUPPORTED, "built-in rule" if builtin else "registered rule")
