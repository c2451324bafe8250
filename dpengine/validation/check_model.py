"""Checks layer by layer whether a model can be trained privately. Does not change the model."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from dpengine.capture.watch import Kind, Watch, watch_list
from dpengine.errors import BatchDependentLossError, PrivacyError, ReductionError, UnsupportedLayerError, keyword_hints
from dpengine.grad_samplers.registered import REGISTERED
from dpengine.grad_samplers.table import sampler_for
from dpengine.independence.copy_probe import CopyIndependenceCheck
from dpengine.layers.replacements import REPLACEMENTS, is_replacement_layer

from .loss import (
    check_independent_loss,
    compare_model_loss,
    gradients_at,
    is_model_loss,
    validated_batch,
    with_batch_first,
)
from .obstacles import obstacle_of
from .sequence_first import LossFunction

SUPPORTED, TWIN, FALLBACK, BLOCKED, NOTHING = "supported", "twin", "fallback", "blocked", "no trainable parameters"
LAYER, LOSS = "layer", "loss"

_SUBJECTS = {LAYER: "model", LOSS: "loss"}


@dataclass(frozen=True)
class Finding:
    """Result for one layer, or for the loss.

    Attributes:
        name: Dotted name of the layer; empty for the model itself and for the loss.
        type: Class name of the layer, or name of the loss function.
        verdict: ``"supported"``, ``"twin"`` (has a batch-first replacement layer), ``"fallback"``, ``"blocked"`` or
            ``"no trainable parameters"``.
        how: Method that computes the per-sample gradients.
        why: Reason why a layer is blocked, as the predicate of a sentence whose subject is the layer.
        remedy: Recommended fix for a blocked layer.
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
        return f"{self.name or f'The {_SUBJECTS[self.part]}'} ({self.type})"


@dataclass(frozen=True)
class CheckReport:
    """Findings of `check`, in the order of ``model.named_modules()``. ``str(report)`` is a table."""

    findings: tuple[Finding, ...]

    @property
    def blocked(self) -> tuple[Finding, ...]:
        """Findings that prevent private training."""
        return tuple(finding for finding in self.findings if finding.verdict == BLOCKED)

    @property
    def ok(self) -> bool:
        """True if nothing is blocked."""
        return not self.blocked

    def raise_if_blocked(self) -> None:
        """Raises if the model or the loss is blocked.

        Raises:
            UnsupportedLayerError: If a layer is blocked. Contains the reason and remedy of the first one, and the names
                of the others.
            BatchDependentLossError: If the first blocked finding is the loss.
        """  # noqa: DOC502 - raised as a variable
        if self.ok:
            return
        first, *others = self.blocked
        also = f" Also blocked: {', '.join(other.where for other in others)}." if others else ""
        kind: type[PrivacyError] = BatchDependentLossError if first.part == LOSS else UnsupportedLayerError
        raise kind(f"{first.where} {first.why}.{also}", fix=first.remedy)

    def __str__(self) -> str:
        header = ("layer", "type", "verdict", "how")
        rows = [header, *((f.name or f"({_SUBJECTS[f.part]})", f.type, f.verdict, f.how) for f in self.findings)]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
        notes = [f"{finding.where} {finding.why}. {finding.remedy}" for finding in self.blocked]
        return "\n".join([lines[0], "-" * max(map(len, lines)), *lines[1:], *([""] if notes else []), *notes])


@keyword_hints
def check(
    model: nn.Module,
    loss_fn: LossFunction | None = None,
    batch: Any = None,
    *,
    loss_reduction: str = "mean",
    batch_first: bool = True,
) -> CheckReport:
    """Reports for each layer of a model how its per-sample gradients are computed, or why it is not supported.

    Without a batch, layers are checked one by one. With ``loss_fn`` and ``batch``, the check also finds layers and
    losses that do not keep samples independent. For this, the model runs repeatedly on the batch in train mode, with
    the data of other samples in some samples. The loss is checked in the same way, and also on each of two samples
    alone. The first layer whose output for a sample depends on other samples or on the previous batch is blocked. A
    loss that depends on other samples is blocked, too. A dependence that has no effect on this batch is not found. For
    example, a mean over tokens is found only with samples of different lengths.

    The model is not changed. The batch runs on a copy of the model.

    Args:
        model: The model, before or after ``fix``.
        loss_fn: Called as ``loss_fn(model(inputs), targets)``. It may return a loss that the model computes.
        batch: ``(inputs, targets)`` with at least two samples. Inputs may be a tensor, a tuple of positional inputs or
            a mapping of keyword inputs. A single mapping is used as inputs and as targets.
        loss_reduction: Same value as for ``make_private``: ``"mean"`` or ``"sum"``.
        batch_first: Same value as for ``make_private``: False if the batch is on axis 1 of the inputs.

    Returns:
        A report with one finding for each module that owns parameters, has no children or is blocked, and for a
        blocked loss.

    Raises:
        TypeError: If the model is not a ``torch.nn.Module``, if only one of ``loss_fn`` and ``batch`` is passed, or if
            one of them has the wrong type.
        ValueError: If the batch has fewer than two samples, the outputs do not have the batch size of the targets, or
            ``loss_reduction`` is unknown.
    """  # noqa: DOC502 - raised by called functions
    if not isinstance(model, nn.Module):
        raise TypeError(f"check: model is {torch.typename(model)}; pass an instance of torch.nn.Module.")
    findings = _layer_findings(model)
    if loss_fn is not None or batch is not None:
        wrapped, loss_fn, batch = with_batch_first("check", model, loss_fn, batch, batch_first=batch_first)  # type: ignore[arg-type]
        parts = validated_batch("check", wrapped, loss_fn, batch, loss_reduction)
        findings += _batch_findings(findings, wrapped, loss_fn, *parts, loss_reduction, batch_first=batch_first)
    return CheckReport(tuple(findings))


def _batch_findings(
    layer_findings: list[Finding],
    model: nn.Module,
    loss_fn: LossFunction,
    inputs: Any,
    targets: Any,
    size: int,
    reduction: str,
    *,
    batch_first: bool,
) -> list[Finding]:
    """Returns the additional findings from running a batch."""
    findings = []
    blocked = {finding.name for finding in layer_findings if finding.verdict == BLOCKED}
    coupling, outputs = CopyIndependenceCheck(model, inputs, size).run()
    name = "" if coupling is None else coupling.name if batch_first else coupling.name.removeprefix("model").lstrip(".")
    if coupling is not None and name not in blocked:
        findings.append(Finding(name, coupling.type, BLOCKED, why=coupling.why, remedy=coupling.remedy))
    try:
        if is_model_loss(gradients_at(outputs, loss_fn, targets)[1]):
            without_dropout = copy.deepcopy(model).eval()
            compare_model_loss(without_dropout, loss_fn, inputs, targets, size, reduction)
        else:
            check_independent_loss(outputs, targets, loss_fn, size, reduction, batch_first=batch_first)
    except (BatchDependentLossError, ReductionError) as error:
        name = getattr(loss_fn, "__name__", type(loss_fn).__name__)
        message = str(error).removeprefix(f"[{error.code}] ").removesuffix(error.fix).rstrip(" .")
        findings.append(Finding("", name, BLOCKED, why=f"is not supported: {message}", remedy=error.fix, part=LOSS))
    return findings


def _layer_findings(model: nn.Module) -> list[Finding]:
    """Returns the findings that need no batch."""
    lookup = _Lookup(model.training)
    watches = {watch.module: watch for watch in watch_list(model, lookup, lambda module: None)}
    in_units = {m for watch in watches.values() if watch.kind is Kind.UNIT for m in watch.module.modules()}
    findings = []
    for name, module in model.named_modules():
        watch = watches.get(module)
        finding = _blocked(name, module, lookup) or (None if watch is None else _watched(name, watch))
        if finding is None and module not in in_units and not any(True for _ in module.children()):
            finding = Finding(name, type(module).__name__, NOTHING)
        if finding is not None:
            findings.append(finding)
    if not any(parameter.requires_grad for parameter in model.parameters()):
        why = "has no trainable parameter, so there is nothing to train"
        remedy = "Unfreeze the parameters to train: model.requires_grad_(True)"
        findings.insert(0, Finding("", type(model).__name__, BLOCKED, why=why, remedy=remedy))
    return findings


class _Lookup:
    """Calls ``sampler_for``, and stores errors instead of raising them. Returns no sampler for blocked layers."""

    def __init__(self, model_trains: bool) -> None:
        self.model_trains = model_trains
        self.errors: dict[nn.Module, UnsupportedLayerError] = {}

    def __call__(self, module: nn.Module) -> Any:
        if obstacle_of(module, model_trains=self.model_trains) is not None:
            return {}
        try:
            return sampler_for(module)
        except UnsupportedLayerError as error:
            self.errors[module] = error
            return {}


def _blocked(name: str, module: nn.Module, lookup: _Lookup) -> Finding | None:
    obstacle = obstacle_of(module, model_trains=lookup.model_trains)
    error = lookup.errors.get(module)
    if obstacle is not None:
        return Finding(name, type(module).__name__, BLOCKED, why=obstacle.why, remedy=obstacle.remedy)
    if error is not None:
        return Finding(name, type(module).__name__, BLOCKED, why=f"is not supported: {error}", remedy=error.fix)
    return None


def _watched(name: str, watch: Watch) -> Finding:
    """Returns the finding for a layer that owns parameters, possibly through a parametrization."""
    kind = type(watch.module)
    if not any(getattr(owner._parameters[slot], "requires_grad", False) for owner, slot, _ in watch.slots()):
        return Finding(name, kind.__name__, NOTHING, "frozen")
    if kind in REPLACEMENTS or (watch.kind is Kind.OPERATIONS and is_replacement_layer(watch.module)):
        return Finding(name, kind.__name__, TWIN, f"{REPLACEMENTS.get(kind, kind).__name__}, operation by operation")
    if watch.kind is Kind.OPERATIONS:
        return Finding(name, kind.__name__, SUPPORTED, "bare parameter, operation by operation")
    if watch.kind is Kind.UNIT:
        return Finding(name, kind.__name__, FALLBACK, "each sample separately, by torch.func")
    builtin = isinstance(watch.rule, Mapping) and kind not in REGISTERED
    return Finding(name, kind.__name__, SUPPORTED, "built-in rule" if builtin else "registered rule")
