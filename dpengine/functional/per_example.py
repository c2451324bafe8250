"""Maps a function over the examples of its batched arguments.

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

Argnums = int | Sequence[int]


@dataclass(frozen=True)
class Batch:
    """Arguments of a call. The tensors of batched arguments have the examples on axis 0."""

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]  # shared by all examples
    batch_argnums: tuple[int, ...]  # positions of the batched arguments
    seed_argnum: int | None  # position of the per-example seeds
    size: int  # number of examples

    def take(self, index: Tensor) -> Batch:
        """Returns the examples with the given indices, in this order."""
        return self._changed(lambda leaf: leaf[index.to(leaf.device)], len(index))

    def placeholder(self) -> Batch:
        """Returns a batch of one zero example, which gives the output shapes of an empty batch."""
        return self._changed(lambda leaf: leaf.new_zeros(1, *leaf.shape[1:]), 1)

    def _changed(self, change: Callable[[Tensor], Tensor], size: int) -> Batch:
        args = list(self.args)
        for position in self.mapped:
            args[position] = pytree.tree_map(change, args[position])
        return replace(self, args=tuple(args), size=size)

    @property
    def mapped(self) -> tuple[int, ...]:
        """Positions of the arguments that vmap maps over: batched arguments and seeds."""
        return self.batch_argnums if self.seed_argnum is None else (*self.batch_argnums, self.seed_argnum)


def batch_of(
    where: str,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    batch_argnums: tuple[int, ...],
    seed_argnum: int | None,
) -> Batch:
    """Returns the batch in the arguments of a call."""
    if max(batch_argnums) >= len(args):
        raise ValueError(
            f"{where}: argument {max(batch_argnums)} must be a batch, but there are only {len(args)} arguments."
        )
    leaves = [leaf for position in batch_argnums for leaf in pytree.tree_leaves(args[position])]
    if not leaves or not all(isinstance(leaf, Tensor) and leaf.dim() for leaf in leaves):
        raise ValueError(f"{where}: every leaf of a batched argument must be a tensor with the examples on axis 0.")
    sizes = sorted({len(leaf) for leaf in leaves})
    if len(sizes) > 1:
        raise ValueError(f"{where}: batched arguments have {sizes} examples on axis 0. Pass equal numbers.")
    if seed_argnum is not None:
        if seed_argnum >= len(args) or not isinstance(args[seed_argnum], int) or isinstance(args[seed_argnum], bool):
            raise TypeError(f"{where}: argument {seed_argnum} must be an integer seed.")
        args = (*args[:seed_argnum], _seeds(args[seed_argnum], sizes[0]), *args[seed_argnum + 1 :])
    return Batch(args, kwargs, batch_argnums, seed_argnum, sizes[0])


def _seeds(seed: int, count: int) -> Tensor:
    """Returns one seed for each example, ``(B,)`` int64."""
    drawn = np.random.Philox(key=[seed & (2**64 - 1), 0x6470656E67696E65]).random_raw(count)
    return torch.from_numpy((drawn >> np.uint64(1)).astype(np.int64))


def map_examples(fun: Callable[[list[Any]], Any], batch: Batch, *, keep_batch_dim: bool) -> Any:
    """Returns ``fun(args)`` for each example, stacked on axis 0."""

    def call(*mapped: Any) -> Any:
        args = list(batch.args)
        for position, value in zip(batch.mapped, mapped, strict=True):
            add_axis = keep_batch_dim and position in batch.batch_argnums
            args[position] = pytree.tree_map(lambda leaf: leaf.unsqueeze(0), value) if add_axis else value
        return fun(args)

    return torch.func.vmap(call, randomness="different")(*(batch.args[position] for position in batch.mapped))


def output_batch_axes(fun: Callable[[list[Any]], Any], batch: Batch) -> list[int | None] | None:
    """Returns the batch axis of each output leaf of ``fun(args)``; None if it is unknown.

    Runs the function on meta tensors of two batch sizes and compares the output shapes.
    """

    def shapes(size: int) -> list[torch.Size | None]:
        args = [pytree.tree_map_only(Tensor, lambda leaf: leaf.to("meta"), arg) for arg in batch.args]
        for position in batch.batch_argnums:
            args[position] = pytree.tree_map(lambda leaf: leaf.new_empty(size, *leaf.shape[1:]), args[position])
        if batch.seed_argnum is not None:
            args[batch.seed_argnum] = torch.zeros((), dtype=torch.int64, device="meta")
        return [leaf.shape if isinstance(leaf, Tensor) else None for leaf in pytree.tree_leaves(fun(args))]

    try:
        with torch.no_grad():
            one, two = shapes(1), shapes(2)
    except Exception:  # for example, the function reads values, which meta tensors do not have
        return None
    if len(one) != len(two):
        return None
    return [None if a is None or b is None else _changed_axis(a, b) for a, b in zip(one, two, strict=True)]


def _changed_axis(one: torch.Size, two: torch.Size) -> int | None:
    return next((axis for axis, (a, b) in enumerate(zip(one, two, strict=True)) if (a, b) == (1, 2)), None)
