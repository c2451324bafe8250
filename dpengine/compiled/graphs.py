"""Tracing one pass into a graph, and cutting it where clipping decides: norms before, sums after.

Note [two graphs]: factors depend on norms by a policy, which may be the user's and which counts and draws. So one
function would have to hold it; instead all that the weights of rows do not reach is the first graph, and the rest the
second.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence, Set
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.fx.experimental.proxy_tensor import make_fx

from dpengine.errors import PrivacyError, UnsupportedLayerError
from dpengine.kernels.library import traced
from dpengine.kernels.precision import full_precision

from .compare import refuse_orders
from .one_pass import OnePass

Compile = Callable[[fx.GraphModule], Callable[..., Any]]
_NO_GRAPH = "Forward, loss and backward cannot be traced as one graph: "
_FIX = "Call loss.backward() instead of the compiled pass."


@dataclass(eq=False)
class Graphs:
    """A pass in two functions.

    Attributes:
        first: From the tensors of model and batch to loss, squared norms, and what ``second`` needs of the pass.
        second: From those of the model and batch that it needs, what ``first`` left, and the weights, to the sums.
        again: Which tensors of model and batch ``second`` needs, by place.
        parameters: Whose sums it gives.
        device: Where.
        verified: Whether they were found to compute what the hooks do.
    """

    first: Callable[..., Any]
    second: Callable[..., Any]
    again: Sequence[int]
    parameters: Set[nn.Parameter]
    device: torch.device
    verified: bool = False

    def norms(self, given: Sequence[Tensor]) -> tuple[Tensor, Tensor, list[Tensor]]:
        """The loss, squared norms ``(B, K)``, and what ``sums`` needs."""
        with _as_traced(self.device):
            loss, sq_norms_BK, *held = self.first(*given)
        return loss, sq_norms_BK, [*(given[i] for i in self.again), *held]

    def sums(self, held: Sequence[Tensor], weights_BK: Tensor) -> list[Tensor]:
        """The weighted sum of gradients for each parameter."""
        with _as_traced(self.device):
            return list(self.second(*held, weights_BK))


@contextlib.contextmanager
def _as_traced(device: torch.device) -> Iterator[None]:
    """Casts of autocast are in the graph already, and would be made twice; TF32 would round sums and not norms."""
    with torch.autocast(device.type, enabled=False), full_precision():
        yield


def traced_graphs(
    one: OnePass, values: Sequence[Tensor], batch: Sequence[Tensor], weights_BK: Tensor, compile: Compile
) -> Graphs:
    """The graphs of a pass over tensors of these shapes."""
    count = len(values)

    def flat(*tensors: Tensor) -> list[Tensor]:
        return one.run(tensors[:count], tensors[count:-1], tensors[-1])

    given = [*values, *batch, weights_BK]
    trace = lambda function: make_fx(function, tracing_mode="fake", _allow_non_fake_inputs=True)(*given)  # noqa: E731
    try:
        with torch.compiler.set_stance("force_eager"), torch.no_grad():
            whole = trace(flat)
            # In-place operations would be in the wrong order once the graph is cut.
            with _as_traced(batch[0].device):
                whole = trace(torch.func.functionalize(whole))
    except Exception as error:  # there is no list of what cannot be traced
        if isinstance(error, PrivacyError):
            raise
        raise UnsupportedLayerError(
            _NO_GRAPH + (str(error) or type(error).__name__).splitlines()[0], fix=_FIX
        ) from error
    if any(traced(constant) for constant in _constants(whole)):
        raise UnsupportedLayerError(_NO_GRAPH + "a layer works in memory of its own, as recurrent ones do.", fix=_FIX)
    constants = [constant for constant in _constants(whole) if constant is not one.capture.anchor]
    if any(constant.requires_grad and constant.is_leaf for constant in constants):
        raise UnsupportedLayerError(
            "The loss reads a tensor that trains and is no parameter of the model; a compiled pass leaves it out.",
            fix="Make it a parameter of the model, or call loss.backward() instead of the compiled pass.",
        )
    if any(constant.dim() > 0 and len(constant) == len(batch[0]) for constant in constants):
        raise UnsupportedLayerError(
            "The loss reads a tensor with as many rows as the batch that is none of its arguments; a graph would keep "
            "this batch's for ever.",
            fix="Pass it as an argument.",
        )
    refuse_orders(whole, len(batch[0]), count, len(batch))
    first, second, again = _cut(whole)
    return Graphs(compile(first), compile(second), again, frozenset(one.took_part), batch[0].device)


def _constants(whole: fx.GraphModule) -> list[Tensor]:
    values = [getattr(whole, node.target, None) for node in whole.graph.nodes if node.op == "get_attr"]
    return [value for value in values if isinstance(value, Tensor)]


def _cut(whole: fx.GraphModule) -> tuple[fx.GraphModule, fx.GraphModule, list[int]]:
    """See note [two graphs]."""
    nodes = list(whole.graph.nodes)
    *inputs, weights = (node for node in nodes if node.op == "placeholder")
    (returned,) = nodes[-1].args
    loss, sq_norms, *sums = returned
    late = {weights}
    for node in nodes[:-1]:
        if any(argument in late for argument in node.all_input_nodes):
            late.add(node)
    needed = {argument for node in late for argument in node.all_input_nodes} | set(sums)
    crossing = [node for node in nodes if node in needed and node not in late and node.op != "get_attr"]
    held = [node for node in crossing if node.op != "placeholder"]
    again = [i for i, node in enumerate(inputs) if node in needed]

    early = [node for node in nodes if node not in late and node.op != "output"]
    first = _graph(whole, inputs, early, [loss, sq_norms, *held])
    constants = [node for node in nodes if node.op == "get_attr" and node in needed]
    entering = [*(inputs[i] for i in again), *held, weights]
    second = _graph(whole, entering, [*constants, *(node for node in nodes if node in late)], sums)
    return first, second, again


def _graph(
    whole: fx.GraphModule, entering: Sequence[fx.Node], nodes: Sequence[fx.Node], leaving: Sequence[fx.Node]
) -> fx.GraphModule:
    graph = fx.Graph()
    new = {node: graph.placeholder(node.name) for node in entering}
    for node, there in new.items():
        there.meta = dict(node.meta)
    for node in nodes:
        if node not in new:
            new[node] = graph.node_copy(node, new.__getitem__)
    graph.output([new[node] for node in leaving])
    graph.eliminate_dead_code()
    return fx.GraphModule(whole, graph)
