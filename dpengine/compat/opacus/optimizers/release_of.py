"""From an optimizer with Opacus's attributes to the release of the engine that does its work."""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.optim import Optimizer

from dpengine.accounting.events import Relation
from dpengine.accounting.ledger import Ledger
from dpengine.clipping.policy import AbstractClip
from dpengine.compat.opacus.grad_sample.gsm_base import sums_of
from dpengine.distributed.data_parallel import refuse_other_weights
from dpengine.distributed.detect import topology_of
from dpengine.distributed.topology import SINGLE, Topology
from dpengine.engine.batch_state import Stage
from dpengine.engine.build_plan import source_for
from dpengine.engine.materialized_sums import ShownSums
from dpengine.engine.optimizer import refuse_optimizer, refuse_replaced
from dpengine.engine.release import Release
from dpengine.errors import MissingGradientError, ParameterMismatchError, ScaledGradientError, TicketError
from dpengine.noise.keyed_streams import DEFAULT_KIND, SECURE_KIND
from dpengine.noise.source import NoiseSource
from dpengine.plan.run_plan import RunPlan
from dpengine.sampling.in_order import ByHand

from .utils import params
from .written_sums import SumsShown, refuse_or_take

if TYPE_CHECKING:
    from .optimizer import DPOptimizer

_REDUCTIONS = ("mean", "sum")
_owners: weakref.WeakKeyDictionary[ShownSums, weakref.ref[DPOptimizer]] = weakref.WeakKeyDictionary()


def refuse(optimizer: Any, loss_reduction: str, size: float | None, generator: Any, secure: bool) -> None:
    """Refuses arguments that make no optimizer."""
    if not isinstance(optimizer, Optimizer):
        raise TypeError(f"optimizer is {torch.typename(optimizer)}; pass an optimizer of torch.optim.")
    if not hasattr(optimizer, "original_optimizer"):  # one around a private one is the user's to explain
        refuse_optimizer(optimizer)
    if loss_reduction not in _REDUCTIONS:
        raise ValueError(f"loss_reduction={loss_reduction!r} is not known. Choose one of: 'mean', 'sum'.")
    if loss_reduction == "mean" and size is None:
        raise ValueError("expected_batch_size=None: loss_reduction='mean' divides by it. Pass the batch size.")
    if secure and generator is not None:
        raise ValueError("secure_mode=True with a generator: a seed makes noise repeat. Pass one of them.")


def checked(optimizer: DPOptimizer) -> None:
    """Refuses settings out of their range."""
    _plan(optimizer, *optimizer._asked, ranks=1)


def by_hand(optimizer: DPOptimizer, noise_multiplier: float, clipping: AbstractClip) -> Release:
    """A release whose batches come from elsewhere: each backward pass is one, and nothing is claimed for it."""
    sums = _sums(optimizer)
    plan = _plan(optimizer, noise_multiplier, clipping, ranks=sums.topology.ranks)
    sums.policy = plan.clipping
    clipping.group_of(list(sums.trainable()))  # refuses a model that it does not fit
    release = Release(plan, sums, source(optimizer, sums.topology), Ledger())
    release.hand_fed = True
    return release


def follow_hooks(optimizer: DPOptimizer, release: Release) -> None:
    """Hooks may have been taken off and put on again since."""
    held = params(optimizer)
    present = sums_of(held[0]) if held else None
    if present is not None and present is not release.sums:
        release.watch(_sums(optimizer))


def claim(optimizer: DPOptimizer) -> None:
    """Has the sums of the model, if it has hooks, be those of this optimizer from now on."""
    held = [p for group in optimizer.param_groups for p in group["params"]]
    for sums in {id(one): one for one in map(sums_of, held) if one is not None}.values():
        before = _owners[sums]() if sums in _owners else None
        optimizer._took_over = optimizer._took_over or (before is not None and _is_accounted_for(before))
        _owners[sums] = owner = weakref.ref(optimizer)
        sums.on_backward_end = functools.partial(_clip_now, owner)


def _is_accounted_for(optimizer: DPOptimizer) -> bool:
    """Whether an engine books what an optimizer releases."""
    release = optimizer._made
    return release is not None and not release.hand_fed and release.batches.stage is not Stage.CLOSED


def _refuse_take_over(optimizer: DPOptimizer, release: Release) -> None:
    """The engine that made the model private would book its own noise for the batches of this optimizer."""
    if release.hand_fed and optimizer._took_over:
        raise ParameterMismatchError(
            "This optimizer was built by hand over a model that an engine made private: what it releases would be in "
            "no account, and the engine would state an epsilon all the same.",
            fix="Unwrap the model by to_standard_module(), and call make_private with the plain optimizer; or build "
            "optimizers by hand over models that no engine made private.",
        )


def _clip_now(owner: weakref.ref[DPOptimizer]) -> None:
    """A backward pass that waits must make way for another one."""
    optimizer = owner()
    if optimizer is not None:
        optimizer._release.backward_ended()


def _refuse_other_owner(optimizer: DPOptimizer, sums: ShownSums) -> None:
    owner = _owners[sums]() if sums in _owners else None
    if owner is not None and owner is not optimizer:
        raise ParameterMismatchError(
            "Another private optimizer was built over this model since; what backward passes leave is clipped for "
            "that one.",
            fix="Step the newest one. For two optimizers over parts of one model, wrap each part by itself.",
        )


def _follow_groups(optimizer: DPOptimizer, sums: ShownSums) -> None:
    """Parameters may have been added to the optimizer."""
    held = {p for group in optimizer.param_groups for p in group["params"]}
    every = set(sums.topology.parameters(sums.model).values())
    strangers = [p for p in held if p.requires_grad and p not in every]
    if strangers:
        shapes = ", ".join(str(tuple(p.shape)) for p in strangers[:3])
        raise ParameterMismatchError(
            f"{len(strangers)} optimizer parameters are not in the wrapped model (shapes {shapes}): those of another "
            "one, added since, or replaced in it. Their gradients would be neither clipped nor noised.",
            fix="Unwrap the model, build the optimizer over its parameters, after fix(), and call make_private again.",
        )
    sums.only = None if every <= held else frozenset(held)


def _plan(optimizer: DPOptimizer, noise_multiplier: float, clipping: AbstractClip, *, ranks: int) -> RunPlan:
    size = 1.0 if optimizer.expected_batch_size is None else optimizer.expected_batch_size * ranks
    return RunPlan(ByHand(size), clipping, noise_multiplier, size, Relation.ADD_OR_REMOVE_ONE)


def source(optimizer: DPOptimizer, topology: Topology) -> NoiseSource:
    """Where noise comes from."""
    kind = SECURE_KIND if optimizer.secure_mode else DEFAULT_KIND
    # Of other processes nothing of it is asked: scripts may give each a seed of its own, and Opacus reads one.
    return source_for(topology, kind, topology.everyone.from_first(seed_of(optimizer.generator)), run=0)


def seed_of(generator: torch.Generator | None) -> int | None:
    """A seed that a generator gives; the next one differs."""
    if generator is None:
        return None
    return int(torch.randint(2**63 - 1, (), generator=generator, device=generator.device))


def _sums(optimizer: DPOptimizer) -> ShownSums:
    """The sums of what is optimized, over all processes if the optimizer is one that adds up over them."""
    sums = _sums_here(optimizer)
    if optimizer._over_ranks and sums.topology is SINGLE:
        topology = topology_of(sums.model)
        if topology is not SINGLE:
            sums.spread(topology)
            refuse_other_weights(sums.model, topology)
    return sums


def _sums_here(optimizer: DPOptimizer) -> ShownSums:
    """The sums of the model that the parameters are in; of parameters without hooks, what is written to them."""
    held = [p for group in optimizer.param_groups for p in group["params"]]
    found = {id(sums): sums for sums in map(sums_of, held) if sums is not None}
    if len(found) > 1:
        raise ParameterMismatchError(
            f"The optimizer holds parameters of {len(found)} models, and a sample's gradient is clipped over one.",
            fix="Put them in one nn.Module and wrap that, or take an optimizer for each.",
        )
    if not found:
        written = [getattr(parameter, "grad_sample", None) for parameter in held]  # perhaps before this is asked for
        sums = ShownSums(nn.ParameterList(held), mode="no_op", loss_reduction=optimizer.loss_reduction)
        for parameter, grad_sample in zip(held, written, strict=True):
            parameter.grad_sample = grad_sample  # type: ignore[attr-defined]
        return sums
    (sums,) = found.values()
    _follow_groups(optimizer, sums)
    if sums not in _owners:
        claim(optimizer)
    return sums


def name_of(optimizer: DPOptimizer, parameter: nn.Parameter) -> str:
    """A parameter's name and shape, for messages."""
    sums = sums_of(parameter)
    names = {} if sums is None else {p: name for name, p in sums.topology.parameters(sums.model).items()}
    place = next((i for i, p in enumerate(params(optimizer)) if p is parameter), "?")
    return f"'{names.get(parameter, f'{place} of the optimizer')}' {tuple(parameter.shape)}"


# A step, in the parts that Opacus has


def refuse_scaled(optimizer: DPOptimizer) -> None:
    """Refuses the step of a GradScaler, of which nobody told before the backward pass."""
    if optimizer.__dict__.pop("found_inf", None) is not None:
        del optimizer.__dict__["grad_scale"]
        raise ScaledGradientError(
            "The loss was multiplied by a GradScaler: clipping would use the wrong unit.",
            fix="Use torch.autocast(dtype=torch.bfloat16), which needs no scaler; or "
            "dpengine.PrivacyEngine().make_private(..., grad_scaler=scaler).",
        )


def refuse_fetched_ahead(optimizer: DPOptimizer, release: Release | None) -> None:
    """Refuses a step where parts of several batches wait for one: nobody knows of which they are."""
    if not optimizer._fetched_ahead:
        return
    optimizer.forget_skips()
    if release is not None:
        release.discard()
    raise TicketError(
        "Parts of several batches were handed out since the last step, so that it is not known which of them this step "
        "is for. What was at hand is given up.",
        fix="Call optimizer.step() for each part before the next one is fetched; the loader has num_workers. To leave "
        "one out, multiply its loss by 0.",
    )


def gather(optimizer: DPOptimizer, release: Release) -> None:
    """Brings what waits into the sums, and shows them."""
    assert isinstance(release.sums, ShownSums)
    release.sums.refuse_unended()
    if release.hand_fed and release.batches.stage is Stage.IDLE and not release.sums.pending:
        held = params(optimizer)
        raise MissingGradientError(
            f"Parameter {name_of(optimizer, held[0]) if held else '?'} has no per-sample gradient.",
            fix="Run forward in train mode through a GradSampleModule, and backward, between zero_grad() and step(); "
            "or, on a model without one, write p.grad_sample (B, *p.shape) of every parameter.",
        )
    _refuse_other_owner(optimizer, release.sums)
    _refuse_take_over(optimizer, release)
    if release.sums.captures:
        _follow_groups(optimizer, release.sums)
    _follow_written_sums(optimizer, release)
    release.gather()
    for parameter, total in release.sums.buffer:
        parameter.summed_grad = total  # type: ignore[attr-defined]
    optimizer._sums_shown = None if optimizer._clips_by_itself else SumsShown.of(release)


def _follow_written_sums(optimizer: DPOptimizer, release: Release) -> None:
    """Sums may have been changed since they were shown."""
    shown = optimizer._sums_shown
    changed = [] if shown is None else shown.changed(release)
    if changed:
        refuse_or_take(release, changed, name_of(optimizer, changed[0]))
        optimizer._sums_shown = SumsShown.of(release)


def adopt(optimizer: DPOptimizer, release: Release) -> None:
    """Takes for the sums what stands in ``p.summed_grad``, where the user's own ``clip_and_accumulate`` wrote that."""
    given = {p: getattr(p, "summed_grad", None) for p in optimizer.params}
    release.gather()  # which is over already, unless that method did all by itself
    views = dict(release.sums.buffer)
    for parameter, total in given.items():
        if total is not None and total is not views.get(parameter):
            release.sums.buffer.fill(parameter, lambda view, keep, total=total: view.copy_(total))  # type: ignore[misc]


def is_complete(release: Release) -> bool:
    """Whether all of the logical batch is in the sums."""
    return release.batches.stage is Stage.CLIPPED


@contextlib.contextmanager
def leaving(optimizer: DPOptimizer, release: Release) -> Iterator[None]:
    """Charges the logical batch before anything of it leaves, and destroys its sums."""
    with release.leaving():
        try:
            yield
        finally:
            optimizer._sums_shown = None
            for parameter in optimizer.params:
                parameter.summed_grad = None  # type: ignore[attr-defined]
    if not release.sums.buffer.clean:  # the noise was of the user's own making
        release.sums.buffer.take()
    assert isinstance(release.sums, ShownSums)
    release.sums.note_release()
    held = params(optimizer)
    refuse_replaced(release.gradients.released.keys(), held)
    every = {p for group in optimizer.param_groups for p in group["params"]}
    for parameter in (release.gradients.released.keys() | every) - set(held):
        parameter.grad = None  # of one that is frozen it may be raw


def write_noised(optimizer: DPOptimizer, release: Release) -> None:
    """Sums with noise in ``p.grad``."""
    if release.batches.stage is Stage.OPEN:
        raise TicketError(
            "add_noise() would release a part of a logical batch, which nothing has charged.",
            fix="Release it when all of its chunks are clipped: pre_step() returns True then.",
        )
    _follow_written_sums(optimizer, release)
    if optimizer._clips_by_itself and release.batches.stage is Stage.CLIPPED:
        adopt(optimizer, release)
    if release.batches.stage is Stage.CLIPPED:  # called by hand: the charge and all else is due here
        with leaving(optimizer, release):
            release._write_gradients(divides=False)
    else:
        release._write_gradients(divides=False)


def scale(optimizer: DPOptimizer, release: Release) -> None:
    """The division by public constants."""
    if optimizer.loss_reduction == "mean":
        own = [step for step in release.batches.steps if step not in optimizer._skipped_batches]
        count = max(1, len(own)) if release.batches.batches else release.batches.merged
        factor = 1 / release.plan.divisor(count, mean=True)
        if release.gradients.released:
            release.gradients.scale(factor)
        elif grads := [p.grad for p in optimizer.params if p.grad is not None]:  # the user's own add_noise wrote them
            torch._foreach_mul_(grads, factor)


def clear(optimizer: DPOptimizer, release: Release | None, *, keeps_sums: bool) -> None:
    """What ``zero_grad`` takes away."""
    for sums in {id(one): one for one in map(sums_of, params(optimizer)) if one is not None}.values():
        sums.show_none()
    for parameter in optimizer.params:
        parameter.grad_sample = None  # type: ignore[attr-defined]
    if release is None:
        return
    if keeps_sums:
        release.gradients.zero_grad(release.sums.buffer.parameters)
        return
    optimizer._sums_shown = None
    for parameter in optimizer.params:
        parameter.summed_grad = None  # type: ignore[attr-defined]
    release.zero_grad()


def dotted_names(parameters: list[nn.Parameter]) -> list[str]:
    """Names of parameters as their sums have them."""
    sums = next((one for one in map(sums_of, parameters) if one is not None), None)
    if sums is None:
        return [str(index) for index in range(len(parameters))]
    names = {p: name for name, p in sums.topology.parameters(sums.model).items()}
    return [names.get(p, f"? {index}") for index, p in enumerate(parameters)]
