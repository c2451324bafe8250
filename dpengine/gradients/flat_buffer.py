"""One flat float32 buffer for the clipped sums of all parameters, so that noise is one pass over memory."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor, nn


class FlatBuffer:
    """Clipped sums of many parameters, contiguous for each device and dtype.

    Sums are float32, or float64 for float64 parameters, whatever else the model's dtype is.

    Args:
        parameters: The parameters, in the order that addresses their noise.
    """

    def __init__(self, parameters: Iterable[nn.Parameter]):
        self._sizes: dict[tuple[torch.device, torch.dtype], int] = {}
        self._places: list[tuple[nn.Parameter, tuple[torch.device, torch.dtype], int]] = []
        for parameter in parameters:
            key = (parameter.device, wide(parameter.dtype))
            self._places.append((parameter, key, self._sizes.get(key, 0)))
            self._sizes[key] = self._sizes.get(key, 0) + parameter.numel()
        self._start()

    def _start(self) -> None:
        # Memory is not cleared here: the first sum of a parameter overwrites it, which saves two passes.
        self._flats = {key: torch.empty(size, device=key[0], dtype=key[1]) for key, size in self._sizes.items()}
        self.views = {p: self._flats[key][at : at + p.numel()].view(p.shape) for p, key, at in self._places}
        self._unwritten = set(self.views)

    def __iter__(self) -> Iterator[tuple[nn.Parameter, Tensor]]:
        self._finish()
        return iter(self.views.items())

    def add(self, parameter: nn.Parameter, total: Tensor) -> None:
        """Adds to one parameter's sum."""
        view = self.views[parameter]
        if parameter in self._unwritten:
            view.copy_(total.view(parameter.shape))
            self._unwritten.discard(parameter)
        else:
            view.add_(total.view(parameter.shape))

    @property
    def flats(self) -> dict[tuple[torch.device, torch.dtype], Tensor]:
        """The sums as they are now, flat, by device and dtype."""
        self._finish()
        return self._flats

    def _finish(self) -> None:
        for parameter in self._unwritten:
            self.views[parameter].zero_()

    @property
    def clean(self) -> bool:
        """Whether nothing was added since the sums were destroyed or taken."""
        return len(self._unwritten) == len(self.views)

    def is_finite(self) -> bool:
        """Whether every sum is a number."""
        return all(bool(view.isfinite().all()) for p, view in self.views.items() if p not in self._unwritten)

    def take(self) -> tuple[list[Tensor], dict[nn.Parameter, Tensor]]:
        """Hands the sums over, and starts again in other memory.

        Returns:
            The flat sums, to which noise is to be added in place, and each parameter's view of them.
        """
        self._finish()
        flats, views = list(self._flats.values()), self.views
        self._start()
        return flats, views

    def zero(self) -> None:
        """Destroys the sums."""
        for parameter in self.views.keys() - self._unwritten:
            self.views[parameter].zero_()
        self._unwritten = set(self.views)

    def fits(self, parameters: Iterable[nn.Parameter]) -> bool:
        """Whether the buffer is for exactly these parameters, where they are now."""
        listed = list(parameters)
        return list(map(id, self.views)) == list(map(id, listed)) and all(
            self.views[p].device == p.device and self.views[p].dtype == wide(p.dtype) for p in listed
        )


def wide(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which norms and sums of such gradients are formed."""
    return torch.float64 if dtype is torch.float64 else torch.float32
