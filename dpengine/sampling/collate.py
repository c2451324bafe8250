"""Empty batches with the structure of other batches: with zero samples, or with a placeholder sample."""

from __future__ import annotations

import collections.abc
import contextlib
import copy
import dataclasses
import enum
import numbers
import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch

from dpengine.errors import SamplingError

_UNCHANGED = (str, bytes, numbers.Number, np.generic, enum.Enum, torch.dtype, torch.device, type(None))
_BLANK: dict[type, Any] = {str: "", bytes: b"", bool: False, int: 0, float: 0.0}


@dataclasses.dataclass(frozen=True)
class EmptyAwareCollate:
    """Calls the user's ``collate_fn``, or returns a copy of ``template`` for an empty list."""

    collate: Callable[[list[Any]], Any]
    template: Any

    def __call__(self, examples: list[Any]) -> Any:
        """Returns the batch of ``examples``."""
        return self.collate(examples) if len(examples) else copy.deepcopy(self.template)


def empty_template(collate: Callable[[list[Any]], Any], example: Any, *, batch_first: bool = True) -> Any:
    """Returns a batch of zero samples with the structure of other batches of ``collate``.

    ``collate`` is called with one copy of the example, and with two copies. An axis whose size doubles is the batch
    axis. If no size doubles, the batch axis is axis 0, or axis 1 without ``batch_first``. In the template, tensors and
    arrays have size 0 on this axis, and lists and tuples with one item per sample are empty. Tensors keep their dtype,
    device and other axes. Tensors without a batch axis are filled with zeros, so the template contains no tensor values
    of the example.

    Containers (dict, other mappings, list, tuple, named tuple, dataclass) keep their type if it can be constructed.
    Other types raise SamplingError. The random generators of the process are restored.
    """
    with restored_generators():
        single = collate([example])
    with restored_generators():
        double = collate([example, example])
    rule = _GrowthRule()
    template = _empty_form(single, double, rule, "batch")
    return template if rule.found_axis else _empty_form(single, single, _AxisRule(0 if batch_first else 1), "batch")


def placeholder_batch(collate: Callable[[list[Any]], Any], example: Any, *, public: bool = False) -> Any:
    """Returns a batch of one placeholder sample: the example itself if it is ``public``, otherwise zeros.

    Zeros replace the values of all tensors and arrays, and of the items of lists with one item per sample.
    """
    with restored_generators():
        single = collate([example])
    if public:
        return single
    with restored_generators():
        double = collate([example, example])
    return _empty_form(single, double, _Zeros(), "batch")


@contextlib.contextmanager
def restored_generators() -> Iterator[None]:
    """Restores the global random generators on exit, because a data set or collate function may use them."""
    python_state, numpy_state = random.getstate(), np.random.get_state()
    with torch.random.fork_rng(devices=[]):
        try:
            yield
        finally:
            random.setstate(python_state)
            np.random.set_state(numpy_state)


@dataclasses.dataclass
class _GrowthRule:
    """Treats an axis as the batch axis if its size doubles from one example to two."""

    found_axis: bool = False

    def shape(self, single: Sequence[int], double: Sequence[int]) -> list[int]:
        if len(single) != len(double):
            return list(single)
        grows = [size > 0 and other == 2 * size for size, other in zip(single, double, strict=True)]
        self.found_axis = self.found_axis or any(grows)
        return [0 if grown else size for size, grown in zip(single, grows, strict=True)]

    def sequence(self, single: Sequence[Any], double: Sequence[Any]) -> bool:
        grows = len(single) > 0 and len(double) == 2 * len(single)
        self.found_axis = self.found_axis or grows
        return grows


class _Zeros(_GrowthRule):
    """Keeps all sizes. ``in_sample`` is True for values inside an item of a list with one item per sample."""

    def __init__(self, in_sample: bool = False):
        super().__init__()
        self.in_sample = in_sample

    def shape(self, single: Sequence[int], double: Sequence[int]) -> list[int]:
        return list(single)


@dataclasses.dataclass(frozen=True)
class _AxisRule:
    """Treats one axis of each tensor, and each list of plain values, as the batch axis."""

    axis: int

    def shape(self, single: Sequence[int], double: Sequence[int]) -> list[int]:
        batch_axis = self.axis if len(single) > self.axis else 0
        return [0 if axis == batch_axis else size for axis, size in enumerate(single)]

    def sequence(self, single: Sequence[Any], double: Sequence[Any]) -> bool:
        return all(isinstance(item, _UNCHANGED) for item in single)


def _empty_form(single: Any, double: Any, rule: _GrowthRule | _AxisRule, where: str) -> Any:
    """Returns the empty form of a part of a batch of one sample. ``double`` is that part of a batch of two samples."""
    if isinstance(single, torch.Tensor):
        return single.new_zeros(rule.shape(single.shape, double.shape))
    if isinstance(single, np.ndarray):
        return np.zeros(rule.shape(single.shape, double.shape), dtype=single.dtype)
    if isinstance(single, collections.abc.Mapping):
        return _mapping_like(
            single, {key: _empty_form(single[key], double[key], rule, f"{where}[{key!r}]") for key in single}
        )
    if isinstance(single, (list, tuple)):
        return _empty_sequence(single, double, rule, where)
    if dataclasses.is_dataclass(single) and not isinstance(single, type):
        result = copy.copy(single)
        for field in dataclasses.fields(single):
            parts = getattr(single, field.name), getattr(double, field.name)
            object.__setattr__(result, field.name, _empty_form(*parts, rule, f"{where}.{field.name}"))
        return result
    if isinstance(single, _UNCHANGED):
        is_sample_value = isinstance(rule, _Zeros) and rule.in_sample
        return _BLANK.get(type(single), single) if is_sample_value else single
    raise SamplingError(
        f"Sampling can select no examples, but an empty {type(single).__name__} cannot be created for {where}.",
        fix="Return tensors in a dict, tuple, list or dataclass from collate_fn, or pass example_input=, a fictitious "
        "example as the data set would return it.",
    )


def _empty_sequence(single: Sequence[Any], double: Sequence[Any], rule: _GrowthRule | _AxisRule, where: str) -> Any:
    """Returns the empty form of a list or tuple.

    It has no items if there is one item per sample. Otherwise it has the empty forms of the items.
    """
    is_named = isinstance(single, tuple) and hasattr(single, "_fields")
    if not is_named and rule.sequence(single, double):
        items = []
        if isinstance(rule, _Zeros):
            items = [_empty_form(item, item, _Zeros(in_sample=True), f"{where}[{i}]") for i, item in enumerate(single)]
    else:
        pairs = enumerate(zip(single, double, strict=False))
        items = [_empty_form(*pair, rule, f"{where}[{index}]") for index, pair in pairs]
    kind: Any = type(single)
    return kind(*items) if is_named else kind(items)


def _mapping_like(original: Any, items: dict[Any, Any]) -> Any:
    """Returns a mapping of the same type with other items, or a dict if the type cannot be constructed."""
    with contextlib.suppress(TypeError, ValueError):
        return type(original)(items)
    with contextlib.suppress(TypeError, ValueError):
        # The constructor of a defaultdict needs its factory. A copy has the same keys, so all values are replaced.
        result = copy.copy(original)
        result.update(items)
        return result
    return items
