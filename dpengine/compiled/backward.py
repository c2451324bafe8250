"""CompiledBackward: forward, loss, backward, norms and clipped sums of a batch, compiled together.

Axes: B rows of the batch, P rows it is padded to, K groups of parameters that are clipped together.
"""

from __future__ import annotations

import enum
import math
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from dpengine.capture.record import LayerCall, Use
from dpengine.engine.clipped_sums import ClippedSums
from dpengine.errors import BatchMismatchError, UnsupportedLayerError
from dpengine.grad_modes.flat_buffer import Sums
from dpengine.grad_modes.strategy import AbstractGradients

from .compare import random_numbers_kept, refuse_difference, refuse_mixed_order
from .graphs import Graphs, traced_graphs
from .one_pass import OnePass

_PLAIN = (int, float, bool, str, bytes, type(None), torch.dtype, torch.device, enum.Enum)


def kind_of(tensor: Tensor) -> object:
    """Shape, dtype, place and layout."""
    return tensor.shape, tensor.dtype, tensor.device, tensor.stride()


def plain_arguments(leaves: Sequence[Any]) -> tuple[Any, ...]:
    """The leaves of a call that are no tensors, None where one was.

    Args:
        leaves: Of arguments.

    Returns:
        Them, with their types, since True equals 1.

    Raises:
        UnsupportedLayerError: If one is no plain value: what is in it would be fixed when the graph is traced.
    """
    for leaf in leaves:
        if not isinstance(leaf, (Tensor, *_PLAIN)):
            raise UnsupportedLayerError(
                f"A compiled pass was given a {type(leaf).__name__}, whose content a graph would keep for ever.",
                fix="Pass tensors with the batch on axis 0, and plain numbers and strings.",
            )
    return tuple(None if isinstance(leaf, Tensor) else (type(leaf), leaf) for leaf in leaves)


def model_key(model: nn.Module, state: Sequence[Tensor]) -> object:
    """Modules, their settings, and which parameters and buffers are where."""
    number = {tensor: i for i, tensor in enumerate(state)}
    modules = tuple((id(module), type(module), _settings(module, number)) for module in model.modules())
    return modules, tuple((id(tensor), kind_of(tensor), tensor.requires_grad) for tensor in state)


def _settings(module: nn.Module, number: dict[Tensor, int]) -> tuple[Any, ...]:
    found: list[Any] = [(name, number.get(t)) for table in (module._parameters, module._buffers)  # type: ignore[attr-defined]
                        for name, t in table.items() if t is not None]  # fmt: skip
    for name, value in vars(module).items():
        if isinstance(value, _PLAIN) or (isinstance(value, tuple) and all(isinstance(v, _PLAIN) for v in value)):
            found.append((name, value))
        elif isinstance(value, Tensor):
            found.append((name, id(value), value._version))
    return tuple(found)


def autocast_key(device: torch.device) -> object:
    """Whether autocast is on, and in which dtype."""
    return torch.is_autocast_enabled(device.type), torch.get_autocast_dtype(device.type)


@dataclass(eq=False)
class Done(AbstractGradients):
    """Norms of a pass, and the way to its sums.

    Attributes:
        graphs: What ran.
        held: What the sums need.
        sq_norms_PK: Of unscaled gradients.
        num_rows: Of the batch.
        stretch: By how much smaller gradients are since a loss that is a mean was one over padded rows.
        named: The parameters that took part.
    """

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
            into.complete(parameter)

    def clear(self) -> None:
        self.held = []


Loss = Callable[..., Tensor]
_MOST_GRAPHS = 64
_one_at_a_time = threading.RLock()  # while one thread traces, no other may run what was compiled


class CompiledBackward:
    """``loss = backward(*batch)`` does what ``loss_fn(*batch).backward()`` does, in compiled code.

    Batches that the isolation probe is due for, the first among them, and those with a row whose gradient is not finite
    go through the hooks, as without compilation. Others are padded, with rows of their own that count nothing, since a
    graph is compiled for every size; the loss that is returned counts these rows, too. Every graph is compared with the
    hooks on the first batches that it sees.

    Args:
        sums: Where clipped gradients add up; attached to the model.
        loss_fn: The loss of a batch, a sum or mean over rows that keeps their order. It calls the model. What it reads
            besides its arguments, the model's parameters, buffers and settings, and torch's random numbers is fixed
            when it is traced.
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
            args: Arguments of ``loss_fn``: tensors with the batch on axis 0, and plain values.
            kwargs: The same.

        Tensors that differ in the size of axis 0 are a BatchMismatchError; a pass that cannot be traced, or whose
        compiled code does not compute what the hooks do, an UnsupportedLayerError.

        Returns:
            The loss, detached.
        """
        with _one_at_a_time:
            return self._pass(args, kwargs)

    def _pass(self, args: Any, kwargs: Any) -> Tensor:
        leaves, spec = pytree.tree_flatten((args, kwargs))
        rows, sums = _rows(leaves), self._sums
        if rows == 0 or not sums.capture.watching or sums.probe_due:
            return self._by_hooks(args, kwargs)
        sums.capture.restore()  # an interrupt may have ended the last pass before its hooks could
        sums.capture.begin(rows)
        padded = math.ceil(rows / self._multiple_of) * self._multiple_of
        batch = [_padded(leaf, padded) for leaf in leaves if isinstance(leaf, Tensor)]
        with torch.no_grad():
            graphs, state = self._graphs_for(batch, leaves, spec)
            if not graphs.verified:
                return self._by_hooks(args, kwargs)
            loss, sq_norms_PK, held = graphs.norms([*state, *batch])
            mean = sums.loss_reduction == "mean"
            if not bool((sq_norms_PK * float(padded if mean else 1) ** 2).isfinite().all()):
                return self._by_hooks(args, kwargs)
        named = {name: parameter for name, parameter in sums.trainable().items() if parameter in graphs.parameters}
        sums.take(Done(graphs, held, sq_norms_PK, rows, padded / rows if mean else 1.0, named))
        return loss

    def _by_hooks(self, args: Any, kwargs: Any) -> Tensor:
        with torch.enable_grad():
            loss = self._loss_fn(*args, **kwargs)
            loss.backward()
        return loss.detach()

    def _graphs_for(self, batch: Sequence[Tensor], leaves: Sequence[Any], spec: Any) -> tuple[Graphs, list[Tensor]]:
        """The graphs for such a batch, and the model's state in the order in which they take it."""
        others = plain_arguments(leaves)
        groups, num_groups = self._sums.groups()
        values = [None if other is None else other[1] for other in others]
        tensors = [isinstance(leaf, Tensor) for leaf in leaves]
        one = OnePass(self._sums.capture, partial(self._loss_of, tensors, values, spec), groups, num_groups)
        state, device = one.state(), batch[0].device
        call = (others, repr(spec), tuple(map(kind_of, batch)), autocast_key(device))
        key = (call, model_key(self._sums.model, state), tuple(groups.values()))
        state = [tensor.detach() for tensor in state]
        graphs = self._graphs.get(key)
        if graphs is None or not graphs.verified:
            graphs = self._checked(key, one, state, batch, num_groups)
        return graphs, state

    def _checked(
        self, key: object, one: OnePass, state: list[Tensor], batch: Sequence[Tensor], num_groups: int
    ) -> Graphs:
        """The graphs for a key, compared with the hooks as far as this batch allows."""
        weights_PK = torch.rand(len(batch[0]), num_groups, dtype=torch.float64, device=batch[0].device)
        if key not in self._graphs:
            if len(self._graphs) >= _MOST_GRAPHS:
                raise UnsupportedLayerError(
                    f"More than {_MOST_GRAPHS} graphs were compiled: a setting of the model, a plain argument or a "
                    "shape changes all the time.",
                    fix="Pass what changes as a tensor, raise multiple_of, or call loss.backward().",
                )
            self._graphs[key] = traced_graphs(one, state, batch, weights_PK, self._compile)
        graphs = self._graphs[key]
        with random_numbers_kept(batch[0].device):
            _, *expected = one.run(state, batch, weights_PK)
        with random_numbers_kept(batch[0].device):
            _, found_PK, held = graphs.norms([*state, *batch])
            found = [found_PK, *graphs.sums(held, weights_PK)]
        half = any(tensor.dtype in {torch.float16, torch.bfloat16} for tensor in [*state, *batch])
        if refuse_difference(expected, found, half=half or torch.is_autocast_enabled(batch[0].device.type)):
            refuse_mixed_order(one, state, batch, weights_PK)
            graphs.verified = True
        return graphs

    def _loss_of(self, tensors: Sequence[bool], values: Sequence[Any], spec: Any, batch: Sequence[Tensor]) -> Tensor:
        given = iter(batch)
        leaves = [next(given) if is_tensor else value for is_tensor, value in zip(tensors, values, strict=True)]
        args, kwargs = pytree.tree_unflatten(leaves, spec)
        return self._loss_fn(*args, **kwargs)


def _rows(leaves: Sequence[Any]) -> int:
    """The size of axis 0 that all tensors have."""
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    sizes = [tuple(tensor.shape[:1]) for tensor in tensors]
    if not sizes or () in sizes or len(set(sizes)) > 1 or any(t.layout is not torch.strided for t in tensors):
        raise BatchMismatchError(
            f"The tensors of a compiled pass must all be dense, with the batch on axis 0; found sizes {sizes}.",
            fix="Let loss_fn read tensors that are no part of the batch from outside.",
        )
    return sizes[0][0]


def _padded(tensor: Tensor, rows: int) -> Tensor:
    """The tensor with its first rows once more behind it."""
    if len(tensor) == rows:
        return tensor.detach()
    return tensor.detach()[torch.arange(rows, device=tensor.device) % len(tensor)]
