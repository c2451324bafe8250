"""Registration of validators and fixers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from torch import nn

from .module_validator import ModuleValidator

F = TypeVar("F", bound=Callable[..., Any])


def register_module_validator(
    target_class_or_classes: type | Sequence[type], validator_class: type = ModuleValidator
) -> Callable[[F], F]:
    """Returns a decorator that registers ``f(module) -> list of errors`` as validator of exactly these classes.

    Args:
        target_class_or_classes: One or several subclasses of ``nn.Module``; other values raise ``TypeError``.
        validator_class: Class in whose table to register.
    """
    return _register(target_class_or_classes, validator_class.VALIDATORS)  # type: ignore[attr-defined]


def register_module_fixer(
    target_class_or_classes: type | Sequence[type], validator_class: type = ModuleValidator
) -> Callable[[F], F]:
    """Returns a decorator that registers ``f(module, **kwargs) -> module`` as fixer of exactly these classes.

    The fixer is passed the keywords of ``ModuleValidator.fix`` that it accepts.

    Args:
        target_class_or_classes: One or several subclasses of ``nn.Module``; other values raise ``TypeError``.
        validator_class: Class in whose table to register.
    """
    return _register(target_class_or_classes, validator_class.FIXERS)  # type: ignore[attr-defined]


def _register(given: type | Sequence[type], table: dict[type[nn.Module], Any]) -> Callable[[F], F]:
    classes = list(given) if isinstance(given, Sequence) else [given]
    for kind in classes:
        if not (isinstance(kind, type) and issubclass(kind, nn.Module)):
            raise TypeError(f"Expected a subclass of torch.nn.Module, or a list of them, got {kind!r}.")

    def register(function: F) -> F:
        table.update(dict.fromkeys(classes, function))
        return function

    return register
