"""Replacement of the ``forward`` of a module."""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

from torch import nn


class ReplacedForward:
    """Replaces a module's ``forward`` as an attribute of the instance, and calls the original.

    Copies and pickles of the module get the ``forward`` of its class.
    """

    def __init__(self, module: nn.Module):
        self.module = module
        self.read()

    def read(self) -> None:
        """Reads the ``forward`` to replace."""
        self.forward: Callable[..., Any] = self.module.forward
        self.replaced = vars(self.module).get("forward")  # the instance attribute, if any; put back by `detach`

    @property
    def __wrapped__(self) -> Callable[..., Any]:
        return self.forward  # read by `inspect.signature`

    def attach(self) -> None:
        """Replaces the module's ``forward``."""
        vars(self.module)["forward"] = self

    def detach(self) -> None:
        """Restores the module's ``forward``, unless other code replaced it since."""
        own = vars(self.module)
        if own.get("forward") is not self:
            return
        if self.replaced is None:
            del own["forward"]
        else:
            own["forward"] = self.replaced

    def __deepcopy__(self, memo: dict[int, Any]) -> Callable[..., Any]:
        return _forward_of_class(memo.get(id(self.module), self.module))

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[nn.Module, str]]:
        return getattr, (self.module, "forward")  # has no instance attributes yet while it is unpickled: the class's

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the module."""
        return self.forward(*args, **kwargs)


def has_own_forward(module: nn.Module) -> bool:
    """Returns True if the instance overrides the ``forward`` of its class, not counting the override by capture."""
    own = vars(module).get("forward")
    while isinstance(own, ReplacedForward):
        own = own.replaced
    return own is not None and getattr(own, "__func__", None) is not type(module).forward


def _forward_of_class(module: nn.Module) -> Callable[..., Any]:
    return types.MethodType(type(module).forward, module)
