"""A layer of torch as the subclass of it that the engine can follow."""

from __future__ import annotations

from typing import TypeVar

from torch import nn

from dpengine.validation.fix_model import copied

from .errors import NotYetSupportedModuleError

M = TypeVar("M", bound=nn.Module)


def as_class(module: nn.Module, original: type[nn.Module], private: type[M]) -> M:
    """A copy of the layer with another class: what it holds and its settings stay.

    Args:
        module: A layer, exactly of the original class.
        original: Its class.
        private: A subclass of it, without state of its own.

    Returns:
        The copy.

    Raises:
        NotYetSupportedModuleError: If the layer is of another class, which may compute something else.
    """
    if type(module) is not original:
        raise NotYetSupportedModuleError(
            f"{type(module).__name__} is not exactly {original.__name__} and may compute something else. Build a "
            f"{private.__name__} yourself, or register a fixer with @register_module_fixer({type(module).__name__})."
        )
    other = copied(module)
    other.__class__ = private
    return other  # type: ignore[return-value]
