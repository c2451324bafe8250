"""One flat float32 buffer for the clipped sums of all parameters, so that noise is one pass over memory."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Protocol

import torch
from torch import Tensor, nn

Key = tuple[torch.device, torch.dtype]


class Sums(Protocol):
    """Where sums of gradients go."""

    def add(self, parameter: nn.Parameter, total: Tensor, scale: float = 1.0) -> None:
        """Adds ``scale * total`` to one parameter's sum."""

    def fill(self, parameter: nn.Parameter, write: Callable[[Tensor, float], None]) -> None:
        """Has one parameter's sum written where it lies. See ``FlatBuffer.fill``."""


class FlatBuffer:
    """Clipped sums of many parameters, contiguous for each device and dtype.

    Sums are float32, or float64 for float64 parameters, whatever else the model's dtype is. Memory is had when the
    first sum comes, and is not cleared: the first sum of a parameter overwrites it, which saves two passes.

    Args:
        parameters: The parameters, in the order that addresses their noise.
    """

    def __init__(self, parameters: Iterable[nn.Parameter]):
        self._sizes: dict[Key, int] = {}
        self._places: dict[nn.Parameter, tuple[Key, int]] = {}
        for parameter in parameters:
            key = (parameter.device, wide(parameter.dtype))
            self._places[parameter] = (key, self._sizes.get(key, 0))
            self._sizes[key] = self._sizes.get(key, 0) + parameter.numel()
        self._flats: dict[Key, Tensor] = {}
        self._views: dict[nn.Parameter, Tensor] = {}
        self._unwritten = set(self._places)

    def __iter__(self) -> Iterator[tuple[nn.Parameter, Tensor]]:
        self._finish()
        return iter(self._views.items())

    @property
    def parameters(self) -> Mapping[nn.Parameter, object]:
        """The parameters, in order."""
        return self._places

    def add(self, parameter: nn.Parameter, total: Tensor, scale: float = 1.0) -> None:
        """Adds ``scale * total`` to one parameter's sum."""
        self.fill(parameter, lambda view, keep: _add(view, total, scale, keep))

    def fill(self, parameter: nn.Parameter, write: Callable[[Tensor, float], None]) -> None:
        """Has one parameter's sum written where it lies.

        Args:
            parameter: The parameter.
            write: ``write(view, keep)`` writes ``view * keep`` plus what is to be added into ``view``. ``keep`` is 0,
                and the view holds anything, if there was no sum yet; else it is 1.
        """
        self._have_memory()
        write(self._views[parameter], 0.0 if parameter in self._unwritten else 1.0)
        self._unwritten.discard(parameter)

    @property
    def flats(self) -> dict[Key, Tensor]:
        """The sums as they are now, flat, by device and dtype."""
        self._finish()
        return self._flats

    def _have_memory(self) -> None:
        if len(self._flats) != len(self._sizes):
            self._flats = {key: torch.empty(size, device=key[0], dtype=key[1]) for key, size in self._sizes.items()}
            self._views = {
                p: self._flats[key][at : at + p.numel()].view(p.shape) for p, (key, at) in self._places.items()
            }

    def _finish(self) -> None:
        self._have_memory()
        for parameter in self._unwritten:
            self._views[parameter].zero_()

    @property
    def clean(self) -> bool:
        """Whether nothing was added since the sums were destroyed or taken."""
        return len(self._unwritten) == len(self._places)

    def is_finite(self) -> bool:
        """Whether every sum is a number."""
        return all(bool(self._views[p].isfinite().all()) for p in self._places.keys() - self._unwritten)

    def take(self) -> tuple[list[Tensor], dict[nn.Parameter, Tensor]]:
        """Hands the sums over, and starts again in other memory.

        Returns:
            The flat sums, to which noise is to be added in place, and each parameter's view of them.
        """
        self._finish()
        flats, views = list(self._flats.values()), self._views
        self._flats, self._views, self._unwritten = {}, {}, set(self._places)
        return flats, views

    def zero(self) -> None:
        """Destroys the sums."""
        for parameter in self._places.keys() - self._unwritten:
            self._views[parameter].zero_()
        self._unwritten = set(self._places)

    def fits(self, parameters: Iterable[nn.Parameter]) -> bool:
        """Whether the buffer is for exactly these parameters, where they are now."""
        listed = list(parameters)
        return list(map(id, self._places)) == list(map(id, listed)) and all(
            self._places[p][0] == (p.device, wide(p.dtype)) for p in listed
        )


def wide(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which norms and sums of such gradients are formed."""
    return torch.float64 if dtype is torch.float64 else torch.float32


def _add(view: Tensor, total: Tensor, scale: float, keep: float) -> None:
    total = total.view(view.shape)
    if keep:
        view.add_(total, alpha=scale)
    elif scale == 1.0:
        view.copy_(total)
    else:
        torch.mul(total.to(view.dtype), scale, out=view)
