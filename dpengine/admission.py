"""What may enter a run: the arguments of ``make_private``, checked before anything is changed."""

from __future__ import annotations

import weakref
from typing import Any

from torch import nn
from torch.optim import Optimizer

from dpengine.accounting import check_delta, suggested_delta
from dpengine.errors import InvalidBudgetError, ParameterMismatchError, UnknownParameterError, notice
from dpengine.optimizer import parameters_of

attached_models: weakref.WeakSet[nn.Module] = weakref.WeakSet()
_engines_of: dict[int, weakref.ref[Any]] = {}


def refuse_unknown(argument: str, value: str, choices: tuple[str, ...]) -> None:
    """Refuses a name that is not in a list."""
    if value not in choices:
        raise ValueError(f"{argument}={value!r} is not known. Choose one of: {', '.join(map(repr, choices))}.")


def delta_for(given: float | None, num_examples: int, allow_large: bool) -> float:
    """The delta given, checked, or the one suggested for so many examples."""
    delta = suggested_delta(num_examples) if given is None else given
    check_delta(delta, num_examples, allow_large=allow_large)
    return delta


def planned_steps(epochs: int | None, steps: int | None, steps_per_epoch: int) -> int | None:
    """The number of logical batches that training is planned for, None if it was not said."""
    for name, value in (("epochs", epochs), ("steps", steps)):
        if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
            raise InvalidBudgetError(f"{name}={value!r} is not a whole number of at least 1.", fix=f"Pass {name}=10.")
    if epochs is not None and steps is not None:
        raise InvalidBudgetError("epochs and steps were both given.", fix="Pass one of them.")
    return steps if epochs is None else epochs * steps_per_epoch


def refuse_attached(module: nn.Module) -> None:
    """Refuses a model that is private already, in whichever engine."""
    if module in attached_models:
        raise UnknownParameterError(
            f"The model ({type(module).__name__}) is private already.", fix="Call engine.detach(model) first."
        )


def warn_of_other_engine(engine: Any, dataset: Any) -> None:
    """Notices a second engine over one data set: neither knows what the other spends."""
    other = _engines_of.setdefault(id(dataset), weakref.ref(engine))()
    if other is None:  # the engine, or another data set that had this id, is gone
        _engines_of[id(dataset)] = weakref.ref(engine)
    elif other is not engine:
        notice(
            "DPE012",
            "Another engine trains on the same data set in this process; their costs add up, and neither knows of the "
            "other. Use one engine for both.",
            key="two engines",
        )


def refuse_foreign_parameters(module: nn.Module, optimizer: Optimizer) -> None:
    """Refuses an optimizer that holds other parameters than the model's."""
    held = parameters_of(optimizer)
    known = dict.fromkeys(module.parameters())
    foreign = [p for p in held if p not in known]
    if foreign:
        shapes = ", ".join(str(tuple(p.shape)) for p in foreign[:3])
        raise ParameterMismatchError(
            f"{len(foreign)} optimizer parameters are not in the model (shapes {shapes}). Likely: fix, PEFT or .to(dtype) "
            "ran after the optimizer was built.",
            fix="Build the optimizer last.",
        )
    if len(set(held)) < len(held):
        raise ParameterMismatchError("A parameter is in the optimizer's groups twice.", fix="List each parameter once.")
    left = [name for name, p in module.named_parameters() if p.requires_grad and p not in set(held)]
    if left:
        notice("DPE003", f"{len(left)} trainable parameters are not in the optimizer and will not change: {left[:3]}.")
