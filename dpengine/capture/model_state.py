"""Snapshot of the state of a model besides its parameters, so that a forward pass can be repeated and undone."""

from __future__ import annotations

import contextlib
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

_PARTS = frozenset({"_parameters", "_modules", "_buffers"})
_NOT_SAVED = frozenset({bool, int, float, str, tuple, type(None), OrderedDict})  # an OrderedDict holds hooks
_MOST_ELEMENTS = 2**20  # of a tensor attribute that is copied


@dataclass(frozen=True, eq=False)
class ModelState:
    """Snapshot of the buffers and attributes of all modules, including train or eval mode.

    Contents of attributes are saved for lists, dicts, sets, small tensors and generators.

    Attributes:
        attributes: The ``__dict__`` of each module, and a copy of it.
        contents: Mutable values of attributes, and their saved contents.
        buffers: The buffers of each module: the dict itself, a copy of it, and copies of the tensors.
    """

    attributes: list[tuple[dict[str, Any], dict[str, Any]]]
    contents: list[tuple[Any, Any]]
    buffers: list[tuple[dict[str, Tensor | None], dict[str, Tensor | None], dict[str, Tensor]]]

    @classmethod
    def of(cls, model: nn.Module) -> ModelState:
        """Saves the state of a model."""
        attributes, contents, buffers = [], [], []
        for module in model.modules():
            saved = {name: value for name, value in vars(module).items() if name not in _PARTS}
            attributes.append((vars(module), saved))
            for value in saved.values():
                if type(value) not in _NOT_SAVED and (content := _content(value)) is not None:
                    contents.append((value, content))
            values = {name: buffer.clone() for name, buffer in module._buffers.items() if buffer is not None}
            buffers.append((module._buffers, dict(module._buffers), values))
        return cls(attributes, contents, buffers)

    def restore(self) -> None:
        """Restores the saved state."""
        for current, saved in self.attributes:
            for name in current.keys() - saved.keys() - _PARTS:
                del current[name]
            current.update(saved)
        for value, content in self.contents:
            _set_content(value, content)
        for buffers, saved_buffers, values in self.buffers:
            buffers.clear()
            buffers.update(saved_buffers)
            for name, value in values.items():
                buffer = buffers[name]
                if buffer is not None and not _equal(buffer, value):
                    buffer.data.copy_(value)


@contextlib.contextmanager
def preserve_modes(model: nn.Module) -> Iterator[None]:
    """Restores the train or eval mode of each module on exit, because parts may be in eval mode on purpose."""
    modes = [(module, module.training) for module in model.modules()]
    try:
        yield
    finally:
        for module, mode in modes:
            module.training = mode


def _content(value: Any) -> Any:
    """Returns a copy of the content of an object that may be modified in place; None for other objects."""
    if type(value) in {list, dict, set}:
        return value.copy()
    if type(value) is Tensor and not value.requires_grad and value.numel() <= _MOST_ELEMENTS:
        return value.clone()
    return value.get_state() if isinstance(value, torch.Generator) else None


def _set_content(value: Any, content: Any) -> None:
    if isinstance(value, torch.Generator):
        value.set_state(content)
    elif isinstance(value, Tensor):
        value.data.copy_(content)
    elif isinstance(value, list):
        value[:] = content
    else:
        value.clear()
        value.update(content)


def _equal(one: Tensor, other: Tensor) -> bool:
    return one.shape == other.shape and torch.equal(one, other)
