"""Sums the clipped pytrees of a batch in microbatches, optionally rounded to a grid.

Axes: B examples, K groups, P elements of a gradient.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from dpengine.clipping.policy import positive

from .bounded import BoundedSensitivityCallable
from .clipping import Group, factors, group_norms, groups_of, total_bound
from .per_example import Batch, batch_of

_MAX_SUM = 2**62  # limit of integer sums, which must fit in 64 bits


def grid_bound(bound: float, scale: float, numel: int, batch: int) -> float:
    """Returns the clipping norm to apply before rounding, which adds at most ``sqrt(numel) / 2`` to the scaled norm."""
    if batch * scale >= _MAX_SUM:
        raise ValueError(f"grid_scale={scale:g} with {batch} examples may overflow 64 bits. Pass a smaller grid_scale.")
    before_rounding = bound - math.sqrt(numel) * bound / (2 * scale)
    if not before_rounding > 0:
        raise ValueError(
            f"grid_scale={scale:g} is too coarse for gradients of {numel} elements: rounding alone exceeds the "
            f"clipping norm. Pass a grid_scale above {math.sqrt(numel) / 2:g}."
        )
    return before_rounding


def round_to_grid(leaves: Sequence[Tensor], factor_B: Tensor, bound: float, scale: float) -> list[Tensor]:
    """Rounds the clipped gradients times ``scale / bound`` to integers with norm at most ``scale``.

    Leaves must be finite. ``factor_B`` must clip each norm to ``grid_bound``, which is below ``bound``.
    """
    flat_BP = torch.cat([leaf.reshape(len(leaf), -1).double() for leaf in leaves], dim=1)
    rounded_BP = (flat_BP * factor_B.unsqueeze(1) * (scale / bound)).round()
    for i in torch.nonzero(_may_exceed(rounded_BP, scale)).flatten().tolist():
        rounded_BP[i] = _shrunk(rounded_BP[i], int(scale**2) if scale == int(scale) else math.floor(scale**2))
    parts = rounded_BP.to(torch.int64).split([leaf[0].numel() for leaf in leaves], dim=1)
    return [part.reshape(leaf.shape) for part, leaf in zip(parts, leaves, strict=True)]


def _may_exceed(rounded_BP: Tensor, scale: float) -> Tensor:
    """Returns a mask of examples whose norm may exceed the scale, given that squared norms have errors below 2**-40."""
    return rounded_BP.square().sum(dim=1) > scale**2 * (1 - 2.0**-40)


def _shrunk(row_P: Tensor, max_square: int) -> Tensor:
    """Shrinks the entries of an integer vector until its exact squared norm is at most ``max_square``."""
    values = [int(value) for value in row_P.tolist()]
    total = sum(value * value for value in values)
    if total > max_square:
        shrink = math.sqrt(max_square / total)
        values = [int(value * shrink) for value in values]
        total = sum(value * value for value in values)
    while total > max_square:
        i = max(range(len(values)), key=lambda k: abs(values[k]))
        total -= 2 * abs(values[i]) - 1
        values[i] -= 1 if values[i] > 0 else -1
    return torch.tensor(values, dtype=row_P.dtype, device=row_P.device)


PerExample = Callable[[Batch], tuple[Any, Any, Any]]
"""Returns the per-example trees to clip, values of the function, and auxiliary outputs of a batch."""


def identity(tree: Any) -> Any:
    """Returns its argument."""
    return tree


@dataclass(frozen=True)
class Options:
    """Options of a clipped sum. Raises ValueError if one is out of range."""

    where: str
    bound: Any
    rescale: bool
    normalize_by: float
    microbatch_size: int | None
    nan_safe: bool
    dtype: torch.dtype | None
    grid_scale: float | None
    process_group: Any
    transform: Callable[[Any], Any]
    norms: bool

    def __post_init__(self) -> None:
        where, bound, size = self.where, self.bound, self.microbatch_size
        positive(where, "normalize_by", self.normalize_by)
        for leaf in pytree.tree_leaves(bound):
            groups_of(leaf, torch.zeros(()))  # raises for an invalid clipping norm
        if size is not None and (isinstance(size, bool) or not size >= 1):
            raise ValueError(f"{where}: microbatch_size must be at least 1, got {size!r}.")
        if self.dtype not in (None, torch.float32, torch.float64):
            raise ValueError(
                f"{where}: dtype must be torch.float32 or torch.float64, got {self.dtype}. Coarser rounding may change "
                "a sum by more than the clipping norm."
            )
        if self.grid_scale is None:
            return
        positive(where, "grid_scale", self.grid_scale)
        if self.rescale or self.normalize_by != 1 or not isinstance(bound, (int, float)) or not 0 < bound < math.inf:
            raise ValueError(
                f"{where}: grid_scale requires one positive, finite l2_clip_norm, and neither rescale_to_unit_norm "
                "nor normalize_by. Multiply by l2_clip_norm / grid_scale after adding noise."
            )

    @property
    def l2_norm_bound(self) -> float:
        """Largest L2 norm of the contribution of one example to the sum."""
        if self.grid_scale is not None:
            return float(self.grid_scale)
        bound = math.sqrt(len(pytree.tree_leaves(self.bound))) if self.rescale else total_bound(self.bound)
        return bound / self.normalize_by


@dataclass(frozen=True)
class ClippedSum:
    """Clipped sum over a batch, and per-example norms before clipping, values and auxiliary outputs."""

    total: Any
    norms: Any
    values: Any
    aux: Any


@dataclass(frozen=True)
class _PartialSums:
    """Sums over some microbatches in float64 or int64, their final dtypes, and their tree structure."""

    leaves: list[Tensor]
    dtypes: list[torch.dtype]
    spec: Any

    def plus(self, other: _PartialSums) -> _PartialSums:
        return replace(self, leaves=[a + b for a, b in zip(self.leaves, other.leaves, strict=True)])


def bounded_sum(
    per_example: PerExample,
    outputs: Callable[[ClippedSum], Any],
    options: Options,
    batch_argnums: tuple[int, ...],
    seed_argnum: int | None,
    has_pair: bool,
) -> BoundedSensitivityCallable:
    """Returns a function of a batch that clips and sums the trees of ``per_example`` and applies ``outputs``."""

    def call(*args: Any, is_padding_example: Tensor | None = None, **kwargs: Any) -> Any:
        batch = batch_of(options.where, args, kwargs, batch_argnums, seed_argnum)
        padding_B = _checked_padding(options.where, is_padding_example, batch.size)
        return outputs(_sum_microbatches(per_example, batch, padding_B, options))

    return BoundedSensitivityCallable(call, options.l2_norm_bound, has_pair, batch_argnums)


def _checked_padding(where: str, mask: Tensor | None, size: int) -> Tensor:
    if mask is None:
        return torch.zeros(size, dtype=torch.bool)
    if not isinstance(mask, Tensor) or mask.dtype is not torch.bool or tuple(mask.shape) != (size,):
        raise ValueError(f"{where}: is_padding_example must be a bool tensor of shape ({size},).")
    return mask


def _sum_microbatches(per_example: PerExample, batch: Batch, padding_B: Tensor, options: Options) -> ClippedSum:
    """Sums the clipped trees over microbatches. Example i is in microbatch ``i mod (B / microbatch_size)``."""
    if batch.size == 0:
        padding_B = torch.ones(1, dtype=torch.bool)
        zero = _sum_microbatches(per_example, batch.placeholder(), padding_B, replace(options, microbatch_size=None))
        empty = lambda tree: pytree.tree_map(lambda leaf: leaf[:0], tree)  # noqa: E731
        return ClippedSum(zero.total, empty(zero.norms), empty(zero.values), empty(zero.aux))
    size = options.microbatch_size or batch.size
    if batch.size % size:
        raise ValueError(
            f"{options.where}: microbatch_size={size} does not divide the batch of {batch.size} examples. Pad the "
            "batch, and pass is_padding_example."
        )
    count = batch.size // size
    totals: _PartialSums | None = None
    order, parts = [], []
    for first in range(count):
        index = torch.arange(first, batch.size, count)
        trees, values, aux = per_example(batch if count == 1 else batch.take(index))
        sums, norms = _clipped_sum(trees, padding_B[index], batch.size, options)
        totals = sums if totals is None else totals.plus(sums)
        order.append(index)
        parts.append((norms, values, aux))
    assert totals is not None
    original_order = torch.argsort(torch.cat(order))
    outputs = [_concatenated([part[k] for part in parts], original_order) for k in range(3)]
    return ClippedSum(_final_sums(totals, options), *outputs)


def _clipped_sum(trees: Any, padding_B: Tensor, batch: int, options: Options) -> tuple[_PartialSums, Any]:
    """Returns the sum of the clipped trees of a microbatch, and the norms before clipping."""
    if options.dtype is not None:
        trees = pytree.tree_map(lambda leaf: leaf.to(options.dtype), trees)
    norms: Any = ()
    if options.norms:
        untransformed = [leaf.detach() for leaf in pytree.tree_leaves(trees)]
        norm_groups, bounds_spec = groups_of(options.bound if options.transform is identity else math.inf, trees)
        norms = pytree.tree_unflatten(list(group_norms(untransformed, norm_groups).unbind(dim=1)), bounds_spec)
    if options.transform is not identity:
        trees = torch.func.vmap(options.transform)(trees)
    leaves, spec = pytree.tree_flatten(trees)
    leaves = [leaf.detach() for leaf in leaves]
    groups, _ = groups_of(options.bound, trees)
    if options.grid_scale is not None:
        numel = sum(leaf[0].numel() for leaf in leaves)
        groups = [Group(grid_bound(float(options.bound), options.grid_scale, numel, batch), groups[0].leaves)]
    norms_BK = group_norms(leaves, groups)
    factors_BK = factors(norms_BK, groups, options.rescale)
    keep_B = ~padding_B.to(norms_BK.device)
    if options.nan_safe or options.grid_scale is not None:
        keep_B = keep_B & norms_BK.isfinite().all(dim=1)
    zero = torch.zeros((), dtype=torch.float64)
    masked = [torch.where(keep_B.view(-1, *[1] * (leaf.dim() - 1)), leaf.double(), zero) for leaf in leaves]
    if options.grid_scale is not None:
        integers = round_to_grid(masked, factors_BK[:, 0], float(options.bound), options.grid_scale)
        return _PartialSums([leaf.sum(dim=0) for leaf in integers], [torch.int64] * len(integers), spec), norms
    weights = {i: factors_BK[:, k] for k, group in enumerate(groups) for i in group.leaves}
    sums = [torch.einsum("b,b...->...", weights[i], leaf) for i, leaf in enumerate(masked)]
    return _PartialSums(
        sums, [options.dtype or torch.promote_types(leaf.dtype, torch.float32) for leaf in leaves], spec
    ), norms


def _final_sums(sums: _PartialSums, options: Options) -> Any:
    """All-reduces the sums, divides them by ``normalize_by``, and converts them to their final dtypes."""
    if options.process_group is not None:
        for leaf in sums.leaves:
            torch.distributed.all_reduce(leaf, group=options.process_group)
    leaves = [(leaf / options.normalize_by).to(dtype) for leaf, dtype in zip(sums.leaves, sums.dtypes, strict=True)]
    return pytree.tree_unflatten(leaves if options.grid_scale is None else sums.leaves, sums.spec)


def _concatenated(parts: list[Any], order: Tensor) -> Any:
    """Concatenates the outputs of the microbatches and restores the order of the batch."""
    return pytree.tree_map(lambda *leaves: torch.cat(leaves)[order.to(leaves[0].device)], *parts)
