"""Detects changes of the settings on which a traced graph depends: arguments, module attributes, state, autocast."""

from __future__ import annotations

import enum
import operator
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules import module as torch_module
from torch.utils.weak import WeakIdRef

from dpengine.capture.capture import Capture
from dpengine.capture.on_modules import Hook
from dpengine.errors import UnsupportedLayerError

VALUE_TYPES = (int, float, bool, str, bytes, type(None), torch.dtype, torch.device, enum.Enum)
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_GLOBAL_HOOKS = ("_global_forward_hooks", "_global_forward_pre_hooks", "_global_backward_hooks",
                 "_global_backward_pre_hooks")  # fmt: skip
INTERNAL = vars(nn.Module()).keys() - {"training"}  # hooks, and tables that `ModuleTables` compares
_MAX_BYTES, _MAX_DEPTH = 2**16, 5  # limits of the arrays and of the nesting of objects that are compared
_version, _dtype = operator.attrgetter("_version"), operator.attrgetter("dtype")


def layout_of(tensor: Tensor) -> object:
    """Returns shape, dtype, device and strides."""
    return tensor.shape, tensor.dtype, tensor.device, tensor.stride()


def static_arguments(leaves: Sequence[Any]) -> tuple[Any, ...]:
    """Returns the argument leaves with their types, and None in place of each tensor.

    Raises UnsupportedLayerError for other objects, because a graph would store their content as constants.
    """
    for leaf in leaves:
        if not isinstance(leaf, (Tensor, *VALUE_TYPES)):
            raise UnsupportedLayerError(f"the model is called with a {type(leaf).__name__}.")
    return tuple(None if isinstance(leaf, Tensor) else (type(leaf), leaf) for leaf in leaves)


def autocast_key(device: torch.device) -> object:
    """Returns a key of the autocast settings: enabled, and the dtype."""
    return torch.is_autocast_enabled(device.type), torch.get_autocast_dtype(device.type)


def model_key(model: nn.Module, state: Sequence[Tensor]) -> object:
    """Returns a key of the modules, their settings, and their parameters and buffers.

    Objects are compared by weak references. Unlike an address, a weak reference never matches a later object.
    """
    index_of = {tensor: i for i, tensor in enumerate(state)}
    modules = tuple((WeakIdRef(module), type(module), _settings(module, index_of)) for module in model.modules())
    return modules, tuple((WeakIdRef(tensor), layout_of(tensor), tensor.requires_grad) for tensor in state)


def _settings(module: nn.Module, index_of: dict[Tensor, int]) -> tuple[Any, ...]:
    settings: list[Any] = [(name, index_of.get(t)) for table in (module._parameters, module._buffers)  # type: ignore[attr-defined]
                           for name, t in table.items() if t is not None]  # fmt: skip
    settings += [(name, WeakIdRef(child)) for name, child in module._modules.items() if child is not None]
    return (*settings, *((name, comparable_form(vars(module)[name])) for name in vars(module).keys() - INTERNAL))


@dataclass(frozen=True, eq=False)
class _Object:
    """Wrapper that compares an object by identity."""

    value: Any

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Object) and other.value is self.value

    def __hash__(self) -> int:
        return id(self.value)


def comparable_form(value: Any, depth: int = 0) -> Any:
    """Returns a comparable form of a value. Values with equal forms can use the same graph.

    Raises UnsupportedLayerError for an object whose content cannot be compared.
    """
    kind: Any = type(value)
    if isinstance(value, VALUE_TYPES):
        return kind, value
    if isinstance(value, Tensor):
        return WeakIdRef(value), value._version
    if isinstance(value, np.generic) or (isinstance(value, np.ndarray) and value.nbytes <= _MAX_BYTES):
        return kind, value.dtype.str, value.shape, value.tobytes()
    if callable(value) and not isinstance(value, nn.Module):
        return _Object(value)
    if depth < _MAX_DEPTH:
        if isinstance(value, (list, tuple)):
            return kind, tuple([comparable_form(element, depth + 1) for element in value])
        if isinstance(value, (set, frozenset)) and all(isinstance(element, VALUE_TYPES) for element in value):
            return kind, frozenset(value)
        if isinstance(value, dict):
            items = [
                (comparable_form(name, depth + 1), comparable_form(item, depth + 1)) for name, item in value.items()
            ]
            return kind, tuple(items)
        if hasattr(value, "__dict__") and not isinstance(value, nn.Module):
            return _Object(value), comparable_form(vars(value), depth + 1)
    raise UnsupportedLayerError(f"a module has a {kind.__name__} in an attribute, whose content may change.")


class ModelSettings:
    """Snapshot of the settings of a model. `unchanged` compares it with the current settings.

    Attributes:
        key: See `model_key`.
        state: Parameters and buffers of the model, without duplicates.
    """

    def __init__(self, capture: Capture):
        tables = self._tables = capture.tables
        self.state = list({table[name]: None for table, name, _ in tables.tensors() if table[name] is not None})
        self.key = model_key(capture.model, self.state)
        self._tables_version = tables.version
        self._attributes = list(map(vars, tables.modules.values()))
        self._sizes = list(map(len, self._attributes))
        names = [["training", *(own.keys() - INTERNAL)] for own in self._attributes]
        # At least two names, so that the result is a tuple.
        self._readers = [operator.itemgetter("training", *module_names) for module_names in names]
        self._values = self._current()
        self._tensors = [value for value in self._values if isinstance(value, Tensor)]
        others = {id(v): v for v in self._values if not isinstance(v, (*VALUE_TYPES, Tensor))}.values()
        # All values are compared by identity; containers and objects also by content.
        contents = [(v, content) for v in others if not isinstance(content := comparable_form(v), _Object)]
        self._containers, self._contents = [v for v, _ in contents], [content for _, content in contents]
        self._versions = list(map(_version, self._tensors))
        self._memory = self._memory_layout()
        self._hooks = [attributes[name] for attributes in self._attributes for name in _HOOKS]
        self._hooks += [getattr(torch_module, name) for name in _GLOBAL_HOOKS]
        self._counts = list(map(len, self._hooks))
        root = {id(vars(capture.model)[name]) for name in _HOOKS}  # hooks of the model run outside the graph
        hooks = chain.from_iterable(table.values() for table in self._hooks if id(table) not in root)
        self._has_hooks = not all(isinstance(hook, Hook) for hook in hooks)

    def _current(self) -> list[Any]:
        return list(chain.from_iterable([read(own) for read, own in zip(self._readers, self._attributes, strict=True)]))

    def _memory_layout(self) -> list[Any]:
        return [*map(Tensor.data_ptr, self.state), *map(_dtype, self.state)]

    def unchanged(self) -> bool:
        """Returns True if no setting of the model has changed. The tables must be current."""
        return (
            self._tables_version == self._tables.version
            and list(map(len, self._attributes)) == self._sizes
            and list(map(len, self._hooks)) == self._counts
            and list(map(_version, self._tensors)) == self._versions
            and self._memory_layout() == self._memory
            and self._same_values()
        )

    def _same_values(self) -> bool:
        try:
            same = all(map(operator.is_, self._current(), self._values))
            return same and list(map(comparable_form, self._containers)) == self._contents
        except (KeyError, UnsupportedLayerError):  # an attribute was deleted and another added
            return False

    def check_no_hooks(self) -> None:
        """Raises UnsupportedLayerError if a layer has hooks of the user, which would run only during tracing."""
        if self._has_hooks:
            raise UnsupportedLayerError("a layer of the model has a hook.")
