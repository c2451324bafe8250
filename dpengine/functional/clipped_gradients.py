"""Sums of clipped per-example gradients or outputs of a plain function.

Axes: B examples.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from .bounded import AuxiliaryOutput, BoundedSensitivityCallable
from .per_example import Argnums, Batch, map_examples, output_batch_axes
from .summed import ClippedSum, Options, bounded_sum, identity


def clipped_grad(
    fun: Callable[..., Any],
    argnums: Argnums = 0,
    has_aux: bool = False,
    *,
    l2_clip_norm: Any,
    rescale_to_unit_norm: bool = False,
    normalize_by: float = 1.0,
    batch_argnums: Argnums = 1,
    keep_batch_dim: bool = True,
    return_values: bool = False,
    return_grad_norms: bool = False,
    pre_clipping_transform: Callable[[Any], Any] = identity,
    microbatch_size: int | None = None,
    nan_safe: bool = True,
    dtype: torch.dtype | None = None,
    prng_argnum: int | None = None,
    grid_scale: float | None = None,
    process_group: Any = None,
) -> BoundedSensitivityCallable:
    """Returns a function that computes ``sum_i clip(grad fun(params, example_i)) / normalize_by``.

    Args:
        fun: Function that returns a scalar loss, or a pair of the loss and an auxiliary output if ``has_aux``.
        argnums: Positions of the arguments to differentiate: tensors, floats, or nested dicts, lists and tuples of
            them. The gradient of a float is a tensor.
        has_aux: Whether ``fun`` returns a pair.
        l2_clip_norm: Clipping norm of each example's gradient over all arguments; 0 and infinity are allowed. A tree of
            numbers that is a prefix of the gradient's tree sets one clipping norm per group of leaves.
        rescale_to_unit_norm: Whether to divide each clipped gradient by its clipping norm (De et al. 2022,
            arXiv:2204.13650).
        normalize_by: Public constant that divides the sum.
        batch_argnums: Positions of the batched arguments, whose tensors have the examples on axis 0. Examples share all
            other arguments.
        keep_batch_dim: Whether ``fun`` receives each example with a leading axis of size 1. If False, one example
            may be all records of a user, stacked on further axes; their gradient is clipped as a whole.
        return_values: Whether to return the values of ``fun`` too, in an ``AuxiliaryOutput``.
        return_grad_norms: Whether to return the gradient norms too, in an ``AuxiliaryOutput``.
        pre_clipping_transform: Maps one example's gradient to the tree that is clipped instead.
        microbatch_size: Number of per-example gradients in memory at a time. It must divide the batch size.
        nan_safe: Whether an example with a non-finite norm contributes exactly 0. If not, it makes the sum non-finite.
        dtype: Dtype of gradients before clipping, and of the sum: float32 or float64. By default gradients
            keep their dtype, and half precision is summed in float32: rounding could otherwise change the sum by more
            than one example does.
        prng_argnum: Position of an integer seed, from which a seed for each example is derived.
        grid_scale: If set, each gradient is clipped, multiplied by ``grid_scale / l2_clip_norm`` and rounded to
            integers whose norm is at most ``grid_scale`` exactly. The sum is then int64.
        process_group: ``torch.distributed`` group that all-reduces the sum.

    Returns:
        A callable with the arguments of ``fun`` and the keyword ``is_padding_example``, a ``(B,)`` mask of examples
        that contribute nothing. It returns the sum, or the sum and an ``AuxiliaryOutput``, and has a method
        ``sensitivity``. Arguments out of range raise ``ValueError``.
    """
    positions = _checked_argnums("clipped_grad", argnums=argnums, batch_argnums=batch_argnums, prng_argnum=prng_argnum)
    differentiated, single = positions["argnums"], isinstance(argnums, int)
    has_pair = has_aux or return_values or return_grad_norms

    def loss(params: tuple[Any, ...], args: list[Any], kwargs: Any) -> tuple[Tensor, Any]:
        args = list(args)
        for position, value in zip(differentiated, params, strict=True):
            args[position] = value
        result = fun(*args, **kwargs)
        value, aux = result if has_aux else (result, ())
        if not isinstance(value, Tensor) or value.numel() != 1:
            raise ValueError(
                f"clipped_grad: the function must return a scalar loss, got {getattr(value, 'shape', value)}."
            )
        return value.reshape(()), (value.reshape(()), aux)

    def per_example(batch: Batch) -> tuple[Any, Any, Any]:
        def one_example(args: list[Any]) -> tuple[Any, Tensor, Any]:
            params = tuple(_as_tensors(position, args[position]) for position in differentiated)
            grads, (value, aux) = torch.func.grad(loss, has_aux=True)(params, args, batch.kwargs)
            return (grads[0] if single else grads), value.detach(), aux

        grads, values, aux = map_examples(one_example, batch, keep_batch_dim=keep_batch_dim)
        if has_aux and keep_batch_dim:
            aux = _without_unit_axis(aux, lambda args: fun(*args, **batch.kwargs)[1], batch)
        return grads, values, aux

    def outputs(summed: ClippedSum) -> Any:
        extra = AuxiliaryOutput(
            summed.values if return_values else None,
            summed.norms if return_grad_norms else None,
            summed.aux if has_aux else None,
        )
        return (summed.total, extra) if has_pair else summed.total

    options = Options(
        "clipped_grad", l2_clip_norm, rescale_to_unit_norm, normalize_by, microbatch_size, nan_safe, dtype, grid_scale,
        process_group, pre_clipping_transform, return_grad_norms,
    )  # fmt: skip
    return bounded_sum(per_example, outputs, options, positions["batch_argnums"], prng_argnum, has_pair)


def clipped_fun(
    fun: Callable[..., Any],
    has_aux: bool = False,
    *,
    batch_argnums: Argnums = 0,
    l2_clip_norm: Any = 1.0,
    rescale_to_unit_norm: bool = False,
    normalize_by: float = 1.0,
    keep_batch_dim: bool = True,
    return_norms: bool = False,
    microbatch_size: int | None = None,
    nan_safe: bool = True,
    dtype: torch.dtype | None = None,
    prng_argnum: int | None = None,
    grid_scale: float | None = None,
    process_group: Any = None,
) -> BoundedSensitivityCallable:
    """Returns a function that computes ``sum_i clip(fun(example_i)) / normalize_by``, such as a mean or histogram.

    Args:
        fun: Function that returns a tree of tensors, or a pair of the tree and an auxiliary output if ``has_aux``.
        has_aux: Whether ``fun`` returns a pair.
        batch_argnums: Positions of the batched arguments, whose tensors have the examples on axis 0. Examples share all
            other arguments.
        l2_clip_norm: Clipping norm of each example's result; a tree of numbers clips in groups.
        rescale_to_unit_norm: Whether to divide each clipped result by its clipping norm.
        normalize_by: Public constant that divides the sum.
        keep_batch_dim: Whether ``fun`` receives an example with a leading axis of size 1.
        return_norms: Whether to return the norms before clipping too.
        microbatch_size: Number of per-example results in memory at a time. It must divide the batch size.
        nan_safe: Whether an example with a non-finite norm contributes exactly 0. If not, it makes the sum non-finite.
        dtype: Dtype of results before clipping, and of the sum: float32 or float64.
        prng_argnum: Position of an integer seed, from which a seed for each example is derived.
        grid_scale: If set, results are rounded to integers before the sum; see ``clipped_grad``.
        process_group: ``torch.distributed`` group that all-reduces the sum.

    Returns:
        A callable that returns ``value``, ``(value, aux)``, ``(value, norms)`` or ``(value, (aux, norms))``.
    """
    positions = _checked_argnums("clipped_fun", batch_argnums=batch_argnums, prng_argnum=prng_argnum)

    def per_example(batch: Batch) -> tuple[Any, Any, Any]:
        def one_example(args: list[Any]) -> tuple[Any, Any]:
            result = fun(*args, **batch.kwargs)
            return result if has_aux else (result, ())

        trees, aux = map_examples(one_example, batch, keep_batch_dim=keep_batch_dim)
        if keep_batch_dim:
            trees = _without_unit_axis(trees, lambda args: one_example(args)[0], batch)
            aux = _without_unit_axis(aux, lambda args: one_example(args)[1], batch)
        return trees, (), aux

    def outputs(summed: ClippedSum) -> Any:
        extra = [*([summed.aux] if has_aux else []), *([summed.norms] if return_norms else [])]
        return summed.total if not extra else (summed.total, extra[0] if len(extra) == 1 else tuple(extra))

    options = Options(
        "clipped_fun", l2_clip_norm, rescale_to_unit_norm, normalize_by, microbatch_size, nan_safe, dtype, grid_scale,
        process_group, identity, return_norms,
    )  # fmt: skip
    return bounded_sum(per_example, outputs, options, positions["batch_argnums"], prng_argnum, has_aux or return_norms)


def _checked_argnums(where: str, **argnums: Argnums | None) -> dict[str, tuple[int, ...]]:
    """Returns the argument positions as tuples, by name. Raises ValueError if they are invalid."""
    positions: dict[str, tuple[int, ...]] = {}
    for name, value in argnums.items():
        listed = () if value is None else (value,) if isinstance(value, int) else tuple(value)
        if any(isinstance(i, bool) or not isinstance(i, int) or i < 0 for i in listed):
            raise ValueError(f"{where}: {name} must be argument positions, counted from 0; got {value!r}.")
        positions[name] = listed
    if not positions["batch_argnums"]:
        raise ValueError(f"{where}: batch_argnums is empty. Pass the positions of the batched arguments.")
    all_positions = [position for listed in positions.values() for position in listed]
    if len(set(all_positions)) < len(all_positions):
        raise ValueError(f"{where}: a position occurs twice in {argnums}. Pass each position once.")
    return positions


def _as_tensors(position: int, tree: Any) -> Any:
    """Converts the Python floats in a tree of parameters to tensors."""

    def tensor(leaf: Any) -> Tensor:
        if isinstance(leaf, float):
            return torch.tensor(leaf, dtype=torch.get_default_dtype())
        if not isinstance(leaf, Tensor) or not (leaf.is_floating_point() or leaf.is_complex()):
            shown = leaf.dtype if isinstance(leaf, Tensor) else repr(leaf)
            raise TypeError(
                f"clipped_grad: argument {position} contains {shown}, which is not differentiable. Pass floats or "
                "floating-point tensors, such as 1.0, or leave the argument out of argnums."
            )
        return leaf

    return pytree.tree_map(tensor, tree)


def _without_unit_axis(tree: Any, fun: Callable[[list[Any]], Any], batch: Batch) -> Any:
    """Removes the axis of size 1 that ``keep_batch_dim`` added to each example from outputs ``(B, ...)``."""
    leaves, spec = pytree.tree_flatten(tree)
    axes = output_batch_axes(fun, batch)
    if axes is None or len(axes) != len(leaves):  # unknown: assume axis 0 where it has size 1
        axes = [0 if isinstance(leaf, Tensor) and leaf.dim() > 1 and leaf.shape[1] == 1 else None for leaf in leaves]
    squeezed = [leaf if axis is None else leaf.squeeze(1 + axis) for leaf, axis in zip(leaves, axes, strict=True)]
    return pytree.tree_unflatten(squeezed, spec)
