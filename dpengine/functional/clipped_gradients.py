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
from .summed import Summed, bounded_sum, identity, options_for


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
    """A function that returns ``sum_i clip(grad fun(params, example_i)) / normalize_by``.

    Args:
        fun: Returns the loss of what it is given, a scalar; with ``has_aux`` a pair of it and anything.
        argnums: Which arguments to differentiate by: a tensor or a float each, or any nesting of dicts, lists and
            tuples of them. The gradient by a float is a tensor.
        has_aux: Whether ``fun`` returns a pair.
        l2_clip_norm: What the norm of each example's gradient is clipped to, of all arguments together; 0 and infinity
            are allowed. A tree of numbers that is the beginning of the gradient's clips in groups.
        rescale_to_unit_norm: Divides each clipped gradient by its threshold (De et al. 2022, arXiv:2204.13650).
        normalize_by: A public constant that divides the sum.
        batch_argnums: Which arguments have the examples on axis 0 of all their tensors. The others are shared.
        keep_batch_dim: Whether ``fun`` sees an example with an axis of size 1 in front. Without it, an example that has
            further axes may be all that a user has, and is clipped as one.
        return_values: Returns the values of ``fun`` too, in an ``AuxiliaryOutput``.
        return_grad_norms: Returns the norms of the gradients too.
        pre_clipping_transform: Maps one example's gradient to any tree, which is then clipped.
        microbatch_size: Examples whose gradients are held at a time; it divides the batch.
        nan_safe: Whether an example whose norm is not finite adds exactly nothing; else it spreads.
        dtype: Of gradients, before they are clipped, and of the sum: float32 or float64. None leaves gradients as they
            are, and sums half precision in float32, since rounding may move a narrower sum further than any example.
        prng_argnum: An argument that is an integer seed; each example gets one of its own.
        grid_scale: Sums whole numbers: each example is clipped, multiplied by ``grid_scale / l2_clip_norm`` and rounded
            so that its norm is at most ``grid_scale`` exactly. Returns int64.
        process_group: Adds up the sums of all ranks of this ``torch.distributed`` group.

    Returns:
        A callable with the arguments of ``fun``, and ``is_padding_example=`` for a ``(B,)`` mask of examples that add
        nothing. It returns the sum, or the sum and an ``AuxiliaryOutput``; and it knows its ``sensitivity``. Arguments
        out of their range are a ``ValueError``.
    """
    places = _places("clipped_grad", argnums=argnums, batch_argnums=batch_argnums, prng_argnum=prng_argnum)
    differentiated, single = places["argnums"], isinstance(argnums, int)
    has_pair = has_aux or return_values or return_grad_norms

    def loss(chosen: tuple[Any, ...], args: list[Any], kwargs: Any) -> tuple[Tensor, Any]:
        args = list(args)
        for place, value in zip(differentiated, chosen, strict=True):
            args[place] = value
        found = fun(*args, **kwargs)
        value, aux = found if has_aux else (found, ())
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

    def outputs(found: Summed) -> Any:
        extra = AuxiliaryOutput(
            found.values if return_values else None,
            found.norms if return_grad_norms else None,
            found.aux if has_aux else None,
        )
        return (found.total, extra) if has_pair else found.total

    options = options_for(
        "clipped_grad", l2_clip_norm, rescale_to_unit_norm, normalize_by, microbatch_size, nan_safe, dtype, grid_scale,
        process_group, transform=pre_clipping_transform, norms=return_grad_norms,
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
    """A function that returns ``sum_i clip(fun(example_i)) / normalize_by``: a private mean, histogram or indicator.

    Args:
        fun: Returns any tree of tensors for what it is given; with ``has_aux`` a pair of it and anything.
        has_aux: Whether ``fun`` returns a pair.
        batch_argnums: Which arguments have the examples on axis 0 of all their tensors.
        l2_clip_norm: As for ``clipped_grad``, and so are all arguments that have its names.
        rescale_to_unit_norm: See there.
        normalize_by: See there.
        keep_batch_dim: See there.
        return_norms: Returns the norms before clipping too.
        microbatch_size: See there.
        nan_safe: See there.
        dtype: See there.
        prng_argnum: See there.
        grid_scale: See there.
        process_group: See there.

    Returns:
        A callable that returns ``value``, ``(value, aux)``, ``(value, norms)`` or ``(value, (aux, norms))``.
    """
    places = _places("clipped_fun", batch_argnums=batch_argnums, prng_argnum=prng_argnum)

    def rows(batch: Batch) -> tuple[Any, Any, Any]:
        def one(args: list[Any]) -> tuple[Any, Any]:
            found = fun(*args, **batch.kwargs)
            return found if has_aux else (found, ())

        trees, aux = each_example(one, batch, keep_batch_dim=keep_batch_dim)
        if keep_batch_dim:
            axes = lambda part: lambda args: part(one(args))  # noqa: E731
            trees = _without_front_axis(trees, axes(lambda pair: pair[0]), batch)
            aux = _without_front_axis(aux, axes(lambda pair: pair[1]), batch)
        return trees, (), aux

    def outputs(found: Summed) -> Any:
        extra = [*([found.aux] if has_aux else []), *([found.norms] if return_norms else [])]
        return found.total if not extra else (found.total, extra[0] if len(extra) == 1 else tuple(extra))

    options = options_for(
        "clipped_fun", l2_clip_norm, rescale_to_unit_norm, normalize_by, microbatch_size, nan_safe, dtype, grid_scale,
        process_group, transform=identity, norms=return_norms,
    )  # fmt: skip
    return bounded_sum(rows, outputs, options, places["batch_argnums"], prng_argnum, has_aux or return_norms)


def _places(where: str, **given: Places | None) -> dict[str, tuple[int, ...]]:
    found: dict[str, tuple[int, ...]] = {}
    for name, value in given.items():
        listed = () if value is None else (value,) if isinstance(value, int) else tuple(value)
        if any(isinstance(place, bool) or not isinstance(place, int) or place < 0 for place in listed):
            raise ValueError(f"{where}: {name} must be numbers of arguments from 0, got {value!r}.")
        found[name] = listed
    if not found["batch_argnums"]:
        raise ValueError(f"{where}: batch_argnums is empty; name the arguments that have the examples.")
    everything = [place for listed in found.values() for place in listed]
    if len(set(everything)) < len(everything):
        raise ValueError(f"{where}: an argument is named twice in {given}; each has one part.")
    return found


def _as_tensors(place: int, tree: Any) -> Any:
    """Returns parameters with tensors for Python floats."""

    def tensor(leaf: Any) -> Tensor:
        if isinstance(leaf, float):
            return torch.tensor(leaf, dtype=torch.get_default_dtype())
        if not isinstance(leaf, Tensor) or not (leaf.is_floating_point() or leaf.is_complex()):
            what = leaf.dtype if isinstance(leaf, Tensor) else repr(leaf)
            raise TypeError(
                f"clipped_grad: argument {place} holds {what}, by which nothing can be differentiated. Pass floats or "
                "floating-point tensors, such as 1.0, or leave the argument out of argnums."
            )
        return leaf

    return pytree.tree_map(tensor, tree)


def _without_front_axis(tree: Any, fun: Callable[[list[Any]], Any], batch: Batch) -> Any:
    """Outputs ``(B, ...)`` without the axis of size 1 that an example had in front."""
    leaves, spec = pytree.tree_flatten(tree)
    axes = batch_axes(fun, batch)
    if axes is None or len(axes) != len(leaves):  # shapes did not tell
        axes = [0 if isinstance(leaf, Tensor) and leaf.dim() > 1 and leaf.shape[1] == 1 else None for leaf in leaves]
    found = [leaf if axis is None else leaf.squeeze(1 + axis) for leaf, axis in zip(leaves, axes, strict=True)]
    return pytree.tree_unflatten(found, spec)
