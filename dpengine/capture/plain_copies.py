"""Pickles and copies of modules with hooks, which equal those of modules without hooks."""

from __future__ import annotations

from typing import Any

from torch import nn

from dpengine.layers.replacements import ORIGINALS

from .hooks import Hook
from .replaced_forward import ReplacedForward

_HOOKS = ("_forward_hooks", "_forward_pre_hooks")
_OF_HOOKS = ("_forward_hooks_with_kwargs", "_forward_hooks_always_called", "_forward_pre_hooks_with_kwargs")
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
"""Smallest constructor arguments of layers that run as replacements. The copied state then overwrites their tensors."""


class PlainReduce:
    """Replaces ``__reduce_ex__`` of a module: pickles and copies of the module contain no object of dpengine.

    Args:
        module: The module.
        replaced: True if it is a layer whose class is that of a replacement while the hooks are attached.
    """

    def __init__(self, module: nn.Module, *, replaced: bool):
        self._module, self._replaced = module, replaced

    def attach(self) -> None:
        """Sets the attribute of the module, unless the module has one of its own."""
        vars(self._module).setdefault("__reduce_ex__", self)

    def detach(self) -> None:
        """Removes the attribute."""
        if vars(self._module).get("__reduce_ex__") is self:
            del vars(self._module)["__reduce_ex__"]

    def __call__(self, protocol: Any) -> Any:
        """Returns what pickle and copy need."""
        kind: type[nn.Module] = ORIGINALS[type(self._module)] if self._replaced else type(self._module)
        plain = object.__new__(kind)
        vars(plain).update(_without_hooks(self._module))
        reduced = plain.__reduce_ex__(protocol)
        return (kind, _SMALLEST[kind], *reduced[2:]) if self._replaced else reduced  # pickle compares classes


def _without_hooks(module: nn.Module) -> dict[str, Any]:
    """Returns the attributes that a module would have without hooks."""
    own = {name: value for name, value in vars(module).items() if not isinstance(value, PlainReduce)}
    while isinstance(forward := own.pop("forward", None), ReplacedForward):
        if forward.replaced is not None:
            own["forward"] = forward.replaced
    if forward is not None:
        own["forward"] = forward
    kept: set[int] = set()
    for name in _HOOKS:
        hooks = own[name]
        own[name] = type(hooks)((key, hook) for key, hook in hooks.items() if not isinstance(hook, Hook))
        kept.update(own[name])
    for name in _OF_HOOKS:
        own[name] = type(own[name])((key, value) for key, value in own[name].items() if key in kept)
    return own
