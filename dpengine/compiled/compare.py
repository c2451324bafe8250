"""Checks of traced and compiled code before it is used: comparison with the hooks, and the order of rows.

Note [order]: a batch is padded with rows, which get the weight 0 by their place. So row i of every tensor that the
layers see must be row i of the batch. Operations that could order rows by their values are rejected in the graph. A
fixed order shows when other rows are placed next to the compared ones.

Axes: B rows, K groups of parameters that are clipped together.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, fx

from dpengine.errors import UnsupportedLayerError

from .one_pass import OnePass

_FULL, _HALF = 1e-2, 1e-1  # relative: what a compiled pass may differ by, far above rounding and below any mistake
_SAME = 1e-3  # relative: what the norm of a row may change by when others are exchanged; kernels see other numbers
_FIX = "Call loss.backward() instead of the compiled pass."
_ORDERS = {"sort", "argsort", "topk", "randperm", "msort", "unique_consecutive", "_unique2", "_unique", "multinomial",
           "kthvalue", "nonzero", "shuffle", "argwhere"}  # fmt: skip
_PICKS = {
    "index",
    "index_select",
    "gather",
    "take",
    "take_along_dim",
    "index_add",
    "index_copy",
    "scatter",
    "index_put",
}
_RANDOM = 1  # seed of what both passes draw


def refuse_orders(graph: fx.GraphModule, rows: int, first: int, count: int) -> None:
    """Refuses operations by which numbers could decide about the order of rows."""
    placeholders = [node for node in graph.graph.nodes if node.op == "placeholder"]
    from_batch = set(placeholders[first : first + count])
    for node in graph.graph.nodes:
        if any(argument in from_batch for argument in node.all_input_nodes):
            from_batch.add(node)
        if node.op != "call_function":
            continue
        name = getattr(node.target, "__name__", str(node.target)).split(".")[0]
        if name in _ORDERS or (name in _PICKS and _picks_rows(node, rows, from_batch)):
            raise UnsupportedLayerError(
                f"The pass uses {name!r}, by which rows could change places. Rows that pad a batch are known by their "
                "place.",
                fix=_FIX,
            )


def _picks_rows(node: fx.Node, rows: int, from_batch: set[fx.Node]) -> bool:
    """Returns True if rows are selected by numbers of the batch."""
    source = node.args[0]
    value = source.meta.get("val") if isinstance(source, fx.Node) else None
    if not isinstance(value, Tensor) or value.dim() == 0 or value.shape[0] != rows:
        return False
    if getattr(node.target, "__name__", "").startswith("index.") or "index_put" in str(node.target):
        indices = node.args[1]
        leading = indices[0] if isinstance(indices, (list, tuple)) and indices else None
        return isinstance(leading, fx.Node) and leading in from_batch
    dim = next((argument for argument in node.args[1:] if isinstance(argument, int)), 0)
    if dim % value.dim() != 0:
        return False
    return any(argument in from_batch for argument in node.all_input_nodes if argument is not source)


def refuse_mixed_order(one: OnePass, state: list[Tensor], batch: Sequence[Tensor], weights_BK: Tensor) -> None:
    """Refuses a pass in which row i of what layers see is not row i of the batch. See note [order]."""
    rows = len(batch[0])
    if rows < 2:
        return
    place = torch.arange(rows, device=batch[0].device)
    with random_numbers_kept(batch[0].device):
        whole_BK = one.run(state, batch, weights_BK)[1].sqrt()
    for kept in (place < rows // 2, place >= rows // 2):
        others = torch.where(kept, place, place[kept][place % int(kept.sum())])
        with random_numbers_kept(batch[0].device):
            found_BK = one.run(state, [tensor[others] for tensor in batch], weights_BK)[1].sqrt()
        before, after = whole_BK[kept], found_BK[kept]
        same = (before - after).abs() <= _SAME * before + 1e-6 * float(whole_BK.max())
        if not bool(same.all()):
            raise UnsupportedLayerError(
                "The norm of a row's gradient changes when other rows of the batch do: the loss brings rows into "
                "another order, or divides by something of the whole batch.",
                fix=_FIX,
            )


def refuse_difference(expected: Sequence[Tensor], found: Sequence[Tensor], *, half: bool) -> bool:
    """Refuses graphs that do not compute what the hooks do. Some faults of compilers show in gradients of rows only.

    Returns False if nothing could be compared: a sample is not finite, or all gradients are zero.
    """
    tolerance = _HALF if half else _FULL
    expected_BK, found_BK = expected[0].sqrt(), found[0].sqrt()
    if not bool(expected_BK.isfinite().all()) or not bool(expected_BK.any()):
        return False
    largest = float(expected_BK.max())
    agree = (expected_BK - found_BK).abs() <= tolerance * expected_BK + 1e-6 * largest
    off = sum(float((a - b).double().square().sum()) for a, b in zip(expected[1:], found[1:], strict=True))
    if not bool(agree.all()) or not math.sqrt(off) <= tolerance * largest:
        raise UnsupportedLayerError(
            "What was compiled does not give the per-sample gradients that the hooks give: the model or the loss draws "
            "random numbers outside torch or keeps state between calls, or it is compiled wrongly.",
            fix=_FIX,
        )
    return True


@contextmanager
def random_numbers_kept(device: torch.device) -> Iterator[None]:
    """Draws the same numbers in every such block, and leaves the generators as they were."""
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.default_generator.manual_seed(_RANDOM)
        if device.type == "cuda":
            torch.cuda.manual_seed(_RANDOM)
        yield
