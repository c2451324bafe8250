"""Keys under which compiled graphs are cached, and the gradients of a compiled pass as a grad mode.

Axes: B samples, P samples after padding, K groups of parameters that are clipped together.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakIdRef

from dpengine.capture.record import LayerCall, Use
from dpengine.errors import UnsupportedLayerError
from dpengine.grad_modes.flat_buffer import Sums
from dpengine.grad_modes.strategy import AbstractGradients

from .graphs import Graphs

_PLAIN = (int, float, bool, str, bytes, type(None), torch.dtype, torch.device, enum.Enum)


def kind_of(tensor: Tensor) -> object:
    """Shape, dtype, place and layout."""
    return tensor.shape, tensor.dtype, tensor.device, tensor.stride()


def plain_arguments(leaves: Sequence[Any]) -> tuple[Any, ...]:
    """The leaves of a call that are no tensors, None where one was."""
    for leaf in leaves:
        if not isinstance(leaf, (Tensor, *_PLAIN)):
            raise UnsupportedLayerError(
                f"A compiled pass was given a {type(leaf).__name__}, whose content a graph would keep for ever.",
                fix="Pass tensors with the batch on axis 0, and plain numbers and strings.",
            )
    return tuple(None if isinstance(leaf, Tensor) else (type(leaf), leaf) for leaf in leaves)


def model_key(model: nn.Module, state: Sequence[Tensor]) -> object:
    """Returns a key of the modules, their settings, and the places of parameters and buffers.

    Weak references stand for objects: unlike an address, they never equal those of a later object.
    """
    number = {tensor: i for i, tensor in enumerate(state)}
    modules = tuple((WeakIdRef(module), type(module), _settings(module, number)) for module in model.modules())
    return modules, tuple((WeakIdRef(tensor), kind_of(tensor), tensor.requires_grad) for tensor in state)


def _settings(module: nn.Module, number: dict[Tensor, int]) -> tuple[Any, ...]:
    found: list[Any] = [(name, number.get(t)) for table in (module._parameters, module._buffers)  # type: ignore[attr-defined]
                        for name, t in table.items() if t is not None]  # fmt: skip
    for name, value in vars(module).items():
        if isinstance(value, _PLAIN) or (isinstance(value, tuple) and all(isinstance(v, _PLAIN) for v in value)):
            found.append((name, value))
        elif isinstance(value, Tensor):
            found.append((name, WeakIdRef(value), value._version))
    return tuple(found)


def autocast_key(device: torch.device) -> object:
    """Returns whether autocast is enabled, and its dtype."""
    return torch.is_autocast_enabled(device.type), torch.get_autocast_dtype(device.type)


@dataclass(eq=False)
class Done(AbstractGradients):
    """Norms of a pass, and the way to its sums.

    Attributes:
        graphs: What ran.
        held: What the sums need.
        sq_norms_PK: Of unscaled gradients.
        num_rows: Of the batch.
        stretch: By how much smaller gradients are since a loss that is a mean was one over padded rows.
        named: The parameters that took part.
    """

    graphs: Graphs
    held: list[Tensor]
    sq_norms_PK: Tensor
    num_rows: int
    stretch: float
    named: Mapping[str, nn.Parameter]

    def receive(self, call: LayerCall, uses: Mapping[str, Use], rule: Any) -> None:
        raise UnsupportedLayerError(f"Layer '{call.name}' reported a pass that is over.")

    def receive_rows(self, use: Use, grad: Tensor) -> None:
        raise UnsupportedLayerError(f"'{use.name}' reported a pass that is over.")

    @property
    def rows(self) -> Mapping[str, int]:
        return {"the model": self.num_rows} if self.held else {}

    @property
    def parameters(self) -> Mapping[nn.Parameter, str]:
        return {parameter: name for name, parameter in self.named.items()}

    def sq_norms(self, groups: Mapping[nn.Parameter, int], num_groups: int, scale: float) -> Tensor:
        return self.sq_norms_PK[: self.num_rows] * (scale * self.stretch) ** 2

    def drop(self, rows_B: Tensor) -> None:
        raise UnsupportedLayerError("A row that is not finite reached a compiled pass.")

    def add_sums(self, groups: Mapping[nn.Parameter, int], weights_BK: Tensor, scale: float, into: Sums) -> None:
        weights_PK = weights_BK.new_zeros(self.sq_norms_PK.shape)
        weights_PK[: self.num_rows] = weights_BK
        for parameter, total in zip(self.named.values(), self.graphs.sums(self.held, weights_PK), strict=True):
            into.add(parameter, total, scale * self.stretch)
            into.complete(parameter)

    def clear(self) -> None:
        self.held = []
