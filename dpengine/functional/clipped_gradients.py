"""Sums of clipped per-example gradients, or of other outputs, of a plain function of parameters and data.

Axes: B examples.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from .bounded import AuxiliaryOutput, BoundedSensitivityCallable
from .per_example import Batch, Places, batch_axes, each_example
from .summed import Options, Summed, bounded_sum, identity


def clipped_grad(
    fun: Callable[..., Any],
    argnums: Places = 0,
    has_aux: bool = False,
    *,
    l2_clip_norm: Any,
    rescale_to_unit_norm: bool = False,
    normalize_by: float = 1.0,
    batch_argnums: Places = 1,
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
        fun: Function that returns a scalar loss; with ``has_aux`` a pair of the loss and any value.
        argnums: Positions of the arguments to differentiate: tensors, floats, or nested dicts, lists and tuples of
            them. The gradient of a float is a tensor.
        has_aux: Whether ``fun`` returns a pair.
        l2_clip_norm: Clipping norm of each example's gradient over all arguments; 0 and infinity are allowed. A tree of
            numbers that is a prefix of the gradient's tree clips in groups.
        rescale_to_unit_norm: Divides each clipped gradient by its clipping norm (De et al. 2022, arXiv:2204.13650).
        normalize_by: Public constant that divides the sum.
        batch_argnums: Positions of the arguments with the examples on axis 0 of all tensors. The others are shared.
        keep_batch_dim: Whether ``fun`` receives an example with a leading axis of size 1. If False, an example may
            contain all data of a user on further axes, which are clipped together.
        return_values: Also returns the values of ``fun``, in an ``AuxiliaryOutput``.
        return_grad_norms: Also returns the norms of the gradients.
        pre_clipping_transform: Function from one example's gradient to any tree, which is clipped.
        microbatch_size: Number of examples whose gradients are in memory at a time. It divides the batch size.
        nan_safe: Whether an example whose norm is not finite contributes exactly 0; otherwise the sum is not finite.
        dtype: Dtype of gradients before clipping, and of the sum: float32 or float64. The default keeps the dtype of
            gradients, and sums half precision in float32, because rounding could change the sum more than an example.
        prng_argnum: Position of an integer seed, from which each example gets its own seed.
        grid_scale: Sums integers: each gradient is clipped, multiplied by ``grid_scale / l2_clip_norm`` and rounded, so
            that its exact norm is at most ``grid_scale``. Returns int64.
        process_group: ``torch.distributed`` group over whose ranks the sum is reduced.

    Returns:
        A callable with the arguments of ``fun``, and ``is_padding_example=`` for a ``(B,)`` mask of examples that
        contribute nothing. It returns the sum, or the sum and an ``AuxiliaryOutput``, and has a method ``sensitivity``.
        Arguments out of range raise ``ValueError``.
    """
    places = _places("clipped_grad", argnums=argnums, batch_argnums=batch_argnums, prng_argnum=prng_argnum)
    differentiated, single = places["argnums"], isinstance(argnums, int)
    has_pair = has_aux or return_values or return_grad_norms

    def loss(chosen: tuple[Any, ...], args: list[Any], kwargs: Any) -> tuple[Tensor, Any]:
        args = list(args)
        for place, value in zip(differentiated, chosen, strict=True):
            args[place] = value
        result = fun(*args, **kwargs)
        value, aux = result if has_aux else (result, ())
        if not isinstance(value, Tensor) or value.numel() != 1:
            raise ValueError(
                f"clipped_grad: the function must return a scalar loss, and returned {getattr(value, 'shape', value)}."
            )
        return value.reshape(()), (value.reshape(()), aux)

    def rows(batch: Batch) -> tuple[Any, Any, Any]:
        def one(args: list[Any]) -> tuple[Any, Tensor, Any]:
            chosen = tuple(_as_tensors(place, args[place]) for place in differentiated)
            grads, (value, aux) = torch.func.grad(loss, has_aux=True)(chosen, args, batch.kwargs)
            return (grads[0] if single else grads), value.detach(), aux

        grads, values, aux = each_example(one, batch, keep_batch_dim=keep_batch_dim)
        if has_aux and keep_batch_dim:
            aux = _without_front_axis(aux, lambda args: fun(*args, **batch.kwargs)[1], batch)
        return grads, values, aux

    def outputs(summed: Summed) -> Any:
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
    return bounded_sum(rows, outputs, options, places["batch_argnums"], prng_argnum, has_pair)


def clipped_fun(
    fun: Callable[..., Any],
    has_aux: bool = False,
    *,
    batch_argnums: Places = 0,
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
        fun: Function that returns a tree of tensors; with ``has_aux`` a pair of the tree and any value.
        has_aux: Whether ``fun`` returns a pair.
        batch_argnums: Positions of the arguments with the examples on axis 0 of all tensors. The others are shared.
        l2_clip_norm: Clipping norm of each example's result; a tree of numbers clips in groups.
        rescale_to_unit_norm: Divides each clipped result by its clipping norm.
        normalize_by: Public constant that divides the sum.
        keep_batch_dim: Whether ``fun`` receives an example with a leading axis of size 1.
        return_norms: Also returns the norms before clipping.
        microbatch_size: Number of examples whose results are in memory at a time. It divides the batch size.
        nan_safe: Whether an example whose norm is not finite contributes exactly 0; otherwise the sum is not finite.
        dtype: Dtype of results before clipping, and of the sum: float32 or float64.
        prng_argnum: Position of an integer seed, from which each example gets its own seed.
        grid_scale: Sums integers, as ``clipped_grad`` does.
        process_group: ``torch.distributed`` group over whose ranks the sum is reduced.

    Returns:
        A callable that returns ``value``, ``(value, aux)``, ``(value, norms)`` or ``(value, (aux, norms))``.
    """
    places = _places("clipped_fun", batch_argnums=batch_argnums, prng_argnum=prng_argnum)

    def rows(batch: Batch) -> tuple[Any, Any, Any]:
        def one(args: list[Any]) -> tuple[Any, Any]:
            result = fun(*args, **batch.kwargs)
            return result if has_aux else (result, ())

        trees, aux = each_example(one, batch, keep_batch_dim=keep_batch_dim)
        if keep_batch_dim:
            axes = lambda part: lambda args: part(one(args))  # noqa: E731
            trees = _without_front_axis(trees, axes(lambda pair: pair[0]), batch)
            aux = _without_front_axis(aux, axes(lambda pair: pair[1]), batch)
        return trees, (), aux

    def outputs(summed: Summed) -> Any:
        extra = [*([summed.aux] if has_aux else []), *([summed.norms] if return_norms else [])]
        return summed.total if not extra else (summed.total, extra[0] if len(extra) == 1 else tuple(extra))

    options = Options(
        "clipped_fun", l2_clip_norm, rescale_to_unit_norm, normalize_by, microbatch_size, nan_safe, dtype, grid_scale,
        process_group, identity, return_norms,
    )  # fmt: skip
    return bounded_sum(rows, outputs, options, places["batch_argnums"], prng_argnum, has_aux or return_norms)


def _places(where: str, **argnums: Places | None) -> dict[str, tuple[int, ...]]:
    """Returns the positions of arguments as tuples, by name. Raises ValueError if they are not valid."""
    positions: dict[str, tuple[int, ...]] = {}
    for name, value in argnums.items():
        listed = () if value is None else (value,) if isinstance(value, int) else tuple(value)
        if any(isinstance(place, bool) or not isinstance(place, int) or place < 0 for place in listed):
            raise ValueError(f"{where}: {name} must be positions of arguments, from 0; got {value!r}.")
        positions[name] = listed
    if not positions["batch_argnums"]:
        raise ValueError(f"{where}: batch_argnums is empty. Pass the positions of the arguments with the examples.")
    everything = [place for listed in positions.values() for place in listed]
    if len(set(everything)) < len(everything):
        raise ValueError(f"{where}: a position occurs twice in {argnums}. Pass each once.")
    return positions


def _as_tensors(place: int, tree: Any) -> Any:
    """Converts the Python floats in a tree of parameters to tensors."""

    def tensor(leaf: Any) -> Tensor:
        if isinstance(leaf, float):
            return torch.tensor(leaf, dtype=torch.get_default_dtype())
        if not isinstance(leaf, Tensor) or not (leaf.is_floating_point() or leaf.is_complex()):
            shown = leaf.dtype if isinstance(leaf, Tensor) else repr(leaf)
            raise TypeError(
                f"clipped_grad: argument {place} contains {shown}, which is not differentiable. Pass floats or "
                "floating-point tensors, such as 1.0, or leave the argument out of argnums."
            )
        return leaf

    return pytree.tree_map(tensor, tree)


def _without_front_axis(tree: Any, fun: Callable[[list[Any]], Any], batch: Batch) -> Any:
    """Returns the outputs ``(B, ...)`` without the leading axis of size 1 of each example."""
    leaves, spec = pytree.tree_flatten(tree)
    axes = batch_axes(fun, batch)
    if axes is None or len(axes) != len(leaves):  # shapes do not show the axes
        axes = [0 if isinstance(leaf, Tensor) and leaf.dim() > 1 and leaf.shape[1] == 1 else None for leaf in leaves]
    squeezed = [leaf if axis is None else leaf.squeeze(1 + axis) for leaf, axis in zip(leaves, axes, strict=True)]
    return pytree.tree_unflatten(squeezed, spec)
