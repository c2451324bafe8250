"""Makes the user's optimizer private in place: its ``step`` uses noisy gradients only."""

from __future__ import annotations

import functools
import operator
import weakref
from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from dpengine.errors import (
    BatchStateError,
    DetachedError,
    ParameterMismatchError,
    ScaledGradientError,
    UnknownParameterError,
    notice,
)
from dpengine.grad_modes.grad_sample import forget_grad_samples

if TYPE_CHECKING:
    from .step import PrivateStep

UNSUPPORTED = {
    "LBFGS": "it reads the data several times in one step",
    "SparseAdam": "it updates only rows with a gradient, but noise is dense",
}


# Hooks of garbage-collected runs. They are removed later, because an optimizer may be iterating over the hooks.
_STALE_HOOKS: list[RemovableHandle] = []


@dataclass(eq=False)
class Attachment:
    """Private state of an optimizer.

    Attributes:
        step: The private step of the run.
        base: Original class of the optimizer.
        instance_step: The ``step`` attribute of the instance (the counter of a scheduler), if any.
        initial_parameters: Parameters of the model at the start of the run, about which `check_not_replaced` does not
            warn.
        skipped: True if the last step only accumulated.
        wrapped_handles: Handles of the hooks on optimizers that this one wraps.
        updated: True if a wrapped optimizer was stepped in the last update.
    """

    step: PrivateStep
    base: type[Optimizer]
    instance_step: Any
    initial_parameters: frozenset[nn.Parameter]
    skipped: bool = False
    wrapped_handles: list[Any] = field(default_factory=list)
    updated: bool = False

    def watch(self, optimizer: Optimizer) -> None:
        """Records steps of an optimizer that this one wraps."""
        self.wrapped_handles.append(optimizer.register_step_pre_hook(self._stepped))

    def _stepped(self, *_: Any) -> None:
        self.updated = True


def check_optimizer(optimizer: Optimizer) -> None:
    """Raises if the optimizer cannot be made private."""
    base = type(optimizer)
    if not isinstance(optimizer, Optimizer):
        raise TypeError(f"optimizer is a {base.__name__}; pass an optimizer of torch.optim, such as SGD or AdamW.")
    if _ATTACHED in optimizer.__dict__:
        raise UnknownParameterError(
            f"The optimizer ({base.__name__}) is private already.",
            fix="Create it again, or call dpengine.detach(optimizer) first.",
        )
    for kind in base.__mro__:
        if kind.__name__ in UNSUPPORTED and kind.__module__.startswith("torch.optim"):
            raise UnknownParameterError(
                f"{base.__name__} cannot be made private: {UNSUPPORTED[kind.__name__]}.",
                fix="Use another optimizer of torch.optim, such as SGD or AdamW.",
            )


def attach(optimizer: Optimizer, step: PrivateStep) -> None:
    """Makes an optimizer, or a copy of a private optimizer, private in place."""
    check_optimizer(optimizer)
    base = getattr(type(optimizer), "dp_base", type(optimizer))
    parameters = frozenset(step.passes.model.parameters())
    optimizer.__class__ = private_class(base)  # type: ignore[arg-type]  # first, because Python may raise
    bound = optimizer.__dict__.pop("step", None)
    attachment = optimizer.__dict__[_ATTACHED] = Attachment(step, base, bound, parameters)
    for value in list(vars(optimizer).values()):
        if isinstance(value, Optimizer):  # for example in wrappers of accelerate
            attachment.watch(value)
    if bound is not None:
        optimizer.__dict__["step"] = _counted(optimizer, private_class(base).step)  # type: ignore[arg-type]


def detach(optimizer: Optimizer) -> None:
    """Restores the original class of a private optimizer or of its copy, which then trains without privacy."""
    base = getattr(type(optimizer), "dp_base", None)
    if base is None:
        return
    attachment = optimizer.__dict__.pop(_ATTACHED, None)
    instance_step = optimizer.__dict__.pop("step", None)
    for handle in () if attachment is None else attachment.wrapped_handles:
        handle.remove()
    optimizer.__class__ = base
    if attachment is not None and attachment.instance_step is not None:
        optimizer.__dict__["step"] = attachment.instance_step
    elif instance_step is not None:  # a scheduler that was built while the optimizer was private
        optimizer.__dict__["step"] = _counted(optimizer, base.step)


def _counted(optimizer: Optimizer, step: Callable[..., Any]) -> Callable[..., Any]:
    """Binds ``step`` to the optimizer, and sets the flag from which schedulers detect a step."""
    reference = weakref.ref(optimizer)

    @functools.wraps(step)
    def counted(*args: Any, **kwargs: Any) -> Any:
        this = reference()
        this._opt_called = True  # type: ignore[union-attr]
        return step(this, *args, **kwargs)

    counted._wrapped_by_lr_sched = True  # type: ignore[attr-defined]
    return counted


@functools.cache
def private_class(base: type[Optimizer]) -> type[Optimizer]:
    """Returns the private subclass of an optimizer class. ``isinstance`` with the original class still holds."""
    members = {
        "dp_base": base,
        "__doc__": f"{base.__name__} whose steps are differentially private.",
        "__module__": __name__,
        "_step_supports_amp_scaling": True,
        "step": _step,
        "zero_grad": _zero_grad,
        "add_param_group": _add_param_group,
        "noise_multiplier": property(_noise_multiplier, _set_noise_multiplier),
        "max_grad_norm": property(_max_grad_norm, _set_max_grad_norm),
        "step_was_skipped": property(lambda self: _ATTACHED in self.__dict__ and self.__dict__[_ATTACHED].skipped),
        "__repr__": _repr,
        "__reduce_ex__": lambda self, protocol: (_rebuild, (self.dp_base, self.__getstate__())),
    }
    return type(f"DP{base.__name__}", (base,), members)


def _noise_multiplier(self: Any) -> float:
    """Ratio of the noise standard deviation to the sensitivity. A new value takes effect with the next step."""
    return _attachment(self).step.next_plan.noise_multiplier


def _set_noise_multiplier(self: Any, value: float) -> None:
    _attachment(self).step.change(noise_multiplier=value)


def _max_grad_norm(self: Any) -> float:
    """Clipping norm. A new value takes effect with the next step, for clipping, noise and accounting together."""
    return _attachment(self).step.next_plan.clipping.max_grad_norm


def _set_max_grad_norm(self: Any, value: float) -> None:
    step = _attachment(self).step
    step.change(clipping=step.next_plan.clipping.resized(value))


def _attachment(optimizer: Optimizer) -> Attachment:
    attachment = optimizer.__dict__.get(_ATTACHED)
    if attachment is None:
        raise DetachedError(
            "This optimizer is a copy without an engine; stepping it would not be private.",
            fix="Use make_private, or dpengine.detach(optimizer) to train it without privacy.",
        )
    return attachment


def _step(self: Any, closure: Callable[[], Any] | None = None) -> Any:
    """Charges a logical batch, adds noise to its clipped sums and updates the parameters.

    Only the last physical batch of a logical batch updates the parameters.
    """
    attachment = _attachment(self)
    if "grad_scale" in self.__dict__:
        del self.grad_scale, self.found_inf  # set by the scaler for this step only
        raise ScaledGradientError(
            "A GradScaler that was not passed to make_private scales the loss, so clipping would use scaled norms.",
            fix="Prefer torch.autocast(dtype=torch.bfloat16), or pass make_private(..., grad_scaler=scaler).",
        )
    loss = None
    if closure is not None:
        with torch.enable_grad():
            loss = closure()
    attachment.skipped = not attachment.step.step(functools.partial(_update, self, attachment))
    return loss


def _update(optimizer: Optimizer, attachment: Attachment) -> None:
    """Runs the update of the base class. Clears all other gradients, because a frozen parameter may hold a raw one."""
    released, optimized = attachment.step.writer.released, parameters_of(optimizer)
    passes, attachment.updated = attachment.step.passes, False
    if passes.only is None and len(released) == len(optimized) and all(map(operator.is_, released, optimized)):
        attachment.base.step(optimizer)
        if attachment.wrapped_handles:
            check_update_not_skipped(attachment)
        return
    trained: Set[nn.Parameter] = released.keys()
    if passes.only is not None:  # then `released` lacks parameters that replaced those of the optimizer
        trained = {p for p in passes.model.parameters() if p.requires_grad}
    check_not_replaced(trained, optimized, optimizer, initial=attachment.initial_parameters)
    for parameter in optimized:
        if parameter not in released:
            parameter.grad = None
    attachment.base.step(optimizer)
    check_update_not_skipped(attachment)


def reject_other_optimizers(step: PrivateStep) -> Any:
    """Registers a hook that raises if another optimizer steps on parameters of this run, whose ``.grad`` is not set."""
    while _STALE_HOOKS:
        _STALE_HOOKS.pop().remove()
    reference = weakref.ref(step, lambda _: _STALE_HOOKS.append(handle))

    def check(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        this = reference()
        if _ATTACHED in optimizer.__dict__ or this is None:
            return
        trained = {p for p in this.passes.model.parameters() if p.requires_grad}  # also if layers were added
        if this.passes.only is not None:
            trained.intersection_update(this.passes.only)
        shared = [p for p in parameters_of(optimizer) if p in trained]
        if shared and (this.batches.waits_for_step or all(p.grad is None for p in shared)):
            raise BatchStateError(
                f"{type(optimizer).__name__}.step() was called on parameters of a private model, but make_private did "
                "not return this optimizer. The gradients are not in p.grad, so the step would change nothing.",
                fix="Call step() and zero_grad() of the optimizer that make_private returned, or pass this one to "
                "make_private. A second optimizer of the model may step after that one.",
            )

    handle = register_optimizer_step_pre_hook(check)
    return handle


def check_update_not_skipped(attachment: Attachment) -> None:
    """Raises if a wrapper did not call the ``step`` of the optimizer that it wraps."""
    if attachment.wrapped_handles and not attachment.updated:
        raise BatchStateError(
            f"{attachment.base.__name__}.step() updated no parameter: it skipped the update, for example inside "
            "accelerator.accumulate(). The step is accounted, but its gradient is lost.",
            fix="Pass accumulation_steps= to make_private instead, and leave out accumulate() and "
            "gradient_accumulation_steps.",
        )


def check_not_replaced(
    released: Set[nn.Parameter],
    optimized: Sequence[nn.Parameter],
    optimizer: Any,
    *,
    initial: Set[nn.Parameter] = frozenset(),
) -> None:
    """Raises if the step updates no parameter; warns about parameters that it skips."""
    if released and optimized and released.isdisjoint(optimized):
        raise ParameterMismatchError(
            "The optimizer holds no trainable parameter of the model: all were replaced after make_private, so no step "
            "would change the model.",
            fix="Move, cast or wrap the model first, then build the optimizer, then call make_private.",
        )
    if skipped := len(released - initial - set(optimized)):
        notice(
            "DPE003",
            f"{skipped} parameters were added to the model or replaced after make_private. The optimizer does not "
            "update them. Call engine.detach(model), rebuild the optimizer, and call make_private again.",
            key="in a step",
            of=optimizer,
        )


# torch wraps ``step`` of every new optimizer class to run user hooks. ``step`` of the base class is already wrapped.
_step.hooked = True  # type: ignore[attr-defined]


def _zero_grad(self: Any, set_to_none: bool = True) -> None:
    """Clears ``p.grad``. Keeps the clipped sums of an incomplete logical batch."""
    self.dp_base.zero_grad(self, set_to_none)
    attachment = self.__dict__.get(_ATTACHED)
    if attachment is not None:
        if with_grad_sample := [p for p in parameters_of(self) if hasattr(p, "grad_sample")]:
            forget_grad_samples(with_grad_sample)
        attachment.step.zero_grad()


def _add_param_group(self: Any, param_group: dict[str, Any]) -> None:
    """Raises UnknownParameterError while private, because new parameters have no hooks."""
    if _ATTACHED not in self.__dict__:
        self.dp_base.add_param_group(self, param_group)
        return
    names = {p: name for name, p in self.__dict__[_ATTACHED].step.passes.model.named_parameters()}
    params = param_group.get("params", [])
    params = [params] if isinstance(params, torch.Tensor) else list(params)
    labels = [p[0] if isinstance(p, tuple) else names.get(p, f"{type(p).__name__}{tuple(p.shape)}") for p in params]
    raise UnknownParameterError(
        f"Parameter group added after make_private ({', '.join(map(str, labels))}) would be updated without noise.",
        fix="Add it before, or call engine.detach(model) first.",
    )


def _repr(self: Any) -> str:
    attachment = self.__dict__.get(_ATTACHED)
    settings = "detached copy"
    if attachment is not None:
        plan = attachment.step.plan
        insecure = ", INSECURE_SEED" if attachment.step.source.insecure_seed else ""
        settings = (
            f"noise_multiplier={plan.noise_multiplier:g}, max_grad_norm={plan.clipping.max_grad_norm:g}{insecure}"
        )
    text, kind = self.dp_base.__repr__(self), type(self).__name__
    if text.startswith(kind):  # torch starts with the name of the private class
        text = self.dp_base.__name__ + text.removeprefix(kind)
    return f"{kind}({settings}) of {text}"


def _rebuild(base: type[Optimizer], state: dict[str, Any]) -> Optimizer:
    """Rebuilds a copy of a private optimizer, with its state and without an engine."""
    copy = object.__new__(private_class(base))  # type: ignore[arg-type]
    copy.__setstate__(state)
    return copy


def parameters_of(optimizer: Optimizer) -> list[nn.Parameter]:
    """Returns the parameters of all groups."""
    return [p for group in optimizer.param_groups for p in group["params"]]


_ATTACHED = "_dpengine"
