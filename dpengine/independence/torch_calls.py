"""Effects of torch functions, known by their names."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

CONVERSIONS = frozenset(
    {"item", "tolist", "numpy", "__array__", "__dlpack__", "__float__", "__int__", "__index__", "__complex__"}
)
"""Functions that convert a tensor to an object outside torch."""

BRANCHES = frozenset({"__bool__", "is_nonzero", "equal", "allclose"})
"""Functions whose result may select a branch of the loop."""

ERROR_TESTS = frozenset({"isnan", "isfinite", "isinf"})
"""Functions that test for NaN or infinity."""

_SELECTIONS = frozenset({"nonzero", "argwhere", "masked_select", "unique", "unique_consecutive"})
_SIZES = frozenset({"__len__", "numel", "nelement", "size"})

DRAW_IN_PLACE = frozenset(
    {f"{name}_" for name in ("uniform", "normal", "bernoulli", "random", "exponential", "geometric", "cauchy")}
)
"""Methods that fill a tensor with random numbers."""

_NOT_IN_PLACE = frozenset({"__invert__", "__iter__", "__index__", "__int__"})


def name_of(function: Any) -> str:
    """Returns the name of a torch function."""
    return getattr(function, "__name__", "")


def writes_to(name: str, kwargs: Mapping[str, Any]) -> bool:
    """Returns True if a function writes to its first argument, or to ``out``."""
    in_place = name.endswith("_") and not name.endswith("__")
    augmented = name.startswith("__i") and name not in _NOT_IN_PLACE
    return in_place or augmented or name == "__setitem__" or kwargs.get("out") is not None


def has_data_dependent_size(name: str, args: Sequence[Any]) -> bool:
    """Returns True if the size of a function's result depends on values of its arguments."""
    if name == "where":
        return len(args) == 1
    index = args[1] if name == "__getitem__" and len(args) > 1 else None
    parts = index if isinstance(index, tuple) else (index,)
    return name in _SELECTIONS or any(isinstance(part, Tensor) and part.dtype is torch.bool for part in parts)


def reads_size(function: Any) -> bool:
    """Returns True if a function returns a size of a tensor."""
    attribute = getattr(getattr(function, "__self__", None), "__name__", None)
    return name_of(function) in _SIZES or (name_of(function) == "__get__" and attribute == "shape")


def origin_of(tensor: Tensor) -> str:
    """Returns a description of the code that computed a tensor, for messages."""
    return "code outside torch" if tensor.grad_fn is None else f"'{tensor.grad_fn.name()}'"


def reads_single_samples(function: Any, args: Sequence[Any]) -> bool:
    """Returns True if a call reads single entries of axis 0, as a loop over samples does."""
    name = name_of(function)
    if name in ("unbind", "__iter__"):
        return True
    index = args[1] if name == "__getitem__" and len(args) > 1 else None
    return type(index[0] if isinstance(index, tuple) and index else index) is int


def autocasts() -> tuple[tuple[str, torch.dtype], ...]:
    """Returns the device type and dtype of each enabled autocast."""
    return tuple((d, torch.get_autocast_dtype(d)) for d in ("cpu", "cuda") if torch.is_autocast_enabled(d))
