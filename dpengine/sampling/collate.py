"""Empty batches: a batch of zero rows, or a placeholder sample, with the structure of a batch."""

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

_KEPT = (str, bytes, numbers.Number, np.generic, enum.Enum, torch.dtype, torch.device, type(None))
_BLANK: dict[type, Any] = {str: "", bytes: b"", bool: False, int: 0, float: 0.0}


@dataclasses.dataclass(frozen=True)
class EmptyAwareCollate:
    """The user's ``collate_fn``, with an empty batch for an empty list, for which it is not called."""

    collate: Callable[[list[Any]], Any]
    template: Any

    def __call__(self, examples: list[Any]) -> Any:
        """Returns the batch of ``examples``."""
        return self.collate(examples) if len(examples) else copy.deepcopy(self.template)


def empty_template(collate: Callable[[list[Any]], Any], example: Any, *, batch_first: bool = True) -> Any:
    """Returns a batch of zero rows with the structure of real batches of ``collate``.

    ``collate`` is called with one copy of the example and with two. A size that doubles is the number of rows: that
    axis of a tensor or array becomes 0, and such a list or tuple becomes empty. Tensors keep dtype, device and other
    axes; those without such an axis are filled with zeros, so that the template holds no tensor value of the example.
    Containers keep their type if it can be constructed: dict, other mappings, list, tuple, named tuple, dataclass.
    Another type raises SamplingError. The random generators of the process are restored. If nothing doubles, axis 0
    counts rows, or axis 1 without ``batch_first``.
    """
    with restored_generators():
        single = collate([example])
    with restored_generators():
        double = collate([example, example])
    cut = _GrowthCut()
    template = _walk(single, double, cut, "batch")
    return template if cut.found else _walk(single, single, _AxisCut(0 if batch_first else 1), "batch")


def placeholder_batch(collate: Callable[[list[Any]], Any], example: Any, *, public: bool = False) -> Any:
    """Returns a batch of one sample for an empty batch: the example itself if it is ``public``, else one of zeros.

    Zeros replace the values of all tensors and arrays, and of the items of lists that have an item for each sample.
    """
    with restored_generators():
        single = collate([example])
    if public:
        return single
    with restored_generators():
        double = collate([example, example])
    return _walk(single, double, _Zeros(), "batch")


@contextlib.contextmanager
def restored_generators() -> Iterator[None]:
    """Restores the random generators of the process, from which a data set or collate function may draw."""
    python_state, numpy_state = random.getstate(), np.random.get_state()
    with torch.random.fork_rng(devices=[]):
        try:
            yield
        finally:
            random.setstate(python_state)
            np.random.set_state(numpy_state)


@dataclasses.dataclass
class _GrowthCut:
    """Treats an axis as rows if its size doubles from one example to two."""

    found: bool = False

    def shape(self, single: Sequence[int], double: Sequence[int]) -> list[int]:
        if len(single) != len(double):
            return list(single)
        grows = [size > 0 and other == 2 * size for size, other in zip(single, double, strict=True)]
        self.found = self.found or any(grows)
        return [0 if grown else size for size, grown in zip(single, grows, strict=True)]

    def sequence(self, single: Sequence[Any], double: Sequence[Any]) -> bool:
        grown = len(single) > 0 and len(double) == 2 * len(single)
        self.found = self.found or grown
        return grown


class _Zeros(_GrowthCut):
    """Keeps all sizes. ``of_sample`` is True within an item of a list that has an item for each sample."""

    def __init__(self, of_sample: bool = False):
        super().__init__()
        self.of_sample = of_sample

    def shape(self, single: Sequence[int], double: Sequence[int]) -> list[int]:
        return list(single)


@dataclasses.dataclass(frozen=True)
class _AxisCut:
    """Treats one axis of each tensor, and each list of plain values, as rows."""

    axis: int

    def shape(self, single: Sequence[int], double: Sequence[int]) -> list[int]:
        rows = self.axis if len(single) > self.axis else 0
        return [0 if axis == rows else size for axis, size in enumerate(single)]

    def sequence(self, single: Sequence[Any], double: Sequence[Any]) -> bool:
        return all(isinstance(item, _KEPT) for item in single)


def _walk(single: Any, double: Any, cut: _GrowthCut | _AxisCut, where: str) -> Any:
    """Returns the empty form of ``single``; ``double`` is the same part of the batch with two rows."""
    if isinstance(single, torch.Tensor):
        return single.new_zeros(cut.shape(single.shape, double.shape))
    if isinstance(single, np.ndarray):
        return np.zeros(cut.shape(single.shape, double.shape), dtype=single.dtype)
    if isinstance(single, collections.abc.Mapping):
        return _like_mapping(single, {key: _walk(single[key], double[key], cut, f"{where}[{key!r}]") for key in single})
    if isinstance(single, (list, tuple)):
        return _empty_sequence(single, double, cut, where)
    if dataclasses.is_dataclass(single) and not isinstance(single, type):
        result = copy.copy(single)
        for field in dataclasses.fields(single):
            one, two = getattr(single, field.name), getattr(double, field.name)
            object.__setattr__(result, field.name, _walk(one, two, cut, f"{where}.{field.name}"))
        return result
    if isinstance(single, _KEPT):
        blank = isinstance(cut, _Zeros) and cut.of_sample
        return _BLANK.get(type(single), single) if blank else single
    raise SamplingError(
        f"{where} is a {type(single).__name__}, of which no empty form is known; a batch may be empty.",
        fix="Return tensors in a dict, tuple, list or dataclass from collate_fn, or pass example_input=, a made-up "
        "example as the data set would return it.",
    )


def _empty_sequence(single: Sequence[Any], double: Sequence[Any], cut: _GrowthCut | _AxisCut, where: str) -> Any:
    """Returns the empty form of a list or tuple: of its fields, or no items if it has an item per row."""
    named = isinstance(single, tuple) and hasattr(single, "_fields")
    if not named and cut.sequence(single, double):
        items = []
        if isinstance(cut, _Zeros):
            items = [_walk(item, item, _Zeros(of_sample=True), f"{where}[{i}]") for i, item in enumerate(single)]
    else:
        pairs = enumerate(zip(single, double, strict=False))
        items = [_walk(one, two, cut, f"{where}[{index}]") for index, (one, two) in pairs]
    kind: Any = type(single)
    return kind(*items) if named else kind(items)


def _like_mapping(original: Any, items: dict[Any, Any]) -> Any:
    """Returns a mapping of the original's type with these items, or a dict if the type cannot be constructed."""
    with contextlib.suppress(TypeError, ValueError):
        return type(original)(items)
    with contextlib.suppress(TypeError, ValueError):
        # A defaultdict needs its factory first. Its copy has the same keys, so all original values are replaced.
        result = copy.copy(original)
        result.update(items)
        return result
    return items
