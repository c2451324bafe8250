"""Traces a pass into a graph, and splits the graph into three functions.

Note [three functions]: the first function runs when the user calls the model. The user computes the loss, so the
gradients of the outputs are inputs of the second function, which returns norms. The clipping policy, which may be the
user's, computes factors from the norms, and may count samples or draw random numbers. The sums are therefore a third
function, whose input is the factors.

Note [positions]: batches are padded to one size with copies of samples, whose output gradients are zero. The gradient
of padding is then zero, unless the model moves or mixes samples along the batch axis. A nonzero norm of a sample
without an output gradient reveals this; all squared norms are then set to -1 as an error flag.
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

from .tensor_pass import OutputLayout, PassInputs, Results, TensorPass

TRACE_LOCK = threading.RLock()  # no thread may run compiled code while another thread traces
Compile = Callable[[fx.GraphModule, Sequence[Any]], Callable[..., Any]]


@dataclass(frozen=True, eq=False)
class Function:
    """A compiled part of a graph.

    Attributes:
        run: The compiled code.
        argument_indices: Indices of its arguments in the list of tensors; see `Graphs`.
    """

    run: Callable[..., Any]
    argument_indices: Sequence[int]

    def __call__(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        # No lock on GPU: this may run in an autograd thread while the tracing thread, which holds the lock, waits for
        # it (deadlock).
        with TRACE_LOCK if tensors[0].is_cpu else contextlib.nullcontext(), without_autocast_and_tf32():
            return list(self.run(*[tensors[i] for i in self.argument_indices]))


@dataclass(eq=False)
class Graphs:
    """A pass in three functions; see note [three functions].

    Each function appends its results to a list of tensors. In order, the list contains parameters and buffers of the
    model, the tensors of the batch, the outputs and intermediate results of the forward pass, the gradients of the
    outputs, the squared norms and intermediate results of the backward pass, and the weights.

    Attributes:
        outputs: The forward pass.
        norms: The backward pass and the squared norms.
        sums: The weighted sums, one vector for each device and dtype.
        layout: Layout of the output of the model.
        parameters: Names of the parameters that have a gradient.
        draws: Whether the forward pass draws random numbers.
        num_samples: Number of samples.
        verified: Whether the results were compared with those of the hooks.
    """

    outputs: Function
    norms: Function
    sums: Function
    layout: OutputLayout
    parameters: Mapping[nn.Parameter, str]
    draws: bool
    num_samples: int
    verified: bool = False

    def run(self, inputs: PassInputs) -> Results:
        """Runs all three functions."""
        tensors = [*inputs.values, *inputs.batch]
        outputs = self.outputs(tensors)
        tensors += [*outputs, *inputs.grads]
        norms = self.norms(tensors)
        tensors += [*norms, inputs.weights_BK]
        return Results(outputs[: len(self.layout.differentiable)], norms[0], self.sums(tensors))


@contextlib.contextmanager
def without_autocast_and_tf32() -> Iterator[None]:
    """Disables autocast, whose casts are part of the graph, and TF32, which would round sums but not norms."""
    with without_autocast(), full_precision():
        yield


def traced_graphs(
    eager_pass: TensorPass, inputs: PassInputs, layout: OutputLayout, *, draws: bool, compile: Compile
) -> Graphs:
    """Returns the compiled graphs of a pass over tensors of these shapes. Raises if the pass cannot be traced."""
    graph = _traced(eager_pass, inputs)
    constants = [constant for constant in _constants(graph) if constant is not eager_pass.capture.anchor]
    if any(traced(constant) for constant in constants):
        raise UnsupportedLayerError("a layer allocates a workspace buffer during tracing, as recurrent layers do.")
    if any(constant.requires_grad and constant.is_leaf for constant in constants):
        raise UnsupportedLayerError(
            "the model reads a tensor that requires gradients and is not one of its parameters."
        )
    if any(constant.dim() > 0 and len(constant) == eager_pass.num_samples for constant in constants):
        raise UnsupportedLayerError(
            "the model reads a tensor of the length of the batch that is not an argument of the model."
        )
    parts = _GraphPartition(graph, len(layout.differentiable), len(inputs.grads))
    tensors = [*inputs.values, *inputs.batch]
    first = parts.function(0, tensors, compile)
    tensors += first(tensors)
    tensors += inputs.grads
    second = parts.function(1, tensors, compile)
    tensors += second(tensors)
    third = parts.function(2, [*tensors, inputs.weights_BK], compile)
    included = set(eager_pass.included)
    named = {p: name for name, p in eager_pass.capture.tables.parameters().items() if p in included}
    return Graphs(first, second, third, layout, named, draws, eager_pass.num_samples)


def _traced(eager_pass: TensorPass, inputs: PassInputs) -> fx.GraphModule:
    """Returns the graph from parameters, buffers, batch, output gradients and weights to all results."""
    begin, end = len(inputs.values), len(inputs.values) + len(inputs.batch)

    def flat(*tensors: Tensor) -> list[Tensor]:
        results = eager_pass.run(PassInputs(tensors[:begin], tensors[begin:end], tensors[end:-1], tensors[-1]))
        return [*results.outputs, results.sq_norms_BK, *results.sums]

    flat_inputs = [*inputs.values, *inputs.batch, *inputs.grads, inputs.weights_BK]
    trace = lambda function: make_fx(function, tracing_mode="fake", _allow_non_fake_inputs=True)(*flat_inputs)  # noqa: E731
    with torch.compiler.set_stance("force_eager"), torch.no_grad():
        graph = trace(flat)
        # In-place operations would be in the wrong order after the graph is split.
        with without_autocast_and_tf32():
            return trace(torch.func.functionalize(graph))


def _constants(module: fx.GraphModule) -> list[Tensor]:
    values = [getattr(module, node.target, None) for node in module.graph.nodes if node.op == "get_attr"]
    return [value for value in values if isinstance(value, Tensor)]


class _GraphPartition:
    """Partition of a graph into three parts.

    Part 0 has the nodes that the outputs depend on, part 2 those that depend on the weights, and part 1 all others.
    """

    def __init__(self, module: fx.GraphModule, num_outputs: int, num_grads: int):
        self._module = module
        self._nodes = [node for node in module.graph.nodes if node.op != "output"]
        returned = next(node for node in module.graph.nodes if node.op == "output").args[0]
        outputs, self._sq_norms, sums = returned[:num_outputs], returned[num_outputs], returned[num_outputs + 1 :]
        inputs = [node for node in self._nodes if node.op == "placeholder"]
        state_and_batch, grads, weights = inputs[: -1 - num_grads], inputs[-1 - num_grads : -1], inputs[-1]
        self._part = self._assigned(outputs, weights, set(inputs))
        crossing = [self._crossing(part, results) for part, results in ((1, [self._sq_norms]), (2, sums))]
        self._results = [
            self._results_of(0, outputs, [*crossing[0], *crossing[1]]),
            self._results_of(1, [self._sq_norms], crossing[1]),
            list(sums),
        ]
        # Order of the list of tensors. A node that a function returns twice has the index of its first occurrence.
        order = [*state_and_batch, *self._results[0], *grads, *self._results[1], weights]
        self._index = {node: i for i, node in reversed(list(enumerate(order)))}

    def _assigned(self, outputs: Sequence[fx.Node], weights: fx.Node, inputs: set[fx.Node]) -> dict[fx.Node, int]:
        """Assigns a part to each node; -1 to inputs."""
        part = dict.fromkeys(inputs, -1)
        stack = list(outputs)
        while stack:
            node = stack.pop()
            if node not in part:
                part[node] = 0
                stack += node.all_input_nodes
        depends_on_weights = {weights}
        for node in self._nodes:
            if any(argument in depends_on_weights for argument in node.all_input_nodes):
                depends_on_weights.add(node)
            if node not in part:
                # A tuple cannot be a result of a part, so its items belong to the same part.
                item = node.target is operator.getitem and part[node.all_input_nodes[0]] == 0
                part[node] = 0 if item else 2 if node in depends_on_weights else 1
        return part

    def _results_of(self, part: int, first: Sequence[fx.Node], crossing: Iterable[fx.Node]) -> list[fx.Node]:
        others = [node for node in crossing if self._part[node] == part and node not in first]
        return [*first, *dict.fromkeys(others)]

    def _crossing(self, part: int, results: Sequence[fx.Node]) -> list[fx.Node]:
        """Returns the inputs and the nodes of earlier parts whose tensors a part reads."""
        nodes = [node for node in self._nodes if self._part[node] == part]
        stack = [*results, *(argument for node in nodes for argument in node.all_input_nodes)]
        crossing: dict[fx.Node, None] = {}
        seen: set[fx.Node] = set()
        while stack:
            node = stack.pop()
            if node in seen or self._part[node] == part:
                continue
            seen.add(node)
            if self._is_recomputed(node):
                stack += node.all_input_nodes
            else:
                crossing[node] = None
        order = {node: i for i, node in enumerate(self._nodes)}
        return sorted(crossing, key=order.__getitem__)

    @staticmethod
    def _is_recomputed(node: fx.Node) -> bool:
        """Returns True for a constant or a view, which a later part recomputes instead of receiving it."""
        if node.target is operator.getitem:
            node = node.all_input_nodes[0]
        return node.op == "get_attr" or (node.op == "call_function" and getattr(node.target, "is_view", False))

    def function(self, part: int, tensors: Sequence[Tensor], compile: Compile) -> Function:
        """Compiles a part for these tensors."""
        inputs = self._crossing(part, self._results[part])
        graph = fx.Graph()
        copies = {node: graph.placeholder(node.name) for node in inputs}
        for node, copied in copies.items():
            copied.meta = dict(node.meta)
        for node in self._nodes:
            is_needed = self._part[node] == part or (self._part[node] < part and self._is_recomputed(node))
            if node not in copies and is_needed and all(argument in copies for argument in node.all_input_nodes):
                copies[node] = graph.node_copy(node, copies.__getitem__)
        graph.output([copies[node] for node in self._results[part]])
        graph.eliminate_dead_code()
        argument_indices = [self._index[node] for node in inputs]
        module = fx.GraphModule(self._module, graph)
        with torch.no_grad(), without_autocast_and_tf32():
            return Function(compile(module, [tensors[i] for i in argument_indices]), argument_indices)
