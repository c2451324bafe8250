"""Nested states as plain JSON values beside named tensors, and back: what optimizers and noise keep."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from dpengine.errors import CorruptFileError

_TENSOR, _TUPLE, _PAIRS, _FLOAT = "tensor", "tuple", "pairs", "float"


def apart(state: Any, name: str) -> tuple[Any, dict[str, Tensor]]:
    """Takes the tensors out of a state.

    Args:
        state: Numbers, strings, None and tensors in any nesting of dicts, lists and tuples.
        name: What tensors are named after.

    Returns:
        Plain JSON values with marks where tensors were, and the tensors by mark.

    Raises:
        TypeError: If there is something else in it.
    """  # noqa: DOC502 - raised by the inner function
    tensors: dict[str, Tensor] = {}

    def plain(value: Any, path: str) -> Any:
        if isinstance(value, Tensor):
            mark = f"{name}.{len(tensors)}"  # paths of different keys may look alike
            tensors[mark] = value
            return {_TENSOR: mark}
        if isinstance(value, Mapping):  # as pairs, since keys may be numbers and marks may be keys
            return {_PAIRS: [[plain(key, path), plain(part, f"{path}.{key}")] for key, part in value.items()]}
        if isinstance(value, (list, tuple)):
            parts = [plain(part, f"{path}.{i}") for i, part in enumerate(value)]
            return {_TUPLE: parts} if isinstance(value, tuple) else parts
        if isinstance(value, float) and not math.isfinite(value):
            return {_FLOAT: repr(value)}
        if value is None or type(value) in (bool, int, float, str):
            return value
        raise TypeError(f"checkpoint: {path} is a {type(value).__name__}, which cannot be stored as plain data.")

    return plain(state, name), tensors


def together(state: Any, tensors: Mapping[str, Tensor]) -> Any:
    """What `apart` took apart.

    Args:
        state: The plain values.
        tensors: By mark.

    Returns:
        The state.

    Raises:
        CorruptFileError: If a tensor is missing, or a mark is none.
    """  # noqa: DOC501 - the others become this one
    if isinstance(state, list):
        return [together(part, tensors) for part in state]
    if not isinstance(state, dict):
        return state
    try:
        ((mark, value),) = state.items()
        if mark == _TENSOR:
            return tensors[value]
        if mark == _TUPLE:
            return tuple(together(part, tensors) for part in value)
        if mark == _PAIRS:
            return {together(key, tensors): together(part, tensors) for key, part in value}
        if mark == _FLOAT:
            return float(value)
        raise ValueError(f"{mark!r} is no mark")
    except (ValueError, TypeError, KeyError) as error:
        raise CorruptFileError(f"A stored state is damaged: {error}.", fix="Take an earlier checkpoint.") from error
