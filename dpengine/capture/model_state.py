"""Snapshot of the state of a model except its parameters, to repeat or undo a forward pass."""

from __future__ import annotations

import contextlib
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

_PARTS = frozenset({"_parameters", "_modules", "_buffers"})
_HOOKS = OrderedDict  # the type of all containers of hooks
_SIMPLE = frozenset({bool, int, float, str, type(None)})
_NOT_SAVED = _SIMPLE | {tuple}
_NOT_COMPARED = _NOT_SAVED | {_HOOKS}
_CONTAINERS = frozenset({list, dict, set})
_MAX_ELEMENTS = 2**20  # largest tensor attribute that is copied

Attributes = dict[nn.Module, dict[str, Any]]  # of each submodule, by name
Slot = tuple[int, str]  # index of the module in ``model.modules()``, and name of its attribute


@dataclass(frozen=True, eq=False)
class ModelState:
    """Snapshot of the buffers and attributes of all modules, including train or eval mode.

    The contents of attributes are saved for (nested) lists, dicts, sets, small tensors and generators, and for hooks,
    which a forward pass may register.

    Attributes:
        attributes: The ``__dict__`` of each module, and a copy of it.
        contents: Mutable values of attributes, and their saved contents, by id of the value.
        buffers: The buffers of each module: the dict itself, a copy of it, and copies of the tensors.
    """

    attributes: list[tuple[dict[str, Any], dict[str, Any]]]
    contents: dict[int, tuple[Any, Any]]
    buffers: list[tuple[dict[str, Tensor | None], dict[str, Tensor | None], dict[str, Tensor]]]

    @classmethod
    def of(cls, model: nn.Module) -> ModelState:
        """Saves the state of a model."""
        attributes, buffers = [], []
        contents: dict[int, tuple[Any, Any]] = {}
        for module in model.modules():
            saved = {name: value for name, value in vars(module).items() if name not in _PARTS}
            attributes.append((vars(module), saved))
            _save_contents(saved.values(), contents)
            values = {name: buffer.clone() for name, buffer in module._buffers.items() if buffer is not None}
            buffers.append((module._buffers, dict(module._buffers), values))
        return cls(attributes, contents, buffers)

    def restore(self) -> None:
        """Restores the saved state."""
        for current, saved in self.attributes:
            for name in current.keys() - saved.keys() - _PARTS:
                del current[name]
            current.update(saved)
        for value, content in self.contents.values():
            _set_content(value, content)
        for buffers, saved_buffers, values in self.buffers:
            buffers.clear()
            buffers.update(saved_buffers)
            for name, value in values.items():
                buffer = buffers[name]
                if buffer is not None and not _equal(buffer, value):
                    buffer.data.copy_(value)

    def changed_since(self, before: ModelState) -> list[Slot]:
        """Returns the attributes whose value or content may differ from an earlier snapshot."""
        changed = []
        for i, ((_, current), (_, earlier)) in enumerate(zip(self.attributes, before.attributes, strict=True)):
            for name, value in current.items():
                old = earlier.get(name, _MISSING)
                if value is not old:
                    if type(value) not in _SIMPLE or type(value) is not type(old) or value != old:
                        changed.append((i, name))
                elif type(value) not in _NOT_COMPARED and self._content_changed(before, value):
                    changed.append((i, name))
        return changed

    def _content_changed(self, before: ModelState, value: Any) -> bool:
        if id(value) not in self.contents or id(value) not in before.contents:
            return False
        content, old_content = self.contents[id(value)][1], before.contents[id(value)][1]
        if isinstance(value, (Tensor, torch.Generator)):
            return not _equal(content, old_content)
        parts, old_parts = _parts(content), _parts(old_content)
        same = len(parts) == len(old_parts) and all(map(_is_same, parts, old_parts))
        return not same or any(self._content_changed(before, part) for part in parts)

    def value_of(self, slot: Slot) -> Any:
        """Returns the saved value of an attribute with its saved content; None if there is no such attribute."""
        return self._as_saved(self.attributes[slot[0]][1].get(slot[1]))

    def _as_saved(self, value: Any) -> Any:
        content = self.contents[id(value)][1] if id(value) in self.contents else value
        if type(value) is tuple or type(value) is list:
            return type(value)(map(self._as_saved, content))
        return {k: self._as_saved(v) for k, v in content.items()} if type(value) is dict else content

    def put(self, slots: Iterable[Slot]) -> None:
        """Restores the attributes ``slots``, with their contents."""
        for i, name in slots:
            current, saved = self.attributes[i]
            if name in saved:
                current[name] = saved[name]
                self._put_content(saved[name])
            else:
                current.pop(name, None)

    def _put_content(self, value: Any) -> None:
        if id(value) in self.contents:
            content = self.contents[id(value)][1]
            _set_content(value, content)
            for part in _parts(content):
                self._put_content(part)

    def detached(self) -> ModelState:
        """Returns this snapshot without buffers and autograd graphs, so that it can be stored until a later batch."""
        attributes = [
            (current, {name: _detached(v) for name, v in saved.items()}) for current, saved in self.attributes
        ]
        contents = {key: (value, _parts_detached(content)) for key, (value, content) in self.contents.items()}
        return ModelState(attributes, contents, [])


_MISSING = object()


@contextlib.contextmanager
def attributes_kept(module: nn.Module, initial: Attributes | None = None) -> Iterator[None]:
    """Restores the attributes of all submodules on exit, because a replay stores tensors of a finished transform.

    A changed attribute gets its value in ``initial``, if given: the value on entry may belong to an earlier batch.
    """
    before = attributes_of(module)
    try:
        yield
    finally:
        for part, old in before.items():
            current, restored = vars(part), (initial or before).get(part, old)
            changed = [n for n in {**current, **old} if current.get(n, _MISSING) is not old.get(n, _MISSING)]
            for name in changed:
                if name in restored:
                    current[name] = restored[name]
                else:
                    current.pop(name, None)


def attributes_of(module: nn.Module) -> Attributes:
    """Returns the attributes of all submodules."""
    return {part: dict(vars(part)) for part in module.modules()}


@contextlib.contextmanager
def preserve_modes(model: nn.Module) -> Iterator[None]:
    """Restores the train or eval mode of each module on exit."""
    modes = [(module, module.training) for module in model.modules()]
    try:
        yield
    finally:
        for module, mode in modes:
            module.training = mode


def _save_contents(values: Iterable[Any], contents: dict[int, tuple[Any, Any]]) -> None:
    for value in values:
        if type(value) in _NOT_SAVED or id(value) in contents:
            continue
        content = _content(value)
        if content is not None:
            contents[id(value)] = value, content
            if type(value) in _CONTAINERS:
                _save_contents(_parts(content), contents)


def _parts(content: Any) -> list[Any]:
    """Returns the elements of a list or set, or the values of a dict; an empty list for other objects."""
    if type(content) in _CONTAINERS:
        return list(content.values() if type(content) is dict else content)
    return []


def _is_same(a: Any, b: Any) -> bool:
    return a is b or (type(a) in _SIMPLE and type(a) is type(b) and a == b)


def _parts_detached(content: Any) -> Any:
    if type(content) is list:
        return list(map(_detached, content))
    return {k: _detached(v) for k, v in content.items()} if type(content) is dict else content


def _detached(value: Any) -> Any:
    if type(value) is Tensor:
        return value.detach() if value.requires_grad else value
    return tuple(map(_detached, value)) if type(value) is tuple else value


def _content(value: Any) -> Any:
    """Returns a copy of the content of an object that may be modified in place; None for other objects."""
    if type(value) in _CONTAINERS or type(value) is _HOOKS:
        return value.copy()
    if type(value) is Tensor and not value.requires_grad and value.numel() <= _MAX_ELEMENTS:
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


def _equal(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and torch.equal(a, b)
