"""Clips a tree of tensors by its norm or in groups of leaves, or clamps a gradient elementwise.

A tree is a tensor, or any nesting of dicts, lists and tuples of tensors. Axes: B examples, K groups.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree


class _ClipGradient(torch.autograd.Function):
    """Identity with a clamped gradient. The bounds are inputs, so that function transforms can batch or trace them."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, lo: Tensor, hi: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor], output: Tensor) -> None:
        _, lo, hi = inputs
        ctx.save_for_backward(lo, hi)
        ctx.save_for_forward(lo, hi)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        lo, hi = ctx.saved_tensors
        return torch.clamp(grad, lo, hi), None, None

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor, *_: Any) -> Tensor:  # type: ignore[override]
        return tangent.view_as(tangent)


@torch.compiler.allow_in_graph  # a bare apply loses its backward under compile (pytorch issue 193279)
def _apply(x: Tensor, lo: Tensor, hi: Tensor) -> Tensor:
    clipped: Tensor = _ClipGradient.apply(x, lo, hi)
    return clipped


def clip_gradient(x: Tensor, lo: float | Tensor, hi: float | Tensor) -> Tensor:
    """Returns ``x`` and clamps its gradient elementwise to ``[lo, hi]`` in the backward pass.

    This does not bound the norm of per-example gradients, and does not replace clipping them.

    Args:
        x: Floating-point tensor.
        lo: Smallest gradient: a number, or a tensor that broadcasts to ``x``. Function transforms may batch it. Where
            it is above ``hi``, the gradient is ``hi``.
        hi: Largest gradient: a number, or a tensor that broadcasts to ``x``.

    Returns:
        A view of ``x``. NaN gradients stay NaN.
    """
    return _apply(x, _as_bound(lo, x), _as_bound(hi, x))


def _as_bound(bound: float | Tensor, x: Tensor) -> Tensor:
    return bound if isinstance(bound, Tensor) else torch.full((), bound, dtype=x.dtype, device=x.device)


@dataclass(frozen=True)
class Group:
    """Positions of the leaves that are clipped together, and their clipping norm."""

    bound: float | Tensor
    leaves: tuple[int, ...]


def clip_tree(tree: Any, c: Any, rescale_to_unit_norm: bool = False) -> tuple[Any, Any]:
    """Scales a tree so that its norm is at most ``c``.

    Args:
        tree: Tree of tensors.
        c: Clipping norm over all leaves, at least 0 and possibly infinite; or a tree of numbers that is a prefix of
            ``tree``: the leaves below each number are one group, clipped to that norm.
        rescale_to_unit_norm: Whether the result is divided by ``c``, so that its norm is at most 1.

    Returns:
        The clipped tree with unchanged dtypes, and the norm before clipping as a float64 tensor, or a tree like ``c``.
        A group with a non-finite norm becomes 0.

    Raises:
        ValueError: If a number is negative, or ``c`` does not fit the tree.
    """  # noqa: DOC502 - raised by groups_of
    leaves, spec = pytree.tree_flatten(tree)
    groups, bounds_spec = groups_of(c, tree)
    norms_BK = group_norms([leaf.unsqueeze(0) for leaf in leaves], groups)
    factors_BK = factors(norms_BK, groups, rescale_to_unit_norm)
    clipped = list(leaves)
    for factor, group in zip(factors_BK[0].unbind(), groups, strict=True):
        for i in group.leaves:
            # In float64, because a small factor would become 0 in float32 while a large element stays large.
            product = (leaves[i].double() * factor).masked_fill(factor == 0, 0.0)  # 0 * NaN is NaN
            clipped[i] = product.to(leaves[i].dtype)
    norms = pytree.tree_unflatten(list(norms_BK[0].unbind()), bounds_spec)
    return pytree.tree_unflatten(clipped, spec), norms


def groups_of(c: Any, tree: Any) -> tuple[list[Group], Any]:
    """Returns the group of leaves of each clipping norm, and the tree structure of the norms."""
    leaves, spec = pytree.tree_flatten(tree)
    groups: list[Group] = []
    _append_groups(c, pytree.tree_unflatten(list(range(len(leaves))), spec), groups, "")
    return groups, pytree.tree_structure(c)


def _append_groups(c: Any, positions: Any, groups: list[Group], where: str) -> None:
    """Appends the groups in the order of the clipping norms. ``positions`` is a tree of leaf positions."""
    if isinstance(c, Mapping):
        if not isinstance(positions, Mapping) or c.keys() != positions.keys():
            raise ValueError(
                f"functional: the clipping norms{where} have the keys {list(c)}, which are not those of the tree."
            )
        for key, item in c.items():
            _append_groups(item, positions[key], groups, f"{where}[{key!r}]")
    elif isinstance(c, (list, tuple)):
        if not isinstance(positions, (list, tuple)) or len(c) != len(positions):
            raise ValueError(
                f"functional: there are {len(c)} clipping norms{where}, which is not the tree's number of items."
            )
        for i, (item, part) in enumerate(zip(c, positions, strict=True)):
            _append_groups(item, part, groups, f"{where}[{i}]")
    else:
        groups.append(Group(_checked_bound(c, where), tuple(pytree.tree_leaves(positions))))


def _checked_bound(c: Any, where: str) -> float | Tensor:
    if isinstance(c, Tensor):
        if c.dim():
            raise ValueError(f"functional: the clipping norm{where} has shape {tuple(c.shape)}. Pass a number.")
        return c.double().clamp(min=0)
    if isinstance(c, bool) or not isinstance(c, (int, float)) or not c >= 0:
        raise ValueError(f"functional: the clipping norm{where} must be a number of at least 0, got {c!r}.")
    return float(c)


def group_norms(leaves: list[Tensor], groups: list[Group]) -> Tensor:
    """Returns norms ``(B, K)`` in float64 of leaves ``(B, ...)``.

    Elements are divided by the largest one before they are squared. A norm is therefore 0 only if all elements are 0,
    and finite if all elements are finite.
    """
    return torch.stack([_norm([leaves[i] for i in group.leaves], leaves) for group in groups], dim=1)


def _norm(leaves: list[Tensor], all_leaves: list[Tensor]) -> Tensor:
    flat = [leaf.detach().reshape(len(leaf), -1).double() for leaf in leaves if leaf[0:1].numel() or not len(leaf)]
    if not flat:
        return torch.zeros(len(all_leaves[0]) if all_leaves else 0, dtype=torch.float64)
    largest_B = torch.stack([leaf.abs().amax(dim=1) if leaf.shape[1] else leaf.new_zeros(len(leaf)) for leaf in flat])
    largest_B = largest_B.amax(dim=0)
    scale_B = torch.where((largest_B > 0) & largest_B.isfinite(), largest_B, torch.ones_like(largest_B))
    squares = [(leaf / scale_B.unsqueeze(1)).square().sum(dim=1) for leaf in flat]
    norm_B = torch.stack(squares).sum(dim=0).sqrt() * scale_B
    largest_float = torch.finfo(torch.float64).max
    return torch.where(largest_B.isfinite(), norm_B.clamp(max=largest_float), largest_B)


def factors(norms_BK: Tensor, groups: list[Group], rescale: bool) -> Tensor:
    """Returns the clipping factors ``(B, K)``; 0 where a factor or norm is not finite."""
    bounds = [torch.as_tensor(group.bound, dtype=torch.float64, device=norms_BK.device) for group in groups]
    bounds_K = torch.stack(bounds) if bounds else norms_BK.new_zeros(0)
    if rescale:
        factors_BK = torch.minimum((1 / bounds_K).expand_as(norms_BK), 1 / norms_BK)
    else:
        factors_BK = (bounds_K / norms_BK).clamp(max=1)
    usable = factors_BK.isfinite() & norms_BK.isfinite()
    return torch.where(usable, factors_BK, torch.zeros_like(factors_BK))


def total_bound(c: Any) -> float:
    """Returns the L2 norm of all clipping norms."""
    bounds = [float(bound) for bound in pytree.tree_leaves(c)]
    return math.inf if math.inf in bounds else math.hypot(*(max(0.0, bound) for bound in bounds))
