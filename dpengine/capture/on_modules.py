"""Hooks and attributes that capture sets on modules. Copies and pickles of modules do not contain them."""

from __future__ import annotations

import contextlib
import functools
import types
from collections.abc import Callable
from typing import Any

from torch import nn

from dpengine.layers.replacements import ORIGINALS

_HOOKS = ("_forward_hooks", "_forward_pre_hooks")
_HOOK_FLAGS = ("_forward_hooks_with_kwargs", "_forward_hooks_always_called", "_forward_pre_hooks_with_kwargs")
_RNN = (1, 1, 1, True, False, 0.0, False, 0, "meta")
_SMALLEST: dict[type[nn.Module], tuple[Any, ...]] = {
    nn.RNN: (*_RNN[:3], "tanh", *_RNN[3:]),
    nn.GRU: _RNN,
    nn.LSTM: _RNN,
    nn.RNNCell: (1, 1, True, "tanh", "meta"),
    nn.GRUCell: (1, 1, True, "meta"),
    nn.LSTMCell: (1, 1, True, "meta"),
    nn.MultiheadAttention: (1, 1, 0.0, True, False, False, None, None, False, "meta"),
}
"""Constructor arguments of the smallest layers of the types that run as replacements.

A copy is constructed with them, and then gets the state of the layer.
"""


class Hook(functools.partial[Any]):
    """A hook whose copies do nothing, so that copies of the model have no hooks."""

    def __deepcopy__(self, memo: Any) -> Callable[..., None]:
        return _DOES_NOTHING.__exit__

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, str]]:
        # An object of the standard library, so that a saved model can be loaded without dpengine.
        return getattr, (_DOES_NOTHING, "__exit__")


_DOES_NOTHING = contextlib.nullcontext()


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
        self.replaced = vars(self.module).get("forward")  # the instance attribute, if any; restored by `detach`

    @property
    def __wrapped__(self) -> Callable[..., Any]:
        return self.forward  # read by `inspect.signature`

    def attach(self) -> None:
        """Replaces the module's ``forward``."""
        vars(self.module)["forward"] = self

    def detach(self) -> None:
        """Restores the module's ``forward``, unless other code replaced it since."""
        attributes = vars(self.module)
        if attributes.get("forward") is not self:
            return
        if self.replaced is None:
            del attributes["forward"]
        else:
            attributes["forward"] = self.replaced

    def __deepcopy__(self, memo: dict[int, Any]) -> Callable[..., Any]:
        return _forward_of_class(memo.get(id(self.module), self.module))

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[nn.Module, str]]:
        return getattr, (self.module, "forward")  # gets ``forward`` of the class, as attributes are unpickled later

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the module."""
        return self.forward(*args, **kwargs)


def has_own_forward(module: nn.Module) -> bool:
    """Returns True if the instance overrides the ``forward`` of its class, not counting the override by capture."""
    forward = vars(module).get("forward")
    while isinstance(forward, ReplacedForward):
        forward = forward.replaced
    return forward is not None and getattr(forward, "__func__", None) is not type(module).forward


def _forward_of_class(module: nn.Module) -> Callable[..., Any]:
    return types.MethodType(type(module).forward, module)


class ReduceWithoutHooks:
    """Replaces ``__reduce_ex__`` of a module, so that its pickles and copies contain no object of dpengine.

    Args:
        module: The module.
        replaced: True if the module is a layer that has the class of a replacement while the hooks are attached.
    """

    def __init__(self, module: nn.Module, *, replaced: bool):
        self._module, self._replaced = module, replaced

    def attach(self) -> None:
        """Sets the attribute of the module, unless the module already has one."""
        vars(self._module).setdefault("__reduce_ex__", self)

    def detach(self) -> None:
        """Removes the attribute."""
        if vars(self._module).get("__reduce_ex__") is self:
            del vars(self._module)["__reduce_ex__"]

    def __call__(self, protocol: Any) -> Any:
        """Returns the reduced form of the module without hooks, for pickle and copy."""
        kind: type[nn.Module] = ORIGINALS[type(self._module)] if self._replaced else type(self._module)
        unhooked = object.__new__(kind)
        vars(unhooked).update(_without_hooks(self._module))
        reduced = unhooked.__reduce_ex__(protocol)
        return (kind, _SMALLEST[kind], *reduced[2:]) if self._replaced else reduced  # pickle compares classes


def _without_hooks(module: nn.Module) -> dict[str, Any]:
    """Returns the attributes that a module would have without hooks."""
    attributes = {name: value for name, value in vars(module).items() if not isinstance(value, ReduceWithoutHooks)}
    while isinstance(forward := attributes.pop("forward", None), ReplacedForward):
        if forward.replaced is not None:
            attributes["forward"] = forward.replaced
    if forward is not None:
        attributes["forward"] = forward
    user_hooks: set[int] = set()  # ids
    for name in _HOOKS:
        hooks = attributes[name]
        attributes[name] = type(hooks)((key, hook) for key, hook in hooks.items() if not isinstance(hook, Hook))
        user_hooks.update(attributes[name])
    for name in _HOOK_FLAGS:
        flags = attributes[name]
        attributes[name] = type(flags)((key, value) for key, value in flags.items() if key in user_hooks)
    return attributes
