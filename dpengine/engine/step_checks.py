"""Checks a backward pass or a step against the state of the logical batch."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

from dpengine.accounting.accountant import epsilon_of
from dpengine.accounting.ledger import Charge
from dpengine.accounting.rounding import round_up
from dpengine.capture.tap import OTHER_PASSES
from dpengine.errors import (
    AccountingRefusedError,
    BatchMismatchError,
    BatchStateError,
    DetachedError,
    MissingGradientError,
    RepeatedBackwardError,
    StaleGradientError,
    notice,
)
from dpengine.grad_modes.strategy import KEEP_THE_BATCH_FIRST
from dpengine.plan.run_plan import RunPlan

from .batch_state import BatchState, Stage
from .budget import Budget
from .grad_writer import GradWriter

if TYPE_CHECKING:
    from .pass_clipper import PassClipper, RecordedPass

_KEEP_ORDER = (
    "Use each batch before you fetch the next one: do not call list(loader), and do not wrap the loader in a "
    "prefetcher; DataLoader(num_workers=2) prefetches by itself. If the trainer fetches one batch ahead, as accelerate "
    "does, call dpengine.engine.fetch_ahead(engine, 1)."
)

PLACEHOLDER_NOTE = (
    "dpengine: No sample was drawn for this batch, and the loader returned a placeholder sample, of zeros unless "
    "example_input= was given. If the model cannot process zeros, pass example_input= to make_private: a made-up "
    "example as the data set would return it."
)


class Step(Protocol):
    """The attributes of `dpengine.engine.step.PrivateStep` that the checks read."""

    batches: BatchState
    plan: RunPlan
    budget: Budget
    passes: PassClipper
    writer: GradWriter
    unused_parameters: str


def step_used_twice(step: int) -> BatchStateError:
    """Error for a logical batch with a step number that was used before."""
    return BatchStateError(  # noise depends on the step number, so two steps with the same number have the same noise
        f"The loader returned step {step} of this run a second time. Its noise must not be reused.",
        fix="Do not rewind the loader: detach the model and call make_private again.",
    )


def pass_inside_update() -> BatchStateError:
    """Error for a backward pass that runs between the charge of a step and the end of its update."""
    return BatchStateError(
        "A backward pass ran inside optimizer.step(), for example in a hook of the optimizer. It is not accounted.",
        fix="Run the backward pass before or after optimizer.step().",
    )


def check_backward(step: Step, recorded: RecordedPass) -> None:
    """Raises if a backward pass does not belong to the current physical batch."""
    if step.batches.stage is Stage.CLOSED:
        raise BatchStateError(
            "The forward pass of this backward ran before the model was detached, so it has no gradients.",
            fix="Run the forward pass again.",
        )
    if step.batches.stage is Stage.DISCARDED:
        raise BatchStateError(
            "This logical batch was discarded: an error ended it, zero_grad() cleared it, or a physical batch was left "
            "out, for example by a loop that fetches ahead.",
            fix=f"Continue with the next batch of the loader. {_KEEP_ORDER}",
        )
    if step.batches.stage is Stage.IDLE or (step.batches.stage is Stage.RELEASED and not step.batches.logical_batches):
        raise BatchStateError(
            "Backward ran on samples that did not come from the private loader of this model: no batch of that loader "
            "awaits a backward pass.",
            fix="Iterate over the loader that make_private returned with this model, and create a new iterator in each "
            "epoch: itertools.cycle repeats old batches. Each private model has its own loader.",
        )
    if step.batches.stage is Stage.RELEASED or step.batches.done:
        raise RepeatedBackwardError(
            f"The {step.batches.samples} samples of this batch were used in 2 backward passes in one step; each pass "
            "would be clipped separately.",
            fix=f"Add the losses: (a + b).backward(). {OTHER_PASSES}",
        )
    check_stale(step)
    if recorded.samples != step.batches.samples and len(set(recorded.mode.rows.values())) == 1:
        raise _other_batch(step, recorded)


def _other_batch(step: Step, recorded: RecordedPass) -> BatchMismatchError:
    """Error for a pass in which all layers saw the same number of samples, but not that of the current batch."""
    name, seen, drawn = next(iter(recorded.mode.rows)), recorded.samples, step.batches.samples
    if step.batches.passed_over:
        why, fix = "batches were fetched ahead: the previous batch had no backward pass", _KEEP_ORDER
    elif seen < drawn:
        why = "samples were left out between the loader and the model, as with x[mask], or are from elsewhere"
        fix = (
            "Pass all samples of the batch to the model, and multiply the losses of those to exclude by 0, as in "
            "(losses * mask).mean(); or leave them out of the data set before make_private."
        )
    else:
        why = "samples were duplicated or merged between the loader and the model, or are from elsewhere"
        fix = (
            "Augment each example in the data set instead. For several views of an example, or both texts of a "
            "preference, call the model once for each, and combine the results of each sample in the loss: "
            "(loss_fn(model(a), y) + loss_fn(model(b), y)).backward(). A contrastive loss, such as that of SimCLR, "
            "compares samples, and the nodes of a graph share its edges: neither can be trained with this guarantee."
        )
    return BatchMismatchError(
        f"All layers, such as '{name}', saw {seen} samples, and the loader returned {drawn}: {why}, or axis 0 is not "
        "the batch.",
        fix=f"{fix} {KEEP_THE_BATCH_FIRST}",
    )


def check_stale(step: Step) -> None:
    """Raises if the gradients of the last step were not cleared."""
    if step.writer.stale:
        raise StaleGradientError(
            "optimizer.zero_grad() was not called after the last step.",
            fix="Add it at the top of the loop. accelerator.accumulate() skips it: pass accumulation_steps= to "
            "make_private instead.",
        )


def check_step(step: Step) -> None:
    """Raises if there is no logical batch to step."""
    if step.batches.stage is Stage.CLOSED:
        raise DetachedError(
            "The model was detached during step(), by a closure or a hook; its batch is charged but not released.",
            fix="Call engine.detach(model) between two steps.",
        )
    if step.batches.stage is Stage.RELEASED:
        raise StaleGradientError(
            "step() was called twice for one batch, or optimizer.zero_grad() was not called after the last step.",
            fix="Call optimizer.zero_grad() at the top of the loop, and step() once for each batch.",
        )
    if cause := _why_not_ready(step) or step.plan.why_not_merged(step.batches.steps):
        raise BatchStateError(f"step() has no complete batch: {cause}")


def check_unused(step: Step, missing: Sequence[str]) -> None:
    """Raises if parameters have no gradient in a logical batch with samples, unless this is allowed."""
    if step.unused_parameters == "error" and any(sum(batch.sizes) for batch in step.batches.logical_batches):
        number = f" ({len(missing)} parameters have none)" if len(missing) > 1 else ""
        raise MissingGradientError(
            f"Parameter '{missing[0]}' has no gradient in this step{number}.",
            fix=f"Freeze it: model.get_parameter('{missing[0]}').requires_grad_(False), or pass "
            "unused_parameters='zero' to dpengine.PrivacyEngine.make_private.",
        )


def _why_not_ready(step: Step) -> str:
    if step.batches.stage is Stage.DISCARDED:
        return "this logical batch was discarded. Continue with the next one."
    if step.batches.stage is Stage.IDLE and step.batches.external:
        return "no backward pass has ended since the last step. Call loss.backward() on outputs of the model."
    if step.batches.stage is Stage.IDLE:
        return "the loader returned no batch. Iterate over the loader that make_private returned."
    if step.batches.done or step.batches.samples == 0:
        return ""
    if step.passes.capture.leaks or not step.passes.model.training:
        return (
            "the backward pass bypassed the hooks: the forward pass ran in eval mode, or the loss does not depend on "
            "the model. Call the model as self(x), not self.forward(x). Call model.train() before the forward pass, "
            "and use the model that was passed to make_private."
        )
    return (
        "no backward pass ran over this batch in train mode. Call loss.backward() before optimizer.step(), on outputs "
        "of the model that make_private returned and not of a new one, as after a notebook cell was run twice."
    )


def warn_left_out(step: Step) -> None:
    """Warns that a batch was drawn but not used for training."""
    notice(
        "DPE006",
        "A batch was drawn from the private loader but not trained on. Its privacy cost is accounted anyway. For the "
        "number of batches use len(loader), which draws none. To inspect data, iterate over your own DataLoader. To "
        "leave samples out, multiply their losses by 0 instead of skipping the batch with continue.",
        key="left out",
        of=step,
    )


def warn_ended(step: Step, returned: int, *, ends: bool) -> None:
    """Warns that the loader ends, or that it continues after all planned steps.

    Does not warn if the loader ends within an epoch because all planned batches were returned.
    """
    planned, target = step.budget.planned_steps, step.budget.target_epsilon
    budget = "" if target is None else f" and the budget of epsilon {target:g} is used up"
    if not ends and target is not None:
        return  # further steps fit the budget, or have a warning of their own
    if not ends:
        text = (
            f"The {planned:,} planned steps are taken, and the loader continues, because the run has no target. "
            "Epsilon grows with each step. End the loop here, or pass target_epsilon= to make_private."
        )
    elif target is not None and (planned is None or returned < planned):
        of_planned = "" if planned is None else f" of {planned:,} planned"
        text = (
            f"The loader ended after {returned:,}{of_planned} batches: another step would exceed epsilon {target:g}. "
            "Batches that were not trained on, or that went into one step together, cost more than planned: call "
            "optimizer.step() for each batch, or pass accumulation_steps= to make_private."
        )
    elif planned is not None and returned % step.plan.sampling.steps_per_epoch == 0:  # at the start of an epoch
        text = (
            f"The loader returned no batch: the {planned:,} planned steps are taken{budget}. To train longer, create "
            "model and optimizer again, and pass more epochs= or steps= to make_private."
        )
    else:
        return
    notice("DPE011", text, key=f"ended {returned < (planned or returned + 1)}", of=step)


def warn_merged(step: Step, count: int) -> None:
    """Warns that one step used several sampled batches. States the cost of this and of accumulating one batch."""
    notice("DPE006", lambda: _merged_text(step, count), of=step)


def _merged_text(step: Step, count: int) -> str:
    """Returns the text of the warning. Slow, because it computes epsilon twice."""
    used = f"{count} sampled batches went into one step, and each of them is accounted"
    if step.batches.external:
        return f"{used}. One step for each backward pass costs less privacy."
    plan, budget, event = step.plan, step.budget, step.plan.event()
    size = round(count * plan.sampling.expected_batch_size)
    remedy = (
        f"Pass DataLoader(..., batch_size={size}) and accumulation_steps={count} to make_private, and do not divide "
        "the loss: the loader then returns each batch in parts."
    )
    rate = event.inclusion_rate
    if rate is None or rate * count > 1:
        return f"{used}. One batch in {count} parts costs less privacy. {remedy}"
    steps = max(1, (budget.planned_steps or plan.sampling.steps_per_epoch) // count)
    in_parts = dataclasses.replace(event, sample_rate=rate * count)  # type: ignore[call-arg, arg-type]
    try:
        merged_epsilon, epsilon_in_parts = (
            round_up(epsilon_of(charges, budget.delta, accountant=budget.accountant, relation=plan.relation))
            for charges in ((Charge(plan.event(count), steps * count),), (Charge(in_parts, steps),))
        )
    except AccountingRefusedError:
        return f"{used}. One batch in {count} parts costs less privacy. {remedy}"
    return (
        f"{used}: epsilon is {merged_epsilon} after {steps:,} such steps, at delta {budget.delta:.3g}. With one batch "
        f"in {count} parts it is {epsilon_in_parts}. {remedy}"
    )
