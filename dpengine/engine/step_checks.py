"""Checks a backward pass or a step against the state of the logical batch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

from dpengine.errors import (
    BatchMismatchError,
    DetachedError,
    MissingGradientError,
    RepeatedBackwardError,
    StaleGradientError,
    TicketError,
)
from dpengine.grad_modes.strategy import KEEP_THE_BATCH_FIRST
from dpengine.plan.run_plan import RunPlan

from .batch_state import BatchState, Stage
from .grad_writer import GradWriter

if TYPE_CHECKING:
    from .pass_clipper import PassClipper, RecordedPass

_IN_TURN = (
    "Use each batch before the next one is fetched: no list(loader), and no prefetcher around it. "
    "DataLoader(num_workers=2) reads ahead by itself. A trainer that fetches ahead declares it: "
    "dpengine.engine.fetch_ahead(engine, batches)."
)


class Step(Protocol):
    """The attributes of `dpengine.engine.step.PrivateStep` that the checks read."""

    batches: BatchState
    plan: RunPlan
    passes: PassClipper
    writer: GradWriter
    unused_parameters: str


def step_used_twice(step: int) -> TicketError:
    """The error for a logical batch with a step number that was used before."""
    return TicketError(  # noise is addressed by the step: two steps with one address would have the same noise
        f"Step {step} was handed out before in this run; its noise must not be used again.",
        fix="Do not set the loader back: detach the model and call make_private again.",
    )


def pass_inside_update() -> TicketError:
    """The error for a backward pass that runs between the charge of a step and the end of its update."""
    return TicketError(
        "A backward pass ran inside optimizer.step(), as by a hook of the optimizer. It is not accounted.",
        fix="Run it before or after optimizer.step().",
    )


def check_backward(step: Step, recorded: RecordedPass) -> None:
    """Raises if a backward pass does not belong to the current physical batch."""
    if step.batches.stage is Stage.CLOSED:
        raise TicketError(
            "Backward ran over a forward pass from before the model was detached; it leaves no gradients.",
            fix="Run the forward pass again.",
        )
    if step.batches.stage is Stage.DISCARDED:
        raise TicketError(
            "This logical batch was given up: an error ended it, a chunk of it was left out, as by a loop that fetches "
            "batches ahead, or zero_grad() discarded it.",
            fix=f"Go on with the next batch of the loader. {_IN_TURN}",
        )
    if step.batches.stage is Stage.IDLE or (step.batches.stage is Stage.RELEASED and not step.batches.batches):
        raise TicketError(
            "Backward ran on rows that did not come from the private loader of this model: it has handed out no batch "
            "that waits.",
            fix="Iterate over the loader that make_private returned with this model. Of several private models, each "
            "has a loader of its own, which accounts for the batches of that one.",
        )
    if step.batches.stage is Stage.RELEASED or step.batches.done:
        raise RepeatedBackwardError(
            f"The {step.batches.samples} rows of this batch were used in 2 backward passes in one step; each would "
            "count fully.",
            fix="Add the losses: (a + b).backward().",
        )
    check_stale(step)
    if recorded.samples != step.batches.samples and len(set(recorded.mode.rows.values())) == 1:
        raise _other_batch(step, recorded)


def _other_batch(step: Step, recorded: RecordedPass) -> BatchMismatchError:
    """The error for samples on whose number all layers agree, and which are not those of the current batch."""
    name, seen, drawn = next(iter(recorded.mode.rows)), recorded.samples, step.batches.samples
    if step.batches.passed_over:
        why, fix = "batches were fetched ahead: the one before the newest went through no backward pass", _IN_TURN
    elif seen < drawn:
        why = "rows were left out between the loader and the model, as by x[mask], or these are not its rows"
        fix = (
            "Give the model all rows that the loader gave, and multiply the losses of those that shall not count by 0, "
            "as in (losses * mask).mean(); or leave them out of the data set, before make_private."
        )
    else:
        why = "something duplicates or merges rows between the loader and the model, or these are not its rows"
        fix = "Augment rows in the data set, one for one; for several views of a row add their losses in one backward."
    return BatchMismatchError(
        f"Layer '{name}', as all others, saw {seen} rows, and the loader handed out {drawn}: {why}; or axis 0 is not "
        "the batch.",
        fix=f"{fix} {KEEP_THE_BATCH_FIRST}",
    )


def check_stale(step: Step) -> None:
    """Raises if the gradients of the last step were not cleared."""
    if step.writer.stale:
        raise StaleGradientError(
            "optimizer.zero_grad() was not called after the last step.", fix="Add it at the top of the loop."
        )


def check_step(step: Step) -> None:
    """Raises if there is no logical batch to step."""
    if step.batches.stage is Stage.CLOSED:
        raise DetachedError(
            "The model was detached while step() ran, by a closure or a hook; its batch is charged, and not released.",
            fix="Call engine.detach(model) between two steps.",
        )
    if step.batches.stage is Stage.RELEASED:
        raise StaleGradientError(
            "step() was called twice for one batch, or optimizer.zero_grad() was not called after the last step.",
            fix="Call optimizer.zero_grad() at the top of the loop, and step() once for each batch.",
        )
    if cause := _why_not_ready(step) or step.plan.why_not_joined(step.batches.steps):
        raise TicketError(f"step() has nothing to release: {cause}")


def check_unused(step: Step, missing: Sequence[str]) -> None:
    """Raises if parameters have no gradient in a logical batch with samples, unless that was allowed."""
    if step.unused_parameters == "error" and any(sum(batch.rows) for batch in step.batches.batches):
        others = f" (nor did {len(missing) - 1} others)" if len(missing) > 1 else ""
        raise MissingGradientError(
            f"Parameter '{missing[0]}' took no part in this step{others}.",
            fix=f"Freeze it: model.get_parameter('{missing[0]}').requires_grad_(False), or pass "
            "unused_parameters='zero' to dpengine.PrivacyEngine.make_private.",
        )


def _why_not_ready(step: Step) -> str:
    if step.batches.stage is Stage.DISCARDED:
        return "this logical batch was given up; go on with the next one."
    if step.batches.stage is Stage.IDLE and step.batches.external:
        return "no backward pass has ended since the last step. Call loss.backward() on outputs of the model."
    if step.batches.stage is Stage.IDLE:
        return "no batch was drawn. Iterate over the loader that make_private returned."
    if step.batches.done or step.batches.samples == 0:
        return ""
    if step.passes.capture.leaks or not step.passes.model.training:
        return (
            "the model was in eval mode, or backward went around it. Call model.train() before the forward pass, and "
            "the model that make_private was given."
        )
    return "no backward pass ran over this batch in train mode. Call loss.backward() before optimizer.step()."
