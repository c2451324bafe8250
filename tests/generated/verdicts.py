"""Right, refused or wrong: a subject's run compared with the truth."""

from __future__ import annotations

import copy
import warnings
from dataclasses import dataclass

import torch
from generated.modules import Checkpointed, Positions
from generated.planted import PLANTED
from generated.runs import by_engine, by_grad_samples, by_sums, named_in
from generated.subjects import ALONE, Subject, trains
from generated.truth import Gradients, clipped_sum, length, rows_alone, threshold, untouched
from reference import widened
from torch.utils._pytree import tree_leaves

from dpengine.errors import PrivacyError

TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-6, torch.bfloat16: 2.0**-8}  # of the length of the truth
# What the model rounds by itself: how far plain autograd, row by row in its own dtype, is from float64. The engine runs
# rows together, where other kernels round otherwise, so it may be off by some of these.
ROUNDINGS = 2.5

# In float64, where Grams show that the parts of a row cancel, its norm is raised by what rounding may have taken. Its
# factor is a little smaller then, which is the safe side.
RAISED = 1e-8


@dataclass(frozen=True)
class Verdict:
    """The result of a comparison.

    Attributes:
        kind: ``"right"``, ``"refused"`` or ``"wrong"``.
        why: The reason, for the last two.
        error: How far the engine was from the truth, relative to its length; None if nothing was compared.
        own: The same for plain autograd in the dtype of the model.
        notices: Codes of the notices that were shown.
    """

    kind: str
    why: str = ""
    error: float | None = None
    own: float = 0.0
    notices: tuple[str, ...] = ()


def verdict_on(subject: Subject) -> Verdict:
    """Runs a subject through the engine and through the loop."""
    if subject.planted is not None and (not PLANTED[subject.planted].may_run_alone or _is_refused(subject)):
        return _planted(subject)
    truths, own = rows_alone(subject, wide=True), rows_alone(subject, wide=False)
    max_norm = threshold(truths, subject.settings["quantile"])
    with warnings.catch_warnings(record=True) as shown:
        warnings.simplefilter("always")
        try:
            error, roundings, why = _compared(subject, truths, own, max_norm)
        except PrivacyError as refusal:
            return _refused(subject, refusal)
        except Exception as error:  # whatever it is, it is none of ours
            return Verdict("wrong", _first_line(error))
    notices = tuple(sorted({str(one.message)[:60] for one in shown if "[DPE" in str(one.message)}))
    allowed = TOLERANCE[_narrowest(subject)] + ROUNDINGS * roundings
    if not error <= allowed and not (error <= RAISED and _only_smaller(subject, truths, max_norm)):
        why = f"off by {error:.3g}, where {allowed:.3g} is allowed"
    return Verdict("wrong" if why else "right", why, error, roundings, notices)


def _is_refused(subject: Subject) -> bool:
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
        except PrivacyError as refusal:
            return _refused(subject, refusal)
        except Exception as error:
            return Verdict("wrong", _first_line(error))
    return Verdict("wrong", f"planted {subject.planted!r}, which was not refused")


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {next(iter(str(error).splitlines()), '')}"


def _narrowest(subject: Subject) -> torch.dtype:
    return torch.bfloat16 if subject.settings["autocast"] else subject.settings["dtype"]


def _compared(subject: Subject, truths: list[Gradients], own: list[Gradients], max_norm: float):
    """The error, that of plain autograd, and what else is wrong."""
    settings = subject.settings
    if settings["path"] == "grad_sample":
        found = by_grad_samples(subject)
        return _distance(_joined(found), _joined(truths)), _distance(_joined(own), _joined(truths)), ""
    truth, plain = (clipped_sum(rows, settings["clipping"], max_norm) for rows in (truths, own))
    run = by_engine if settings["path"] == "engine" else by_sums
    found = run(subject, max_norm)
    return _distance(found, truth), _distance(plain, truth), _broken(subject, max_norm)


def _broken(subject: Subject, max_norm: float) -> str:
    """Returns the faults of one row alone, and of no row."""
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
    """Returns True if each row is the true one in float64, up to factors that are a little smaller."""
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
    """The length of the difference over that of the truth."""
    if found.keys() != truth.keys():
        return float("inf")
    return length({name: found[name] - truth[name] for name in truth}) / max(length(truth), 1e-30)


def _refused(subject: Subject, refusal: PrivacyError) -> Verdict:
    """A refusal is right if it names a place and a remedy, and if there is a reason for it."""
    text = f"{type(refusal).__name__}: {refusal}"
    if not refusal.fix:
        return Verdict("wrong", f"refused without a remedy: {text}")
    if not named_in(str(refusal), subject.model):
        return Verdict("wrong", f"refused without a name: {text}")
    if subject.planted is not None:
        expected = PLANTED[subject.planted]
        says = expected.says in text or (subject.settings["mode"] == "whole_model" and "row was run alone" in text)
        as_expected = isinstance(refusal, expected.error) and says
        return Verdict("refused" if as_expected else "wrong", text)
    justified = any(part in text and reason(subject, text) for part, reason in REASONS.items())
    return Verdict("refused" if justified else "wrong", text)


def _has_positions_as_long_as_a_batch(subject: Subject, text: str) -> bool:
    """One axis of indices that is as long as the batch holds rows, as far as can be told: the probe finds it."""
    chunk = None if subject.settings["path"] == "grad_sample" else subject.settings["chunk"]
    rows = min(len(subject.targets_B), chunk or len(subject.targets_B))
    tables = [part for part in subject.model.modules() if isinstance(part, Positions) and part.axes == 1]
    return any(part.inner.num_embeddings <= rows for part in tables)


def _checkpoints_by_running_again(subject: Subject, text: str) -> bool:
    """A block that autograd runs again by itself, used twice: "ghost" has only the norm of its first use by then."""
    blocks = (part for part in subject.model.modules() if isinstance(part, Checkpointed))
    return subject.settings["mode"] == "ghost" and any(block.use_reentrant for block in blocks)


def _needs_samples_alone(subject: Subject, text: str) -> bool:
    """A part that no rule of a layer covers, where no mode runs its samples alone."""
    alone = subject.settings["mode"] in ALONE and subject.settings["path"] != "grad_sample"
    return not (subject.is_covered or alone)


def _rounds_too_far(subject: Subject, text: str) -> bool:
    """Values of the model in half precision that are far from those in float64, so that no rows can be compared."""
    if _narrowest(subject) is not torch.bfloat16:
        return False
    with torch.no_grad():
        narrow = tree_leaves(subject.call(copy.deepcopy(subject.model), subject.tensors))
        wide = tree_leaves(subject.call(copy.deepcopy(subject.model).double(), widened(subject.tensors)))
    errors_B = [
        (n - w).flatten(1).abs().amax(1) / w.flatten(1).abs().amax(1) for n, w in zip(narrow, wide, strict=True)
    ]
    return any(bool((one > 0.04).any()) for one in errors_B)


REASONS = {  # why a subject in which nothing was planted may be refused
    "has no gradient in this step": lambda subject, text: any(f"'{name}'" in text for name in untouched(subject)),
    "was reached a second time in one backward pass": _checkpoints_by_running_again,
    "does not keep the samples of a batch independent": _has_positions_as_long_as_a_batch,
    "gave a different output when each sample was run alone": _rounds_too_far,
    "": _needs_samples_alone,
}
