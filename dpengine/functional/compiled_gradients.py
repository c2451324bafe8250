"""Compiles clipped sums with ``torch.compile``, and checks them against the uncompiled function."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from dpengine.errors import UnsupportedLayerError

from .bounded import BoundedSensitivityCallable

_MAX_EXAMPLES = 8  # number of examples that are compared
_TOLERANCE = 1e-3  # relative tolerance, far above rounding errors


def compiled(
    function: BoundedSensitivityCallable,
    *example: Any,
    backend: str | Callable[..., Any] = "inductor",
) -> BoundedSensitivityCallable:
    """Compiles a clipped sum.

    Compilation may silently drop the backward of a custom ``autograd.Function`` (pytorch issue 193279), and then the
    contribution of an example is not bounded. The compiled function is therefore compared with the uncompiled one on
    each of the first 8 examples.

    Args:
        function: Result of ``clipped_grad`` or ``clipped_fun``.
        example: Arguments of ``function``, with a typical batch. Other batch sizes are compiled at their first use.
        backend: Backend of ``torch.compile``, by name or as a function.

    Returns:
        The compiled function, with the same sensitivity.

    Raises:
        UnsupportedLayerError: If the compiled function differs on one of these examples.
        TypeError: If ``function`` is not a result of ``clipped_grad`` or ``clipped_fun``.
        ValueError: If the batch is empty.
    """
    if not isinstance(function, BoundedSensitivityCallable):
        raise TypeError(
            f"functional.compiled: {torch.typename(function)} is not a result of clipped_grad or clipped_fun."
        )
    size = len(pytree.tree_leaves(example[function.batch_argnums[0]])[0])
    if size == 0:
        raise ValueError("functional.compiled: the batch is empty. Pass a typical batch.")
    options: Any = {"fallback_random": True} if backend == "inductor" else None
    compiled_function = torch.compile(function.function, backend=backend, options=options)
    for i in range(min(size, _MAX_EXAMPLES)):
        others = torch.arange(size) != i
        expected, compiled_sum = (
            _leaves(function, _seeded(call, *example, is_padding_example=others))
            for call in (function.function, compiled_function)
        )
        norm = sum(float(leaf.double().square().sum()) for leaf in expected) ** 0.5
        error = sum(float((a - b).double().square().sum()) for a, b in zip(expected, compiled_sum, strict=True)) ** 0.5
        if not error <= _TOLERANCE * norm + 1e-12 * function.l2_norm_bound:
            raise UnsupportedLayerError(
                f"The compiled sum of example {i} differs by {error:.3g} from the uncompiled one of norm {norm:.3g}.",
                fix="Use the function uncompiled, or wrap custom autograd Functions in torch.compiler.allow_in_graph.",
            )
    return dataclasses.replace(function, function=compiled_function)


def _leaves(function: BoundedSensitivityCallable, output: Any) -> list[Tensor]:
    """Returns the leaves of the bounded output."""
    return pytree.tree_leaves(output[0] if function.has_aux else output)


def _seeded(call: Callable[..., Any], *args: Any, is_padding_example: Tensor) -> Any:
    """Calls a function with a fixed seed, and restores the global generators."""
    with torch.random.fork_rng(devices=range(torch.cuda.device_count()) if torch.cuda.is_initialized() else []):
        torch.manual_seed(0)
        return call(*args, is_padding_example=is_padding_example)
