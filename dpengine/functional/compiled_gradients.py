"""A clipped sum under ``torch.compile``, compared with itself uncompiled before it is used."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from dpengine.errors import UnsupportedLayerError

from .bounded import BoundedSensitivityCallable

_MOST_EXAMPLES = 8  # that are looked at one by one
_TOLERANCE = 1e-3  # relative: far above rounding


def compiled(
    function: BoundedSensitivityCallable,
    *example: Any,
    backend: str | Callable[..., Any] = "inductor",
) -> BoundedSensitivityCallable:
    """The same function, compiled.

    Compiling may lose what a custom ``autograd.Function`` does in its backward, without an error (pytorch issue
    193279), and then what one example adds is not what was bounded. So each of the first examples is summed alone, by
    compiled code and without it, before the function is given back.

    Args:
        function: What ``clipped_grad`` or ``clipped_fun`` returned.
        example: Arguments for it, with a batch as it will be; other sizes are compiled when they come.
        backend: Of ``torch.compile``, by name or as a function.

    Returns:
        The compiled function, of the same sensitivity.

    Raises:
        UnsupportedLayerError: If compiled code adds something else for an example.
        TypeError: If ``function`` does not come from this package.
        ValueError: If the batch has no examples.
    """
    if not isinstance(function, BoundedSensitivityCallable):
        raise TypeError(f"functional.compiled: {torch.typename(function)} is none of clipped_grad and clipped_fun.")
    size = len(pytree.tree_leaves(example[function.batch_argnums[0]])[0])
    if size == 0:
        raise ValueError("functional.compiled: the example has no rows; pass a batch as it will be.")
    options: Any = {"fallback_random": True} if backend == "inductor" else None
    fast = torch.compile(function.function, backend=backend, options=options)
    for i in range(min(size, _MOST_EXAMPLES)):
        others = torch.arange(size) != i
        slow_sum, fast_sum = (
            _leaves(function, _seeded(call, *example, is_padding_example=others)) for call in (function.function, fast)
        )
        norm = sum(float(leaf.double().square().sum()) for leaf in slow_sum) ** 0.5
        off = sum(float((a - b).double().square().sum()) for a, b in zip(slow_sum, fast_sum, strict=True)) ** 0.5
        if not off <= _TOLERANCE * norm + 1e-12 * function.l2_norm_bound:
            raise UnsupportedLayerError(
                f"Compiled code adds something else for example {i}: it is off by {off:.3g}, and its clipped gradient "
                f"has norm {norm:.3g}.",
                fix="Use the function uncompiled; or wrap custom autograd Functions by torch.compiler.allow_in_graph.",
            )
    return dataclasses.replace(function, function=fast)


def _leaves(function: BoundedSensitivityCallable, output: Any) -> list[Tensor]:
    """Of the bounded part of what the function returns."""
    return pytree.tree_leaves(output[0] if function.has_aux else output)


def _seeded(call: Callable[..., Any], *args: Any, is_padding_example: Tensor) -> Any:
    """Calls it with the same random numbers each time, and leaves the generators as they were."""
    with torch.random.fork_rng(devices=range(torch.cuda.device_count()) if torch.cuda.is_initialized() else []):
        torch.manual_seed(0)
        return call(*args, is_padding_example=is_padding_example)
