"""Private step of a ``DPOptimizer``, in the phases and with the attributes of Opacus."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.optim import Optimizer

from dpengine.accounting.events import Relation
from dpengine.accounting.ledger import Ledger
from dpengine.capture.capture import CaptureState
from dpengine.clipping.policy import AbstractClip
from dpengine.compat.opacus.grad_sample.gsm_base import pending_passes_of
from dpengine.compat.opacus.grad_sample.pending_passes import PendingPasses
from dpengine.distributed.data_parallel import check_equal_weights
from dpengine.distributed.detect import topology_of
from dpengine.distributed.topology import SINGLE, Topology
from dpengine.engine.batch_state import BatchState, Stage
from dpengine.engine.build_plan import name_for, source_for
from dpengine.engine.optimizer import check_not_replaced, check_optimizer
from dpengine.engine.pass_clipper import REDUCTIONS
from dpengine.engine.step import PrivateStep
from dpengine.errors import BatchStateError, MissingGradientError, ParameterMismatchError, ScaledGradientError
from dpengine.grad_modes.flat_buffer import FlatBuffer
from dpengine.noise.keyed_streams import DEFAULT_KIND, SECURE_KIND
from dpengine.noise.source import NoiseSource
from dpengine.plan.run_plan import RunPlan
from dpengine.sampling.external import ExternalBatches
from dpengine.sampling.scheme import Draws

from .utils import params
from .written_sums import WrittenSums, reject_or_adopt

if TYPE_CHECKING:
    from .optimizer import DPOptimizer


def check_arguments(optimizer: Any, loss_reduction: str, size: float | None, generator: Any, secure: bool) -> None:
    """Raises TypeError or ValueError for invalid arguments of an optimizer."""
    if not isinstance(optimizer, Optimizer):
        raise TypeError(f"optimizer is {torch.typename(optimizer)}; pass an optimizer of torch.optim.")
    if not hasattr(optimizer, "original_optimizer"):  # a user may wrap a private optimizer on purpose
        check_optimizer(optimizer)
    if loss_reduction not in REDUCTIONS:
        raise ValueError(f"loss_reduction={loss_reduction!r} is unknown. Choose one of: 'mean', 'sum'.")
    if loss_reduction == "mean" and size is None:
        raise ValueError("expected_batch_size=None: loss_reduction='mean' divides by it. Pass the batch size.")
    if secure and generator is not None:
        raise ValueError("secure_mode=True with a generator: a seed makes noise reproducible. Pass only one of them.")


def check_settings(optimizer: DPOptimizer) -> None:
    """Raises ValueError if a setting of the optimizer is out of range."""
    _plan(optimizer, *optimizer._initial_settings, ranks=1)


def external_step(optimizer: DPOptimizer, noise_multiplier: float, clipping: AbstractClip) -> PrivateStep:
    """Returns a step for external batches: each backward pass is a batch, and no epsilon is claimed."""
    pending = optimizer._pending_passes = _passes(optimizer)
    topology = pending.clipper.topology
    plan = _plan(optimizer, noise_multiplier, clipping, ranks=topology.ranks)
    clipping.group_of(list(pending.clipper.trainable()))  # raises if the policy does not fit the model
    batches = BatchState(external=True)
    return PrivateStep(plan, lambda _: pending.clipper, source(optimizer, topology), Ledger(), batches=batches)


def engine_step(optimizer: DPOptimizer, sampling: Draws, ledger: Ledger, **parts: Any) -> PrivateStep:
    """Returns a step for the batches of a private loader, which an engine accounts for.

    ``parts`` are ``budget`` and ``dataset_check`` of the step.
    """
    pending = optimizer._pending_passes = _passes(optimizer)
    topology, run = pending.clipper.topology, name_for(pending.clipper.topology)
    plan = _plan(optimizer, *optimizer._initial_settings, ranks=topology.ranks)
    plan.clipping.group_of(list(pending.clipper.trainable()))  # raises if the policy does not fit the model
    plan = replace(plan, relation=Relation.ZERO_OUT, sampling=sampling, run=run)
    return PrivateStep(plan, lambda _: pending.clipper, source(optimizer, topology), ledger, **parts)


def follow_hooks(optimizer: DPOptimizer, step: PrivateStep) -> None:
    """Continues with the new hooks if the hooks of the model were removed and attached again."""
    held = params(optimizer)
    present = pending_passes_of(held[0]) if held else None
    if present is not None and present is not optimizer._pending_passes:
        optimizer._pending_passes = _passes(optimizer)
        if not step.passes.buffer.clean:
            step.discard()
        step.passes = optimizer._pending_passes.clipper
        step.passes.policy = step.plan.clipping


def take_ownership(optimizer: DPOptimizer) -> None:
    """Makes this optimizer the owner of the backward passes of the model, if it has hooks."""
    held = [p for group in optimizer.param_groups for p in group["params"]]
    for pending in _distinct(map(pending_passes_of, held)):
        before = None if pending.owner is None else pending.owner()
        optimizer._replaces_accounted |= before is not None and _is_accounted_for(before)
        pending.owner = weakref.ref(optimizer)


def _distinct(found: Iterable[PendingPasses | None]) -> list[PendingPasses]:
    return list(dict.fromkeys(passes for passes in found if passes is not None))


def _is_accounted_for(optimizer: DPOptimizer) -> bool:
    """Returns True if an engine accounts for the steps of an optimizer."""
    step = optimizer._built_step
    return step is not None and not step.batches.external and step.batches.stage is not Stage.CLOSED


def _check_accounted(optimizer: DPOptimizer, step: PrivateStep) -> None:
    """Raises if an engine made the model private and does not account for this optimizer."""
    if step.batches.external and optimizer._replaces_accounted:
        raise ParameterMismatchError(
            "This optimizer was built manually over a model that an engine made private. The engine would claim an "
            "epsilon that does not include the steps of this optimizer.",
            fix="Unwrap the model by to_standard_module(), and call make_private with the plain optimizer; or build "
            "optimizers manually only over models that no engine made private.",
        )


def _check_owner(optimizer: DPOptimizer) -> None:
    """Raises if another optimizer clips the backward passes of the model."""
    owner = None if optimizer._pending_passes.owner is None else optimizer._pending_passes.owner()
    if owner is not None and owner is not optimizer:
        raise ParameterMismatchError(
            "Another private optimizer was built over this model later. It clips the backward passes.",
            fix="Step the newest optimizer. For two optimizers over parts of one model, wrap each part separately.",
        )


def _follow_groups(optimizer: DPOptimizer, pending: PendingPasses) -> None:
    """Restricts clipping to the optimizer's current parameters. Raises if one is not in the wrapped model."""
    held = {p for group in optimizer.param_groups for p in group["params"]}
    every = set(pending.parameters.values())
    unknown = [p for p in held if p.requires_grad and p not in every]
    if unknown:
        shapes = ", ".join(str(tuple(p.shape)) for p in unknown[:3])
        raise ParameterMismatchError(
            f"{len(unknown)} optimizer parameters are not in the wrapped model (shapes {shapes}): they are from "
            "another model, or were added or replaced later. Their gradients would be neither clipped nor noised.",
            fix="Unwrap the model, build the optimizer over its parameters, after fix(), and call make_private again.",
        )
    pending.clipper.only = None if every <= held else frozenset(held)


def _plan(optimizer: DPOptimizer, noise_multiplier: float, clipping: AbstractClip, *, ranks: int) -> RunPlan:
    size = 1.0 if optimizer.expected_batch_size is None else optimizer.expected_batch_size * ranks
    return RunPlan(ExternalBatches(size), clipping, noise_multiplier, size, Relation.ADD_OR_REMOVE_ONE)


def source(optimizer: DPOptimizer, topology: Topology) -> NoiseSource:
    """Returns the noise source of the optimizer."""
    kind = SECURE_KIND if optimizer.secure_mode else DEFAULT_KIND
    # Processes may have different seeds. As in Opacus, that of the first process is used.
    return source_for(topology, kind, topology.everyone.broadcast(seed_of(optimizer.generator)), run=0)


def seed_of(generator: torch.Generator | None) -> int | None:
    """Draws a seed from a generator; None without a generator."""
    if generator is None:
        return None
    return int(torch.randint(2**63 - 1, (), generator=generator, device=generator.device))


def _passes(optimizer: DPOptimizer) -> PendingPasses:
    """Returns the pending passes of the model, with sums reduced over processes if the optimizer requires it."""
    pending = _local_passes(optimizer)
    clipper = pending.clipper
    if optimizer._over_ranks and clipper.topology is SINGLE:
        topology = topology_of(clipper.model)
        if topology is not SINGLE:
            clipper.topology = clipper.capture.topology = topology
            clipper.buffer = FlatBuffer(clipper.trainable().values(), topology)
            check_equal_weights(clipper.model, topology)
    return pending


def _local_passes(optimizer: DPOptimizer) -> PendingPasses:
    """Returns the pending passes of the wrapped model; without one, passes that read ``p.grad_sample``."""
    held = [p for group in optimizer.param_groups for p in group["params"]]
    found = _distinct(map(pending_passes_of, held))
    if len(found) > 1:
        raise ParameterMismatchError(
            f"The optimizer has parameters of {len(found)} models, but gradients are clipped over one model.",
            fix="Put the models in one nn.Module and wrap that, or use one optimizer for each.",
        )
    if not found:
        # The user may write gradients before the step is built.
        written = [getattr(parameter, "grad_sample", None) for parameter in held]
        pending = PendingPasses(nn.ParameterList(held), mode="no_op", loss_reduction=optimizer.loss_reduction)
        for parameter, grad_sample in zip(held, written, strict=True):
            parameter.grad_sample = grad_sample  # type: ignore[attr-defined]
        return pending
    (pending,) = found
    _follow_groups(optimizer, pending)
    if pending.owner is None:
        take_ownership(optimizer)
    return pending


def name_of(optimizer: DPOptimizer, parameter: nn.Parameter) -> str:
    """Returns a parameter's name and shape, for messages."""
    pending = pending_passes_of(parameter)
    names = {} if pending is None else {p: name for name, p in pending.parameters.items()}
    index = next((i for i, p in enumerate(params(optimizer)) if p is parameter), "?")
    return f"'{names.get(parameter, f'{index} of the optimizer')}' {tuple(parameter.shape)}"


# Phases of a step, as in Opacus


def check_unscaled(optimizer: DPOptimizer) -> None:
    """Raises if a GradScaler steps the optimizer."""
    if optimizer.__dict__.pop("found_inf", None) is not None:
        del optimizer.__dict__["grad_scale"]
        raise ScaledGradientError(
            "A GradScaler multiplied the loss, so clipping would act on scaled gradients.",
            fix="Use torch.autocast(dtype=torch.bfloat16), which needs no scaler; or "
            "dpengine.PrivacyEngine().make_private(..., grad_scaler=scaler).",
        )


def check_fetched_parts(optimizer: DPOptimizer, step: PrivateStep | None) -> None:
    """Raises, and discards the batch, if a loader returned parts of several batches since the last step."""
    if not optimizer._fetched_ahead:
        return
    optimizer.forget_skips()
    if step is not None:
        step.discard()
    raise BatchStateError(
        "The loader returned parts of several batches since the last step, so the batch of this step is unknown. All "
        "gradients since that step are discarded.",
        fix="Call optimizer.step() for each part before the next one is fetched; use num_workers of the loader to "
        "fetch ahead. To leave a part out, multiply its loss by 0.",
    )


def prepare_step(optimizer: DPOptimizer, step: PrivateStep) -> None:
    """Clips the pending passes and writes the sums to ``p.summed_grad``."""
    pending = optimizer._pending_passes
    pending.settle(step)
    if step.batches.external and step.batches.stage is Stage.IDLE and not pending.pending:
        held = params(optimizer)
        raise MissingGradientError(
            f"Parameter {name_of(optimizer, held[0]) if held else '?'} has no per-sample gradient.",
            fix="Run forward in train mode through a GradSampleModule, and backward, between zero_grad() and step(); "
            "or, on a model without one, write p.grad_sample (B, *p.shape) of every parameter.",
        )
    _check_owner(optimizer)
    _check_accounted(optimizer, step)
    if pending.captures:
        _follow_groups(optimizer, pending)
    _follow_written_sums(optimizer, step)
    pending.deliver(step)
    records = pending.clipper.capture.state is CaptureState.ATTACHED or not pending.clipper.model.training
    if not records and step.batches.awaits_backward and step.batches.samples:
        raise BatchStateError(
            "step() has no gradients: the model's hooks are off, so no backward pass was recorded, and no "
            "p.grad_sample was written. Call model.enable_hooks() first, or write p.grad_sample of every parameter."
        )
    step.prepare_step()
    for parameter, total in step.passes.buffer:
        parameter.summed_grad = total  # type: ignore[attr-defined]
    optimizer._written_sums = None if optimizer._clips_by_itself else WrittenSums.of(step)


def _follow_written_sums(optimizer: DPOptimizer, step: PrivateStep) -> None:
    """Rejects or adopts changes of ``p.summed_grad`` since it was written."""
    shown = optimizer._written_sums
    changed = [] if shown is None else shown.changed(step)
    if changed:
        reject_or_adopt(step, changed, name_of(optimizer, changed[0]))
        optimizer._written_sums = WrittenSums.of(step)


def adopt(optimizer: DPOptimizer, step: PrivateStep) -> None:
    """Replaces the sums by ``p.summed_grad`` as the user's own ``clip_and_accumulate`` wrote it."""
    written = {p: getattr(p, "summed_grad", None) for p in optimizer.params}
    optimizer._pending_passes.deliver(step)  # does nothing if that method called the engine's
    step.prepare_step()
    views = dict(step.passes.buffer)
    for parameter, total in written.items():
        if total is not None and total is not views.get(parameter):
            step.passes.buffer.fill(parameter, lambda view, keep, total=total: view.copy_(total))  # type: ignore[misc]


def is_complete(step: PrivateStep) -> bool:
    """Returns True if the sums contain the whole logical batch."""
    return step.batches.stage is Stage.CLIPPED


@contextlib.contextmanager
def private_update(optimizer: DPOptimizer, step: PrivateStep) -> Iterator[None]:
    """Charges the logical batch before noise is added in the context, and zeroes its sums after it."""
    count, charged = len(step.batches.logical_batches), False
    try:
        with step.private_update():
            charged = True
            yield
    except BaseException:
        optimizer._failed_batches += count if charged else 0
        raise
    finally:
        optimizer._written_sums = None
        for parameter in optimizer.params:
            parameter.summed_grad = None  # type: ignore[attr-defined]
    if not step.passes.buffer.clean:  # the user's own add_noise did not drain the sums
        step.passes.buffer.drain()
    optimizer._pending_passes.mark_released()
    held = params(optimizer)
    check_not_replaced(step.writer.released.keys(), held, optimizer)
    every = {p for group in optimizer.param_groups for p in group["params"]}
    for parameter in (step.writer.released.keys() | every) - set(held):
        parameter.grad = None  # a frozen parameter may have an unclipped gradient


def write_noised(optimizer: DPOptimizer, step: PrivateStep) -> None:
    """Writes the noised sums to ``p.grad``."""
    if step.batches.stage is Stage.OPEN:
        raise BatchStateError(
            "add_noise() was called for a part of a logical batch, which has not been charged.",
            fix="Call it after all parts are clipped, when pre_step() returns True.",
        )
    _follow_written_sums(optimizer, step)
    if optimizer._clips_by_itself and step.batches.stage is Stage.CLIPPED:
        adopt(optimizer, step)
    if step.batches.stage is Stage.CLIPPED:  # called outside pre_step
        with private_update(optimizer, step):
            step.write_gradients(1.0)
    else:
        step.write_gradients(1.0)


def scale(optimizer: DPOptimizer, step: PrivateStep) -> None:
    """Divides ``p.grad`` by the divisor of the plan."""
    if optimizer.loss_reduction == "mean":
        included = [number for number in step.batches.steps if number not in optimizer._skipped_batches]
        count = max(1, len(included)) if step.batches.logical_batches else step.batches.merged
        written = step.writer.released.keys()
        # If there are none, the user's own add_noise wrote the gradients.
        grads = {p: p.grad for p in written or optimizer.params if p.grad is not None}
        if grads:
            torch._foreach_mul_(list(grads.values()), 1 / step.plan.divisor(count, mean=True))
        step.writer.record({p: grads[p] for p in written if p in grads})


def clear(optimizer: DPOptimizer, step: PrivateStep | None, *, keeps_sums: bool) -> None:
    """Clears gradients, per-sample gradients and sums for ``zero_grad``."""
    for pending in _distinct(map(pending_passes_of, params(optimizer))):
        pending.clear()
    for parameter in optimizer.params:
        parameter.grad_sample = None  # type: ignore[attr-defined]
    if step is None:
        return
    if keeps_sums:
        step.writer.zero_grad(step.passes.buffer.parameters)
        return
    optimizer._written_sums = None
    for parameter in optimizer.params:
        parameter.summed_grad = None  # type: ignore[attr-defined]
    step.zero_grad()


def dotted_names(parameters: list[nn.Parameter]) -> list[str]:
    """Returns the dotted names of parameters in their model."""
    pending = next((one for one in map(pending_passes_of, parameters) if one is not None), None)
    if pending is None:
        return [str(index) for index in range(len(parameters))]
    names = {p: name for name, p in pending.parameters.items()}
    return [names.get(p, f"? {index}") for index, p in enumerate(parameters)]
