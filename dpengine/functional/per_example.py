"""Finds the batch in the arguments of a function, and applies the function to each example.

Axes: B examples.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

Places = int | Sequence[int]


@dataclass(frozen=True)
class Batch:
    """Arguments of a call. Some have the examples on axis 0 of all their tensors."""

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]  # shared by the examples
    places: tuple[int, ...]  # positions of the arguments with the examples
    seed_place: int | None  # position of the seeds of the examples
    size: int  # number of examples

    def take(self, index: Tensor) -> Batch:
        """Returns the examples with the given indices, in this order."""
        return self._changed(lambda leaf: leaf[index.to(leaf.device)], len(index))

    def stand_in(self) -> Batch:
        """Returns one example of zeros, for the shapes of the outputs of an empty batch."""
        return self._changed(lambda leaf: leaf.new_zeros(1, *leaf.shape[1:]), 1)

    def _changed(self, change: Callable[[Tensor], Tensor], size: int) -> Batch:
        args = list(self.args)
        for place in self.mapped:
            args[place] = pytree.tree_map(change, args[place])
        return replace(self, args=tuple(args), size=size)

    @property
    def mapped(self) -> tuple[int, ...]:
        """Positions of arguments that differ between examples."""
        return self.places if self.seed_place is None else (*self.places, self.seed_place)


def batch_of(
    where: str, args: tuple[Any, ...], kwargs: Mapping[str, Any], places: tuple[int, ...], seed_place: int | None
) -> Batch:
    """Returns the batch in the arguments of a call."""
    if max(places) >= len(args):
        raise ValueError(
            f"{where}: argument {max(places)} must have the examples, and there are {len(args)} arguments."
        )
    leaves = [leaf for place in places for leaf in pytree.tree_leaves(args[place])]
    if not leaves or not all(isinstance(leaf, Tensor) and leaf.dim() for leaf in leaves):
        raise ValueError(f"{where}: every leaf of a batch argument must be a tensor with the examples on axis 0.")
    sizes = sorted({len(leaf) for leaf in leaves})
    if len(sizes) > 1:
        raise ValueError(f"{where}: batch arguments have {sizes} examples on axis 0; the numbers must be equal.")
    if seed_place is not None:
        if seed_place >= len(args) or not isinstance(args[seed_place], int) or isinstance(args[seed_place], bool):
            raise TypeError(f"{where}: argument {seed_place} must be an integer seed.")
        args = (*args[:seed_place], _seeds(args[seed_place], sizes[0]), *args[seed_place + 1 :])
    return Batch(args, kwargs, places, seed_place, sizes[0])


def _seeds(seed: int, count: int) -> Tensor:
    """Returns one seed for each example, ``(B,)`` int64."""
    drawn = np.random.Philox(key=[seed & (2**64 - 1), 0x6470656E67696E65]).random_raw(count)
    return torch.from_numpy((drawn >> np.uint64(1)).astype(np.int64))


def each_example(fun: Callable[[list[Any]], Any], batch: Batch, *, keep_batch_dim: bool) -> Any:
    """Returns ``fun(args)`` of each example, stacked on axis 0."""

    def call(*mapped: Any) -> Any:
        args = list(batch.args)
        for place, value in zip(batch.mapped, mapped, strict=True):
            add_axis = keep_batch_dim and place in batch.places
            args[place] = pytree.tree_map(lambda leaf: leaf.unsqueeze(0), value) if add_axis else value
        return fun(args)

    return torch.func.vmap(call, randomness="different")(*(batch.args[place] for place in batch.mapped))


def batch_axes(fun: Callable[[list[Any]], Any], batch: Batch) -> list[int | None] | None:
    """Returns the batch axis of each output leaf of ``fun(args)``; None if shapes do not show it.

    The function runs on meta tensors with two batch sizes.
    """

    def shapes(size: int) -> list[torch.Size | None]:
        args = [pytree.tree_map_only(Tensor, lambda leaf: leaf.to("meta"), arg) for arg in batch.args]
        for place in batch.places:
            args[place] = pytree.tree_map(lambda leaf: leaf.new_empty(size, *leaf.shape[1:]), args[place])
        if batch.seed_place is not None:
            args[batch.seed_place] = torch.zeros((), dtype=torch.int64, device="meta")
        return [leaf.shape if isinstance(leaf, Tensor) else None for leaf in pytree.tree_leaves(fun(args))]

    try:
        with torch.no_grad():
            one, two = shapes(1), shapes(2)
    except Exception:  # for example if the function reads values, which meta tensors do not have
        return None
    if len(one) != len(two):
        return None
    return [None if a is None or b is None else _changed_axis(a, b) for a, b in zip(one, two, strict=True)]


def _changed_axis(one: torch.Size, two: torch.Size) -> int | None:
    return next((axis for axis, (a, b) in enumerate(zip(one, two, strict=True)) if (a, b) == (1, 2)), None)
