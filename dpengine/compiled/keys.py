"""What a graph was traced from, as far as it can change: a key under which graphs are kept."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from dpengine.errors import UnsupportedLayerError

_PLAIN = (int, float, bool, str, bytes, type(None), torch.dtype, torch.device, enum.Enum)


def kind_of(tensor: Tensor) -> object:
    """Shape, dtype, place and layout."""
    return tensor.shape, tensor.dtype, tensor.device, tensor.stride()


def plain_arguments(leaves: Sequence[Any]) -> tuple[Any, ...]:
    """The leaves of a call that are no tensors, None where one was.

    Args:
        leaves: Of arguments.

    Returns:
        Them, with their types, since True equals 1.

    Raises:
        UnsupportedLayerError: If one is no plain value: what is in it would be fixed when the graph is traced.
    """
    for leaf in leaves:
        if not isinstance(leaf, (Tensor, *_PLAIN)):
            raise UnsupportedLayerError(
                f"A compiled pass was given a {type(leaf).__name__}, whose content a graph would keep for ever.",
                fix="Pass tensors with the batch on axis 0, and plain numbers and strings.",
            )
    return tuple(None if isinstance(leaf, Tensor) else (type(leaf), leaf) for leaf in leaves)


def model_key(model: nn.Module, state: Sequence[Tensor]) -> object:
    """Modules, their settings, and which parameters and buffers are where."""
    number = {tensor: i for i, tensor in enumerate(state)}
    modules = tuple((id(module), type(module), _settings(module, number)) for module in model.modules())
    return modules, tuple((id(tensor), kind_of(tensor), tensor.requires_grad) for tensor in state)


def _settings(module: nn.Module, number: dict[Tensor, int]) -> tuple[Any, ...]:
    found: list[Any] = [(name, number.get(t)) for table in (module._parameters, module._buffers)  # type: ignore[attr-defined]
                        for name, t in table.items() if t is not None]  # fmt: skip
    for name, value in vars(module).items():
        if isinstance(value, _PLAIN) or (isinstance(value, tuple) and all(isinstance(v, _PLAIN) for v in value)):
            found.append((name, value))
        elif isinstance(value, Tensor):
            found.append((name, id(value), value._version))
    return tuple(found)


def autocast_key(device: torch.device) -> object:
    """Whether autocast is on, and in which dtype."""
    return torch.is_autocast_enabled(device.type), torch.get_autocast_dtype(device.type)
