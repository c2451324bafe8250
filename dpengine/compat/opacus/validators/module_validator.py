"""Validators and fixers by layer type, applied to all of a model."""

from __future__ import annotations

import difflib
import inspect
import logging
from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import nn

from dpengine.compat.opacus.utils.module_utils import trainable_modules
from dpengine.validation.fix_model import copied, with_replacements

from .errors import IllegalModuleConfigurationError, UnsupportedModuleError

logger = logging.getLogger(__name__)

_KEYWORDS = ("replace_bn_with_in", "num_groups")  # of the built-in fixers


class ModuleValidator:
    """Looks at every module that itself owns a trainable parameter, by exact type.

    Attributes:
        VALIDATORS: Layer type to ``f(module) -> list of errors``.
        FIXERS: Layer type to ``f(module, **kwargs) -> module``.
    """

    VALIDATORS: ClassVar[dict[type[nn.Module], Callable[..., Any]]] = {}
    FIXERS: ClassVar[dict[type[nn.Module], Callable[..., Any]]] = {}

    @classmethod
    def validate(cls, module: nn.Module, *, strict: bool = False) -> list[UnsupportedModuleError]:
        """What stands in the way of training a model privately, as far as layer types tell.

        Args:
            module: The model.
            strict: Whether errors are raised, as one.

        Returns:
            The errors, which name their layers; none for a valid model.

        Raises:
            UnsupportedModuleError: With ``strict``, of the list of errors.
        """
        errors: list[UnsupportedModuleError] = []
        if not module.training:
            message = f"The model ({type(module).__name__}) is in eval mode. Call model.train() first."
            errors.append(IllegalModuleConfigurationError(message))
        for name, part in trainable_modules(module):
            validator = cls.VALIDATORS.get(type(part))
            errors += [_placed(error, name) for error in ([] if validator is None else validator(part))]
        if strict and errors:
            raise UnsupportedModuleError(errors)
        return errors

    @classmethod
    def is_valid(cls, module: nn.Module) -> bool:
        """Whether ``validate`` finds nothing. ``make_private`` may still refuse what types do not tell."""
        return not cls.validate(module, strict=False)

    @classmethod
    def fix(cls, module: nn.Module, **kwargs: Any) -> nn.Module:
        """A copy of a model in which layers have been replaced by their fixers. Build the optimizer after it.

        A layer that is used twice is replaced by one, and parameters that were shared stay so.

        Args:
            module: The model; it is left as it is.
            **kwargs: ``replace_bn_with_in=True`` makes instance norm of batch norm, ``num_groups`` sets the groups of
                group norm; and whatever fixers of the user's own take. Each fixer gets what it takes.

        Returns:
            The copy.

        Raises:
            TypeError: If no fixer takes a keyword.
        """  # noqa: DOC502 - the check raises on our behalf
        cls._refuse_unknown(kwargs)
        fixed = copied(module)
        for name, part in list(trainable_modules(fixed)):
            fixer = cls.FIXERS.get(type(part))
            if fixer is None or not any(part is present for present in fixed.modules()):  # gone with its parent
                continue
            other = fixer(part, **{key: value for key, value in kwargs.items() if _takes(fixer, key)})
            if other is not part:
                other.to(next(part.parameters()).device)
                _keep_parameters(part, other)
                fixed = with_replacements(fixed, {part: other})
                logger.info("Layer %r: %s is now %s.", name, part, other)
        return fixed

    @classmethod
    def fix_and_validate(cls, module: nn.Module, **kwargs: Any) -> nn.Module:
        """``fix``, then a strict ``validate`` of the result.

        Args:
            module: The model; it is left as it is.
            **kwargs: As ``fix`` takes them.

        Returns:
            The copy.

        Raises:
            UnsupportedModuleError: If the copy is not valid either.
        """  # noqa: DOC502 - what is called raises on our behalf
        fixed = cls.fix(module, **kwargs)
        cls.validate(fixed, strict=True)
        return fixed

    @classmethod
    def _refuse_unknown(cls, kwargs: dict[str, Any]) -> None:
        fixers = set(cls.FIXERS.values())
        named = (p for fixer in fixers for p in list(inspect.signature(fixer).parameters.values())[1:])
        known = {*_KEYWORDS, *(p.name for p in named if p.kind is not p.VAR_KEYWORD)}
        for name in kwargs:
            own = (fixer for fixer in fixers if not fixer.__module__.startswith(__package__))
            if name in known or any(_takes(fixer, name) for fixer in own):
                continue
            near = difflib.get_close_matches(name, known, n=1)
            hint = f" Did you mean {near[0]!r}?" if near else f" The fixers take: {', '.join(sorted(known))}."
            raise TypeError(f"fix() has no argument {name!r}.{hint}")


def _placed(error: Any, name: str) -> Any:
    """The error, with the name of its layer in front of its message."""
    where = f"Layer {name!r}: " if name else "The model: "
    if len(error.args) == 1 and isinstance(error.args[0], str) and not error.args[0].startswith(where):
        error.args = (where + error.args[0],)
    return error


def _takes(fixer: Callable[..., Any], keyword: str) -> bool:
    parameters = inspect.signature(fixer).parameters
    return keyword in parameters or any(p.kind is p.VAR_KEYWORD for p in parameters.values())


def _keep_parameters(before: nn.Module, after: nn.Module) -> None:
    """Lets a replacement hold the parameters themselves of which it has equal copies: others may share them."""
    for name, mine in list(after.named_parameters()):
        owner, _, last = name.rpartition(".")
        theirs = dict(before.named_parameters()).get(name)
        if theirs is not None and theirs.shape == mine.shape and torch.equal(theirs, mine.to(theirs.dtype)):
            after.get_submodule(owner)._parameters[last] = theirs
