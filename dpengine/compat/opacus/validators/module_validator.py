"""Validators and fixers by layer type, applied to a whole model."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import nn

from dpengine.compat.opacus.utils.module_utils import trainable_modules
from dpengine.errors import check_keywords
from dpengine.validation.fix_model import copied, with_replacements

from .errors import IllegalModuleConfigurationError, UnsupportedModuleError

logger = logging.getLogger(__name__)

_KEYWORDS = ("replace_bn_with_in", "num_groups")  # of the built-in fixers


class ModuleValidator:
    """Validates and fixes every module that itself owns a trainable parameter, by exact type.

    Attributes:
        VALIDATORS: ``f(module) -> list of errors`` by layer type.
        FIXERS: ``f(module, **kwargs) -> module`` by layer type.
    """

    VALIDATORS: ClassVar[dict[type[nn.Module], Callable[..., Any]]] = {}
    FIXERS: ClassVar[dict[type[nn.Module], Callable[..., Any]]] = {}

    @classmethod
    def validate(cls, module: nn.Module, *, strict: bool = False) -> list[UnsupportedModuleError]:
        """Returns the errors of the layers of a model that prevent private training, with the names of the layers.

        Args:
            module: The model.
            strict: Whether to raise the errors.

        Raises:
            UnsupportedModuleError: If ``strict`` and there are errors. Its argument is their list.
        """
        errors: list[UnsupportedModuleError] = []
        if not module.training:
            message = f"The model ({type(module).__name__}) is in eval mode. Call model.train() first."
            errors.append(IllegalModuleConfigurationError(message))
        for name, part in trainable_modules(module):
            validator = cls.VALIDATORS.get(type(part))
            errors += [_with_layer_name(error, name) for error in ([] if validator is None else validator(part))]
        if strict and errors:
            raise UnsupportedModuleError(errors)
        return errors

    @classmethod
    def is_valid(cls, module: nn.Module) -> bool:
        """Returns True if ``validate`` finds no error. ``make_private`` checks more than layer types."""
        return not cls.validate(module, strict=False)

    @classmethod
    def fix(cls, module: nn.Module, **kwargs: Any) -> nn.Module:
        """Returns a copy of a model with layers replaced by their fixers. Build the optimizer afterwards.

        A layer that is used twice is replaced by one layer, and shared parameters stay shared.

        Args:
            module: The model; it does not change.
            **kwargs: ``replace_bn_with_in=True`` replaces batch norm by instance norm, and ``num_groups`` sets the
                groups of group norm. Other keywords are for registered fixers. An unknown keyword raises ``TypeError``.
        """
        cls._check_keywords(kwargs)
        fixed = copied(module)
        for name, part in list(trainable_modules(fixed)):
            fixer = cls.FIXERS.get(type(part))
            if fixer is None or not any(part is present for present in fixed.modules()):  # its parent was replaced
                continue
            replacement = fixer(part, **{key: value for key, value in kwargs.items() if _takes(fixer, key)})
            if replacement is not part:
                replacement.to(next(part.parameters()).device)
                _keep_parameters(part, replacement)
                fixed = with_replacements(fixed, {part: replacement})
                logger.info("Layer %r: %s is now %s.", name, part, replacement)
        return fixed

    @classmethod
    def fix_and_validate(cls, module: nn.Module, **kwargs: Any) -> nn.Module:
        """Returns the result of ``fix`` with the same arguments, after a strict ``validate`` of it."""
        fixed = cls.fix(module, **kwargs)
        cls.validate(fixed, strict=True)
        return fixed

    @classmethod
    def _check_keywords(cls, kwargs: dict[str, Any]) -> None:
        fixers = set(cls.FIXERS.values())
        named = (p for fixer in fixers for p in list(inspect.signature(fixer).parameters.values())[1:])
        known = {*_KEYWORDS, *(p.name for p in named if p.kind is not p.VAR_KEYWORD)}
        for name in kwargs:
            custom = (fixer for fixer in fixers if not fixer.__module__.startswith(__package__))
            if not any(_takes(fixer, name) for fixer in custom):
                check_keywords("fix", [name], sorted(known))


def _with_layer_name(error: Any, name: str) -> Any:
    """Puts the name of the layer in front of the message of an error."""
    where = f"Layer {name!r}: " if name else "The model: "
    if len(error.args) == 1 and isinstance(error.args[0], str) and not error.args[0].startswith(where):
        error.args = (where + error.args[0],)
    return error


def _takes(fixer: Callable[..., Any], keyword: str) -> bool:
    parameters = inspect.signature(fixer).parameters
    return keyword in parameters or any(p.kind is p.VAR_KEYWORD for p in parameters.values())


def _keep_parameters(before: nn.Module, after: nn.Module) -> None:
    """Replaces equal copies by the original parameters, because other layers may share those."""
    for name, new in list(after.named_parameters()):
        owner, _, last = name.rpartition(".")
        old = dict(before.named_parameters()).get(name)
        if old is not None and old.shape == new.shape and torch.equal(old, new.to(old.dtype)):
            after.get_submodule(owner)._parameters[last] = old
