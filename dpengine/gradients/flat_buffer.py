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
        sizes: dict[tuple[torch.device, torch.dtype], int] = {}
        places: list[tuple[nn.Parameter, tuple[torch.device, torch.dtype], int]] = []
        for parameter in parameters:
            key = (parameter.device, wide(parameter.dtype))
            places.append((parameter, key, sizes.get(key, 0)))
            sizes[key] = sizes.get(key, 0) + parameter.numel()
        self.flats = {key: torch.zeros(size, device=key[0], dtype=key[1]) for key, size in sizes.items()}
        self.views = {p: self.flats[key][at : at + p.numel()].view(p.shape) for p, key, at in places}
        self._empty = set(self.views)  # parameters whose sum is still zero

    def __iter__(self) -> Iterator[tuple[nn.Parameter, Tensor]]:
        return iter(self.views.items())

    def add(self, parameter: nn.Parameter, total: Tensor) -> None:
        """Adds to one parameter's sum."""
        view = self.views[parameter]
        if parameter in self._empty:
            view.copy_(total.view(parameter.shape))  # one pass over memory less than adding to zero
            self._empty.discard(parameter)
        else:
            view.add_(total.view(parameter.shape))

    @property
    def clean(self) -> bool:
        """Whether nothing was added since the sums were destroyed."""
        return len(self._empty) == len(self.views)

    def is_finite(self) -> bool:
        """Whether every sum is a number."""
        return all(bool(flat.isfinite().all()) for flat in self.flats.values())

    def zero(self) -> None:
        """Destroys the sums, and whatever noise was added to them."""
        for flat in self.flats.values():
            flat.zero_()
        self._empty = set(self.views)

    def fits(self, parameters: Iterable[nn.Parameter]) -> bool:
        """Whether the buffer is for exactly these parameters, where they are now."""
        listed = list(parameters)
        return list(map(id, self.views)) == list(map(id, listed)) and all(
            self.views[p].device == p.device and self.views[p].dtype == wide(p.dtype) for p in listed
        )


def wide(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which norms and sums of such gradients are formed."""
    return torch.float64 if dtype is torch.float64 else torch.float32
