"""Tracing one pass into a graph, and cutting it into three functions.

Note [three functions]: the forward part runs in the call of the model, and the loss is the user's own, so the gradients
of the outputs are inputs of the second function. It gives norms. Factors depend on norms by a policy, which may be the
user's, and which counts and draws. So the sums are a third function, of the weights.

Note [places]: batches are padded to one size with copies of samples, whose output gradients are zero. So they have no
gradient, as long as row i of the outputs depends on row i of what the layers see. A model that moves samples to other
places inside would show its norms in places of padding. So if a sample without an output gradient has a norm, all
squared norms are -1.
"""

from __future__ import annotations

import contextlib
import operator
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.fx.experimental.proxy_tensor import make_fx

from dpengine.errors import UnsupportedLayerError
from dpengine.kernels.library import traced
from dpengine.kernels.precision import full_precision, without_autocast

from .one_pass import OnePass, OutputLayout, Results

ONE_AT_A_TIME = threading.RLock()  # no thread may run compiled code while another one traces
Compile = Callable[[fx.GraphModule, Sequence[Any]], Callable[..., Any]]


@dataclass(frozen=True, eq=False)
class Function:
    """A part of a graph, compiled.

    Attributes:
        run: The code.
        takes: Its arguments, as places in the list of all tensors so far.
    """

    run: Callable[..., Any]
    takes: Sequence[int]

    def __call__(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        # On a GPU this may be autograd's thread, for which a thread that traces may wait.
        with ONE_AT_A_TIME if tensors[0].is_cpu else contextlib.nullcontext(), as_traced():
            return list(self.run(*[tensors[i] for i in self.takes]))


@dataclass(eq=False)
class Graphs:
    """A pass in three functions; see note [three functions].

    Each adds its results to a list of tensors: parameters and buffers of the model and the tensors of the batch,
    the outputs and what ``norms`` and ``sums`` need of the forward pass, then the gradients of the outputs, squared
    norms and what ``sums`` needs of these, then the weights.

    Attributes:
        outputs: The forward pass.
        norms: The backward pass and the squared norms.
        sums: The weighted sums, one vector for each device and dtype.
        layout: Layout of the output of the model.
        parameters: The parameters that have a gradient, with their names.
        draws: Whether the forward pass draws random numbers.
        rows: Number of samples.
        verified: Whether they were found to compute what the hooks do.
    """

    outputs: Function
    norms: Function
    sums: Function
    layout: OutputLayout
    parameters: Mapping[nn.Parameter, str]
    draws: bool
    rows: int
    verified: bool = False

    def run(
        self, state: Sequence[Tensor], batch: Sequence[Tensor], grads: Sequence[Tensor], weights_PK: Tensor
    ) -> Results:
        """Runs the whole pass."""
        tensors = [*state, *batch]
        outputs = self.outputs(tensors)
        tensors += [*outputs, *grads]
        norms = self.norms(tensors)
        tensors += [*norms, weights_PK]
        return Results(outputs[: len(self.layout.differentiable)], norms[0], self.sums(tensors))


@contextlib.contextmanager
def as_traced() -> Iterator[None]:
    """Switches off autocast, whose casts are in the graph, and TF32, which would round sums and not norms."""
    with without_autocast(), full_precision():
        yield


def traced_graphs(
    one: OnePass,
    values: Sequence[Tensor],
    batch: Sequence[Tensor],
    layout: OutputLayout,
    grads: Sequence[Tensor],
    weights_BK: Tensor,
    *,
    rows: int,
    draws: bool,
    compile: Compile,
) -> Graphs:
    """Returns the compiled graphs of a pass over tensors of these shapes. Raises if it cannot be traced."""
    whole = _traced(one, values, batch, grads, weights_BK)
    constants = [constant for constant in _constants(whole) if constant is not one.capture.anchor]
    if any(traced(constant) for constant in constants):
        raise UnsupportedLayerError("a layer works in memory of its own, as recurrent ones do.")
    if any(constant.requires_grad and constant.is_leaf for constant in constants):
        raise UnsupportedLayerError("the model reads a tensor that requires gradients and is no parameter of it.")
    if any(constant.dim() > 0 and len(constant) == rows for constant in constants):
        raise UnsupportedLayerError(
            "the model reads a tensor with as many rows as the batch that is none of its arguments."
        )
    parts = _Parts(whole, len(layout.differentiable), len(grads))
    tensors = [*values, *batch]
    first = parts.function(0, tensors, compile)
    tensors += first(tensors)
    tensors += grads
    second = parts.function(1, tensors, compile)
    tensors += second(tensors)
    third = parts.function(2, [*tensors, weights_BK], compile)
    part = set(one.took_part)
    named = {p: name for name, p in one.capture.tables.parameters().items() if p in part}
    return Graphs(first, second, third, layout, named, draws, rows)


def _traced(
    one: OnePass, values: Sequence[Tensor], batch: Sequence[Tensor], grads: Sequence[Tensor], weights_BK: Tensor
) -> fx.GraphModule:
    """Returns the graph from parameters, buffers, batch, output gradients and weights to all results."""
    begin, end = len(values), len(values) + len(batch)

    def flat(*tensors: Tensor) -> list[Tensor]:
        results = one.run(tensors[:begin], tensors[begin:end], tensors[end:-1], tensors[-1])
        return [*results.outputs, results.sq_norms_BK, *results.sums]

    given = [*values, *batch, *grads, weights_BK]
    trace = lambda function: make_fx(function, tracing_mode="fake", _allow_non_fake_inputs=True)(*given)  # noqa: E731
    with torch.compiler.set_stance("force_eager"), torch.no_grad():
        whole = trace(flat)
        # In-place operations would be in the wrong order once the graph is cut.
        with as_traced():
            return trace(torch.func.functionalize(whole))


def _constants(whole: fx.GraphModule) -> list[Tensor]:
    values = [getattr(whole, node.target, None) for node in whole.graph.nodes if node.op == "get_attr"]
    return [value for value in values if isinstance(value, Tensor)]


class _Parts:
    """The parts of a graph: 0 has what the outputs need, 2 what the weights reach, and 1 the rest."""

    def __init__(self, whole: fx.GraphModule, num_outputs: int, num_grads: int):
        self._whole = whole
        self._nodes = [node for node in whole.graph.nodes if node.op != "output"]
        returned = next(node for node in whole.graph.nodes if node.op == "output").args[0]
        outputs, self._sq_norms, sums = returned[:num_outputs], returned[num_outputs], returned[num_outputs + 1 :]
        inputs = [node for node in self._nodes if node.op == "placeholder"]
        given, grads, weights = inputs[: -1 - num_grads], inputs[-1 - num_grads : -1], inputs[-1]
        self._part = self._assigned(outputs, weights, set(inputs))
        crossing = [self._crossing(part, leaving) for part, leaving in ((1, [self._sq_norms]), (2, sums))]
        self._leaving = [
            self._left(0, outputs, [*crossing[0], *crossing[1]]),
            self._left(1, [self._sq_norms], crossing[1]),
            list(sums),
        ]
        # The list of all tensors; what a function returns twice is found at its first place.
        order = [*given, *self._leaving[0], *grads, *self._leaving[1], weights]
        self._place = {node: i for i, node in reversed(list(enumerate(order)))}

    def _assigned(self, outputs: Sequence[fx.Node], weights: fx.Node, inputs: set[fx.Node]) -> dict[fx.Node, int]:
        part = dict.fromkeys(inputs, -1)
        todo = list(outputs)
        while todo:
            node = todo.pop()
            if node not in part:
                part[node] = 0
                todo += node.all_input_nodes
        late = {weights}
        for node in self._nodes:
            if any(argument in late for argument in node.all_input_nodes):
                late.add(node)
            if node not in part:
                # A tuple does not leave its part, so its items are taken there.
                item = node.target is operator.getitem and part[node.all_input_nodes[0]] == 0
                part[node] = 0 if item else 2 if node in late else 1
        return part

    def _left(self, part: int, first: Sequence[fx.Node], crossing: Iterable[fx.Node]) -> list[fx.Node]:
        held = [node for node in crossing if self._part[node] == part and node not in first]
        return [*first, *dict.fromkeys(held)]

    def _crossing(self, part: int, leaving: Sequence[fx.Node]) -> list[fx.Node]:
        """Returns the nodes of earlier parts, and the inputs, whose tensors a part needs."""
        own = [node for node in self._nodes if self._part[node] == part]
        todo = [*leaving, *(argument for node in own for argument in node.all_input_nodes)]
        found: dict[fx.Node, None] = {}
        seen: set[fx.Node] = set()
        while todo:
            node = todo.pop()
            if node in seen or self._part[node] == part:
                continue
            seen.add(node)
            if self._again(node):
                todo += node.all_input_nodes
            else:
                found[node] = None
        order = {node: i for i, node in enumerate(self._nodes)}
        return sorted(found, key=order.__getitem__)

    @staticmethod
    def _again(node: fx.Node) -> bool:
        """Returns True if a later part does this again: a constant, or a view, which would be an output of its own."""
        if node.target is operator.getitem:
            node = node.all_input_nodes[0]
        return node.op == "get_attr" or (node.op == "call_function" and getattr(node.target, "is_view", False))

    def function(self, part: int, tensors: Sequence[Tensor], compile: Compile) -> Function:
        """Returns a part, compiled for these tensors."""
        entering = self._crossing(part, self._leaving[part])
        graph = fx.Graph()
        new = {node: graph.placeholder(node.name) for node in entering}
        for node, there in new.items():
            there.meta = dict(node.meta)
        for node in self._nodes:
            if node not in new and (self._part[node] == part or (self._part[node] < part and self._again(node))):
                if all(argument in new for argument in node.all_input_nodes):
                    new[node] = graph.node_copy(node, new.__getitem__)
        graph.output([new[node] for node in self._leaving[part]])
        graph.eliminate_dead_code()
        takes = [self._place[node] for node in entering]
        module = fx.GraphModule(self._whole, graph)
        with torch.no_grad(), as_traced():
            return Function(compile(module, [tensors[i] for i in takes]), takes)
