"""CompiledBackward: forward, loss, backward, norms and clipped sums of a batch, compiled together.

Axes: B rows of the batch, P rows it is padded to, K groups of parameters that are clipped together.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from dpengine.capture import LayerCall, Use
from dpengine.clipping import ClippedSums
from dpengine.errors import BatchMismatchError, UnsupportedLayerError
from dpengine.gradients import AbstractGradients, Sums

from .graphs import Graphs, traced_graphs
from .one_pass import OnePass

Loss = Callable[..., Tensor]
_FULL, _HALF = 1e-2, 1e-1  # relative: what a compiled pass may differ by, far above rounding and below any mistake


class CompiledBackward:
    """``loss = backward(*batch)`` does what ``loss_fn(*batch).backward()`` does, in compiled code.

    Batches that the isolation probe is due for, the first among them, and those with a row whose gradient is not finite
    go through the hooks, as without compilation. Others are padded, with rows of their own that count nothing, since a
    graph is compiled for every size; the loss that is returned counts these rows, too. Every graph is compared with the
    hooks on the first batch that it sees.

    Args:
        sums: Where clipped gradients add up; attached to the model.
        loss_fn: The loss of a batch. It calls the model. What it reads besides its arguments, the model and torch's
            random numbers is fixed when it is traced.
        multiple_of: Batches are padded to a multiple of this.
        backend: Of ``torch.compile``, by name or as a function.
    """

    def __init__(
        self, sums: ClippedSums, loss_fn: Loss, *, multiple_of: int, backend: str | Callable[..., Any] = "inductor"
    ):
        self._sums = sums
        self._loss_fn = loss_fn
        self._multiple_of = multiple_of
        options = {"fallback_random": True} if backend == "inductor" else None  # so that dropout can be compared
        self._compile = partial(torch.compile, backend=backend, fullgraph=True, dynamic=False, options=options)
        self._graphs: dict[object, Graphs] = {}

    def __call__(self, *args: Any, **kwargs: Any) -> Tensor:
        """Forward, loss and clipped backward pass over one batch.

        Args:
            args: Arguments of ``loss_fn``. Their tensors have the batch on axis 0.
            kwargs: The same.

        Tensors that differ in the size of axis 0 are a BatchMismatchError; a pass that cannot be traced, or whose
        compiled code does not compute what the hooks do, an UnsupportedLayerError.

        Returns:
            The loss, detached.
        """
        leaves, spec = pytree.tree_flatten((args, kwargs))
        rows = _rows(leaves)
        sums = self._sums
        if rows == 0 or not sums.capture.watching or sums.probe_due:
            return self._by_hooks(args, kwargs)
        sums.forward_started(rows)
        padded = math.ceil(rows / self._multiple_of) * self._multiple_of
        batch = [_padded(leaf, padded) for leaf in leaves if isinstance(leaf, Tensor)]
        with torch.no_grad():
            graphs, state = self._graphs_for(batch, leaves, spec)
            loss, sq_norms_PK, held = graphs.norms([*state, *batch])
            if not bool(sq_norms_PK.isfinite().all()):
                return self._by_hooks(args, kwargs)
        stretch = padded / rows if sums.loss_reduction == "mean" else 1.0
        named = {name: parameter for name, parameter in sums.trainable().items() if parameter in graphs.parameters}
        sums.take(_Done(graphs, held, sq_norms_PK, rows, stretch, named))
        return loss

    def _by_hooks(self, args: Any, kwargs: Any) -> Tensor:
        with torch.enable_grad():
            loss = self._loss_fn(*args, **kwargs)
            loss.backward()
        return loss.detach()

    def _graphs_for(self, batch: Sequence[Tensor], leaves: Sequence[Any], spec: Any) -> tuple[Graphs, list[Tensor]]:
        """The graphs for such a batch, and the model's state in the order in which they take it."""
        model = self._sums.model
        others = [None if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        groups, num_groups = self._sums.groups()
        one = OnePass(self._sums.capture, partial(self._loss_of, others, spec), groups, num_groups)
        state = one.state()
        key = (
            tuple(_kind(tensor) for tensor in batch),
            tuple((_kind(tensor), tensor.requires_grad) for tensor in state),
            tuple(module.training for module in model.modules()),
            (repr(others), repr(spec), torch.is_autocast_enabled(batch[0].device.type), num_groups),
        )
        state = [tensor.detach() for tensor in state]
        if key not in self._graphs:
            weights_PK = torch.rand(len(batch[0]), num_groups, dtype=torch.float64, device=batch[0].device)
            graphs = traced_graphs(one, state, batch, weights_PK, self._compile)
            _compare(one, graphs, state, batch, weights_PK)
            self._graphs[key] = graphs
        return self._graphs[key], state

    def _loss_of(self, others: Sequence[Any], spec: Any, batch: Sequence[Tensor]) -> Tensor:
        tensors = iter(batch)
        args, kwargs = pytree.tree_unflatten([next(tensors) if leaf is None else leaf for leaf in others], spec)
        return self._loss_fn(*args, **kwargs)


@dataclass(eq=False)
class _Done(AbstractGradients):
    """A pass of which norms are known, and from which sums can be had."""

    graphs: Graphs
    held: list[Tensor]
    sq_norms_PK: Tensor
    num_rows: int
    stretch: float
    named: Mapping[str, nn.Parameter]

    def receive(self, call: LayerCall, uses: Mapping[str, Use], rule: Any) -> None:
        raise UnsupportedLayerError(f"Layer '{call.name}' reported a pass that is over.")

    def receive_rows(self, use: Use, grad: Tensor) -> None:
        raise UnsupportedLayerError(f"'{use.name}' reported a pass that is over.")

    @property
    def rows(self) -> Mapping[str, int]:
        return {"the model": self.num_rows} if self.held else {}

    @property
    def parameters(self) -> Mapping[nn.Parameter, str]:
        return {parameter: name for name, parameter in self.named.items()}

    def sq_norms(self, groups: Mapping[nn.Parameter, int], num_groups: int, scale: float) -> Tensor:
        return self.sq_norms_PK[: self.num_rows] * (scale * self.stretch) ** 2

    def drop(self, rows_B: Tensor) -> None:
        raise UnsupportedLayerError("A row that is not finite reached a compiled pass.")

    def add_sums(self, groups: Mapping[nn.Parameter, int], weights_BK: Tensor, scale: float, into: Sums) -> None:
        weights_PK = weights_BK.new_zeros(self.sq_norms_PK.shape)
        weights_PK[: self.num_rows] = weights_BK
        for parameter, total in zip(self.named.values(), self.graphs.sums(self.held, weights_PK), strict=True):
            into.add(parameter, total, scale * self.stretch)

    def clear(self) -> None:
        self.held = []


def _rows(leaves: Sequence[Any]) -> int:
    """The size of axis 0 that all tensors have."""
    sizes = [tuple(leaf.shape[:1]) for leaf in leaves if isinstance(leaf, Tensor)]
    if not sizes or () in sizes or len(set(sizes)) > 1:
        raise BatchMismatchError(
            f"The tensors of a compiled pass must all have the batch on axis 0; found sizes {sizes}.",
            fix="Let loss_fn read tensors that are no part of the batch from outside.",
        )
    return sizes[0][0]


def _padded(tensor: Tensor, rows: int) -> Tensor:
    """The tensor with its first rows once more behind it."""
    if len(tensor) == rows:
        return tensor.detach()
    return tensor.detach()[torch.arange(rows, device=tensor.device) % len(tensor)]


def _kind(tensor: Tensor) -> object:
    return tensor.shape, tensor.dtype, tensor.device, tensor.stride()


def _compare(one: OnePass, graphs: Graphs, state: list[Tensor], batch: Sequence[Tensor], weights_PK: Tensor) -> None:
    """Refuses graphs that do not compute what the hooks do. Some faults of compilers show in gradients of rows only."""
    with _random_numbers_kept(batch[0].device):
        _, expected_PK, *expected = one.run(state, batch, weights_PK)
    with _random_numbers_kept(batch[0].device):
        _, found_PK, held = graphs.norms([*state, *batch])
        found = graphs.sums(held, weights_PK)
    half = any(tensor.dtype in {torch.float16, torch.bfloat16} for tensor in [*state, *batch])
    tolerance = _HALF if half or torch.is_autocast_enabled(batch[0].device.type) else _FULL
    expected_PK, found_PK = expected_PK.sqrt(), found_PK.sqrt()
    finite = expected_PK.isfinite()
    largest = float(expected_PK.where(finite, 0).max())
    agree = (expected_PK - found_PK).abs() <= tolerance * expected_PK + 1e-6 * largest
    good = bool((agree | ~finite).all()) and bool((finite | ~found_PK.isfinite()).all())
    if good and bool(finite.all()):
        off = sum(float((a - b).double().square().sum()) for a, b in zip(expected, found, strict=True))
        good = math.sqrt(off) <= tolerance * largest
    if not good:
        raise UnsupportedLayerError(
            "What was compiled does not give the per-sample gradients that the hooks give: the model or the loss draws "
            "random numbers outside torch or keeps state between calls, or it is compiled wrongly.",
            fix="Call loss.backward() instead of the compiled pass.",
        )


@contextmanager
def _random_numbers_kept(device: torch.device) -> Iterator[None]:
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        yield
