"""Compares a run of the engine on a subject with the expected sums: right, rejected or wrong."""

from __future__ import annotations

import copy
import warnings
from dataclasses import dataclass

import torch
from generated.modules import Checkpointed, Positions
from generated.planted import PLANTED
from generated.runs import by_engine, by_grad_samples, by_sums, named_in
from generated.subjects import SINGLE_SAMPLE_MODES, Subject, trains
from generated.truth import Gradients, clipped_sum, length, sample_gradients, threshold, untouched
from reference import widened
from torch.utils._pytree import tree_leaves

from dpengine.errors import PrivacyError

TOLERANCE = {
    torch.float64: 1e-12,
    torch.float32: 1e-6,
    torch.bfloat16: 2.0**-8,
}  # relative to the norm of the expected sums
# Allowed error, in multiples of the rounding error of plain autograd on single samples in the model's dtype. The engine
# runs a batch, for which other kernels round differently.
ROUNDINGS = 2.5

# If the terms of a float64 Gram norm cancel, the engine adds a bound on the rounding error to the norm. The clipping
# factor is then slightly too small, which is safe.
RAISED = 1e-8


@dataclass(frozen=True)
class Verdict:
    """The result of a comparison.

    Attributes:
        kind: ``"right"``, ``"rejected"`` or ``"wrong"``.
        why: The reason, for the last two.
        error: Relative error of the engine; None if nothing was compared.
        own: Relative error of plain autograd in the dtype of the model.
        notices: Beginnings of the warnings that have a code.
    """

    kind: str
    why: str = ""
    error: float | None = None
    own: float = 0.0
    notices: tuple[str, ...] = ()


def verdict_on(subject: Subject) -> Verdict:
    """Runs a subject through the engine and through the loop."""
    if subject.planted is not None and (not PLANTED[subject.planted].may_run_alone or _is_rejected(subject)):
        return _planted(subject)
    truths, own = sample_gradients(subject, wide=True), sample_gradients(subject, wide=False)
    max_norm = threshold(truths, subject.settings["quantile"])
    with warnings.catch_warnings(record=True) as shown:
        warnings.simplefilter("always")
        try:
            error, roundings, why = _compared(subject, truths, own, max_norm)
        except PrivacyError as rejection:
            return _rejected(subject, rejection)
        except Exception as error:  # not an error that the engine documents
            return Verdict("wrong", _first_line(error))
    notices = tuple(sorted({str(one.message)[:60] for one in shown if "[DPE" in str(one.message)}))
    allowed = TOLERANCE[_narrowest(subject)] + ROUNDINGS * roundings
    if not error <= allowed and not (error <= RAISED and _only_smaller(subject, truths, max_norm)):
        why = f"off by {error:.3g}, where {allowed:.3g} is allowed"
    return Verdict("wrong" if why else "right", why, error, roundings, notices)


def _is_rejected(subject: Subject) -> bool:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            by_engine(subject, 1.0)
        except Exception:
            return True
    return False


def _planted(subject: Subject) -> Verdict:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            by_engine(subject, 1.0)
        except PrivacyError as rejection:
            return _rejected(subject, rejection)
        except Exception as error:
            return Verdict("wrong", _first_line(error))
    return Verdict("wrong", f"planted {subject.planted!r}, which was not rejected")


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {next(iter(str(error).splitlines()), '')}"


def _narrowest(subject: Subject) -> torch.dtype:
    return torch.bfloat16 if subject.settings["autocast"] else subject.settings["dtype"]


def _compared(subject: Subject, truths: list[Gradients], own: list[Gradients], max_norm: float):
    """Returns the error of the engine, that of plain autograd, and any other fault."""
    settings = subject.settings
    if settings["path"] == "grad_sample":
        found = by_grad_samples(subject)
        return _distance(_joined(found), _joined(truths)), _distance(_joined(own), _joined(truths)), ""
    truth, plain = (clipped_sum(rows, settings["clipping"], max_norm) for rows in (truths, own))
    run = by_engine if settings["path"] == "engine" else by_sums
    found = run(subject, max_norm)
    return _distance(found, truth), _distance(plain, truth), _broken(subject, max_norm)


def _broken(subject: Subject, max_norm: float) -> str:
    """Returns the fault of a batch of one sample or of none, or an empty text."""
    row = subject.seed % len(subject.targets_B)
    added = length(by_sums(subject, max_norm, slice(row, row + 1)))
    if not added <= max_norm:
        return f"one row adds {added!r}, above the threshold {max_norm!r}"
    if subject.seed % 4 == 0 and trains(subject, slice(0, 0)):
        nothing = length(by_sums(subject, max_norm, slice(0, 0)))
        if nothing != 0:
            return f"no row adds {nothing!r}"
    return ""


def _only_smaller(subject: Subject, truths: list[Gradients], max_norm: float) -> bool:
    """Returns True if each float64 sample is right up to a factor slightly below one."""
    if subject.settings["dtype"] is not torch.float64 or subject.settings["path"] == "grad_sample":
        return False
    for i, row in enumerate(truths):
        truth = clipped_sum([row], subject.settings["clipping"], max_norm)
        found = by_sums(subject, max_norm, slice(i, i + 1))
        for name, true in truth.items():
            ratio = float((found[name] * true).sum() / true.square().sum().clamp(min=1e-300))
            rest = float((found[name] - ratio * true).norm())
            if ratio > 1 + 1e-12 or rest > 1e-12 * max(length(truth), 1e-30):
                return False
    return True


def _joined(rows: list[Gradients]) -> Gradients:
    return {f"{i}.{name}": gradient for i, row in enumerate(rows) for name, gradient in row.items()}


def _distance(found: Gradients, truth: Gradients) -> float:
    """Returns the relative error of the gradients."""
    if found.keys() != truth.keys():
        return float("inf")
    return length({name: found[name] - truth[name] for name in truth}) / max(length(truth), 1e-30)


def _rejected(subject: Subject, rejection: PrivacyError) -> Verdict:
    """Judges a rejection: its message must name the module and a fix, and the reason must hold."""
    text = f"{type(rejection).__name__}: {rejection}"
    if not rejection.fix:
        return Verdict("wrong", f"rejected without a fix: {text}")
    if not named_in(str(rejection), subject.model):
        return Verdict("wrong", f"rejected without a name: {text}")
    if subject.planted is not None:
        expected = PLANTED[subject.planted]
        runs_alone = subject.settings["mode"] == "whole_model"
        quoted = expected.message in text or (runs_alone and "sample was run alone" in text)
        as_expected = (isinstance(rejection, expected.error) and quoted) or "in a checkpoint" in text
        return Verdict("rejected" if as_expected else "wrong", text)
    justified = any(part in text and reason(subject, text) for part, reason in REASONS.items())
    return Verdict("rejected" if justified else "wrong", text)


def _has_positions_as_long_as_a_batch(subject: Subject, text: str) -> bool:
    """Returns True if a table of positions may be as long as the batch, which the probe mistakes for samples."""
    chunk = None if subject.settings["path"] == "grad_sample" else subject.settings["chunk"]
    rows = min(len(subject.targets_B), chunk or len(subject.targets_B))
    tables = [part for part in subject.model.modules() if isinstance(part, Positions) and part.axes == 1]
    return any(part.inner.num_embeddings <= rows for part in tables)


def _checkpoints_by_running_again(subject: Subject, text: str) -> bool:
    """Returns True for a reentrant checkpoint in "ghost": its second use comes after the norm was computed."""
    blocks = (part for part in subject.model.modules() if isinstance(part, Checkpointed))
    return subject.settings["mode"] == "ghost" and any(block.use_reentrant for block in blocks)


def _needs_samples_alone(subject: Subject, text: str) -> bool:
    """Returns True if a module has no grad sampler and the mode does not run single samples through units."""
    alone = subject.settings["mode"] in SINGLE_SAMPLE_MODES and subject.settings["path"] != "grad_sample"
    return not (subject.is_covered or alone)


def _rounds_too_far(subject: Subject, text: str) -> bool:
    """Returns True if half-precision outputs are too far from float64 for a comparison of samples."""
    if _narrowest(subject) is not torch.bfloat16:
        return False
    with torch.no_grad():
        narrow = tree_leaves(subject.call(copy.deepcopy(subject.model), subject.tensors))
        wide = tree_leaves(subject.call(copy.deepcopy(subject.model).double(), widened(subject.tensors)))
    errors_B = [
        (n - w).flatten(1).abs().amax(1) / w.flatten(1).abs().amax(1) for n, w in zip(narrow, wide, strict=True)
    ]
    return any(bool((one > 0.04).any()) for one in errors_B)


REASONS = {  # valid reasons to reject a subject without a planted fault
    "has no gradient in this step": lambda subject, text: any(f"'{name}'" in text for name in untouched(subject)),
    "was reached a second time in one backward pass": _checkpoints_by_running_again,
    "does not keep the samples of a batch independent": _has_positions_as_long_as_a_batch,
    "gave a different output when each sample was run alone": _rounds_too_far,
    "": _needs_samples_alone,
}
