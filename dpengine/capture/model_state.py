"""What a forward pass may write to a model, beside parameters: noted, so that a pass can be run again and undone."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

_PARTS = frozenset({"_parameters", "_modules", "_buffers"})
_SMALL = 2**20  # elements up to which a tensor that is an attribute is copied


@dataclass(frozen=True, eq=False)
class ModelState:
    """The buffers and attributes of all modules, modes included. What attributes point to is noted for plain kinds."""

    attributes: list[tuple[dict[str, Any], dict[str, Any]]]  # of each module, and what was in it
    contents: list[tuple[Any, Any]]  # containers, tensors and generators that attributes hold, and what was in them
    buffers: list[tuple[dict[str, Tensor | None], dict[str, Tensor | None], dict[str, Tensor]]]

    @classmethod
    def of(cls, model: nn.Module) -> ModelState:
        """Notes the state of a model."""
        attributes, contents, buffers = [], [], []
        for module in model.modules():
            held = {name: value for name, value in vars(module).items() if name not in _PARTS}
            attributes.append((vars(module), held))
            contents += [(value, _content(value)) for value in held.values() if _content(value) is not None]
            values = {name: buffer.clone() for name, buffer in module._buffers.items() if buffer is not None}
            buffers.append((module._buffers, dict(module._buffers), values))
        return cls(attributes, contents, buffers)

    def put_back(self) -> None:
        """Makes the model what it was."""
        for now, held in self.attributes:
            for name in now.keys() - held.keys() - _PARTS:
                del now[name]
            now.update(held)
        for value, content in self.contents:
            _refill(value, content)
        for slots, held_buffers, values in self.buffers:
            slots.clear()
            slots.update(held_buffers)
            for name, value in values.items():
                buffer = slots[name]
                if buffer is not None and not _equal(buffer, value):
                    buffer.data.copy_(value)


@contextlib.contextmanager
def modes_kept(model: nn.Module) -> Iterator[None]:
    """Puts each module back into train or eval mode as it was: a part may be in eval mode on purpose."""
    modes = [(module, module.training) for module in model.modules()]
    try:
        yield
    finally:
        for module, mode in modes:
            module.training = mode


def _content(value: Any) -> Any:
    """What to put back into an object that may be written in place; None for any other."""
    if type(value) in {list, dict, set}:
        return value.copy()
    if type(value) is Tensor and not value.requires_grad and value.numel() <= _SMALL:
        return value.clone()
    return value.get_state() if isinstance(value, torch.Generator) else None


def _refill(value: Any, content: Any) -> None:
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
