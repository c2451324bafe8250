"""CompiledBackward: compiles forward, loss, backward, norms and clipped sums of a batch together.

Axes: B samples, P samples after padding, K groups of parameters that are clipped together.
"""

import math
import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from dpengine.compiled.compare import random_numbers_kept, refuse_difference, refuse_mixed_order
from dpengine.compiled.compiled_pass import Done, autocast_key, kind_of, model_key, plain_arguments
from dpengine.compiled.graphs import Graphs, traced_graphs
from dpengine.compiled.one_pass import OnePass
from dpengine.errors import BatchMismatchError, UnsupportedLayerError

from .pass_clipper import PassClipper, RecordedPass

Loss = Callable[..., Tensor]

_MOST_GRAPHS = 64
_one_at_a_time = threading.RLock()  # no thread may run compiled code while another one traces


class CompiledBackward:
    """Compiled equivalent of ``loss = loss_fn(*batch); loss.backward()``: call ``loss = backward(*batch)``.

    Batches for which the independence probe is due, such as the first, and batches with a non-finite per-sample
    gradient use the hooks, as without compilation. Other batches are padded with copies of their samples, because a
    graph is compiled for every size. Padding does not contribute to gradients, but the returned loss includes it. Every
    graph is compared with the hooks on the first batches.

    Args:
        passes: Clips the passes of the model, to which it is attached.
        loss_fn: The loss of a batch, a sum or mean over samples in their order. It calls the model. Values that it
            reads besides its arguments, the model's parameters, buffers and settings, and torch's random numbers are
            fixed when it is traced.
        multiple_of: Batches are padded to a multiple of this.
        backend: Backend of ``torch.compile``, by name or as a function.
    """

    def __init__(
        self, passes: PassClipper, loss_fn: Loss, *, multiple_of: int, backend: str | Callable[..., Any] = "inductor"
    ):
        _check_all_parameters(passes)
        self._passes = passes
        self._loss_fn = loss_fn
        self._multiple_of = multiple_of
        options = {"fallback_random": True} if backend == "inductor" else None  # so that dropout can be compared
        self._compile = partial(torch.compile, backend=backend, fullgraph=True, dynamic=False, options=options)
        self._graphs: dict[object, Graphs] = {}

    def __call__(self, *args: Any, **kwargs: Any) -> Tensor:
        """Runs forward, loss and clipped backward pass over one batch, and returns the detached loss.

        Raises BatchMismatchError if tensors differ in the size of axis 0, and UnsupportedLayerError if the pass cannot
        be traced or compiled code does not match the hooks.
        """
        _check_all_parameters(self._passes)
        with _one_at_a_time:
            return self._pass(args, kwargs)

    def _pass(self, args: Any, kwargs: Any) -> Tensor:
        leaves, spec = pytree.tree_flatten((args, kwargs))
        rows, passes = _rows(leaves), self._passes
        if passes.capture.replay is not None and passes.capture.replay.loop is not None:
            passes.capture.replay.loop.close()  # the graphs are checked in another way, and a record runs uncompiled
        if rows == 0 or not passes.capture.watching or passes.probe.due:
            return self._by_hooks(args, kwargs)
        passes.capture.restore()  # if an interrupt ended the last pass before its hooks
        passes.capture.begin(rows)
        padded = math.ceil(rows / self._multiple_of) * self._multiple_of
        batch = [_padded(leaf, padded) for leaf in leaves if isinstance(leaf, Tensor)]
        with torch.no_grad():
            graphs, state = self._graphs_for(batch, leaves, spec)
            if not graphs.verified:
                return self._by_hooks(args, kwargs)
            loss, sq_norms_PK, held = graphs.norms([*state, *batch])
            mean = passes.loss_reduction == "mean"
            if not bool((sq_norms_PK * float(padded if mean else 1) ** 2).isfinite().all()):
                return self._by_hooks(args, kwargs)
        named = {name: parameter for name, parameter in passes.trainable().items() if parameter in graphs.parameters}
        done = Done(graphs, held, sq_norms_PK, rows, padded / rows if mean else 1.0, named)
        passes.report(RecordedPass(done, mean_loss=mean))
        return loss

    def _by_hooks(self, args: Any, kwargs: Any) -> Tensor:
        with torch.enable_grad():
            loss = self._loss_fn(*args, **kwargs)
            loss.backward()
        return loss.detach()

    def _graphs_for(self, batch: Sequence[Tensor], leaves: Sequence[Any], spec: Any) -> tuple[Graphs, list[Tensor]]:
        """Returns the graphs for a batch, and the model's state in the order of their arguments."""
        others = plain_arguments(leaves)
        grouping = self._passes.grouping()
        groups, num_groups = grouping.group_of, grouping.count
        values = [None if other is None else other[1] for other in others]
        tensors = [isinstance(leaf, Tensor) for leaf in leaves]
        one = OnePass(self._passes.capture, partial(self._loss_of, tensors, values, spec), groups, num_groups)
        state, device = one.state(), batch[0].device
        call = (others, repr(spec), tuple(map(kind_of, batch)), autocast_key(device))
        key = (call, model_key(self._passes.model, state), tuple(groups.values()))
        state = [tensor.detach() for tensor in state]
        graphs = self._graphs.get(key)
        if graphs is None or not graphs.verified:
            graphs = self._checked(key, one, state, batch, num_groups)
        return graphs, state

    def _checked(
        self, key: object, one: OnePass, state: list[Tensor], batch: Sequence[Tensor], num_groups: int
    ) -> Graphs:
        """Returns the graphs for a key, compared with the hooks as far as this batch allows."""
        weights_PK = torch.rand(len(batch[0]), num_groups, dtype=torch.float64, device=batch[0].device)
        if key not in self._graphs:
            if len(self._graphs) >= _MOST_GRAPHS:
                raise UnsupportedLayerError(
                    f"More than {_MOST_GRAPHS} graphs were compiled: a setting of the model, a plain argument or a "
                    "shape changes repeatedly.",
                    fix="Pass changing values as tensors, increase multiple_of, or call loss.backward().",
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


def _check_all_parameters(passes: PassClipper) -> None:
    """Raises if only some parameters are clipped: a graph forms the norms of all of them."""
    if passes.only is not None:
        raise UnsupportedLayerError(
            "A compiled pass clips all parameters, and this run was restricted by restrict_to_optimizer.",
            fix="Call loss.backward() instead.",
        )


def _rows(leaves: Sequence[Any]) -> int:
    """Returns the common size of axis 0 of all tensors."""
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    sizes = [tuple(tensor.shape[:1]) for tensor in tensors]
    if not sizes or () in sizes or len(set(sizes)) > 1 or any(t.layout is not torch.strided for t in tensors):
        raise BatchMismatchError(
            f"The tensors of a compiled pass must all be dense, with the batch on axis 0; found sizes {sizes}.",
            fix="Do not pass other tensors as arguments: read them inside loss_fn.",
        )
    return sizes[0][0]


def _padded(tensor: Tensor, rows: int) -> Tensor:
    """Returns the tensor, padded with its first rows."""
    if len(tensor) == rows:
        return tensor.detach()
    return tensor.detach()[torch.arange(rows, device=tensor.device) % len(tensor)]
