"""CompiledForward: compiles the forward pass, the backward pass, the norms and the clipped sums of a model.

Axes: B samples, P samples after padding, K groups of parameters that are clipped together.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from dpengine.capture.forward_state import ForwardState
from dpengine.capture.model_state import ModelState
from dpengine.capture.on_modules import ReplacedForward
from dpengine.compiled.compare import check_equal_outputs, check_equal_results, fixed_random_numbers
from dpengine.compiled.compiled_pass import CompiledPass, CompiledPassFunction, called_twice, padded
from dpengine.compiled.graphs import TRACE_LOCK, Compile, Graphs, traced_graphs
from dpengine.compiled.settings import ModelSettings, autocast_key, static_arguments
from dpengine.compiled.tensor_pass import OutputLayout, PassInputs, TensorPass
from dpengine.errors import UnsupportedLayerError, notice
from dpengine.grad_modes.bookkeep import BookKeeping

from .pass_clipper import PassClipper

_MAX_GRAPHS = 8  # maximum number of compiled graphs
_MAX_LARGER_BATCHES = 8  # number of batches above the padded size after which a notice is given
_MAX_REASON_LENGTH = 300  # maximum number of characters of an error that a notice quotes
_ONE_TENSOR = pytree.tree_flatten(((0,), {}))[1]
_UNKNOWN: Any = object()
_DEVIATIONS = 2  # standard deviations added to the expected size of a Poisson batch; 2 % of batches are larger
_FIXED_SIZES = {"fixed-size", "shuffle", "external"}


@dataclass(frozen=True)
class _Call:
    """The arguments of a call of the model.

    Attributes:
        tensors: The tensors, without padding.
        batched: For each tensor, True if axis 0 is the batch.
        others: All leaves, with None in place of each tensor.
        spec: Nesting of all leaves.
    """

    tensors: list[Tensor]
    batched: list[bool]
    others: tuple[Any, ...]
    spec: Any

    @classmethod
    def of(cls, args: Any, kwargs: Any, samples: int) -> _Call:
        """Reads the arguments of a call with this number of samples."""
        if len(args) == 1 and not kwargs and type(args[0]) is Tensor:
            leaves, spec, others = [args[0]], _ONE_TENSOR, (None,)
        else:
            leaves, spec = pytree.tree_flatten((args, kwargs))
            others = static_arguments(leaves)
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        if any(type(tensor) is not Tensor or tensor.layout is not torch.strided for tensor in tensors):
            raise UnsupportedLayerError("an argument of the model is not a dense tensor.")
        if any(tensor.requires_grad for tensor in tensors):
            raise UnsupportedLayerError("an input of the model requires gradients.")
        batched = [tensor.dim() > 0 and len(tensor) == samples for tensor in tensors]
        if not any(batched):
            raise UnsupportedLayerError("no argument of the model has the batch on axis 0.")
        return cls([tensor.contiguous() for tensor in tensors], batched, others, spec)

    @property
    def key(self) -> object:
        """Value that is equal for calls that can use the same graph."""
        kinds = [(t.shape[b:], t.dtype, t.device, b) for t, b in zip(self.tensors, self.batched, strict=True)]
        spec = None if self.spec is _ONE_TENSOR else repr(self.spec)
        return tuple(kinds), self.others, spec, autocast_key(self.tensors[0].device)

    def run(self, forward: Callable[..., Any], tensors: Sequence[Tensor]) -> Any:
        """Calls a function with the arguments of this call, with its tensors replaced by ``tensors``."""
        remaining = iter(tensors)
        leaves = [next(remaining) if other is None else other[1] for other in self.others]
        args, kwargs = pytree.tree_unflatten(leaves, self.spec)
        outputs = forward(*args, **kwargs)
        if self.spec is not _ONE_TENSOR:
            after, spec = pytree.tree_flatten((args, kwargs))
            if spec != self.spec or any(a is not b for a, b in zip(after, leaves, strict=True)):
                raise UnsupportedLayerError("the forward pass changes its arguments.")
        return outputs


class CompiledForward(ReplacedForward):
    """Replaces the ``forward`` of a model by a compiled one, whose backward pass computes norms and clipped sums.

    Uses the hooks instead if an independence check is due, if a batch is larger than the padded size, or if the
    model cannot be compiled. In the last case a notice states the reason.

    Args:
        passes: Clips the passes of the model.
        padded_size: Number of samples to which batches are padded.
        compile: Compiles a graph for example inputs.
    """

    def __init__(self, passes: PassClipper, padded_size: int, compile: Compile):
        super().__init__(passes.model)
        self._passes = passes
        self._padded_size = padded_size
        self._compile = compile
        self._settings: ModelSettings | None = None
        self._grouping: Any = None
        self._graphs: dict[object, Graphs | None] = {}  # by `_Call.key`, for current settings; None: use the hooks
        self._all_graphs: dict[object, dict[object, Graphs | None]] = {}  # by settings and groups
        self._count = self._larger = 0  # number of compiled graphs, and of batches above the padded size
        self._disabled = False  # True if all further calls use the hooks
        self._probed: list[Any] | None = None  # model calls in the last pass, if an independence check ran it
        self._uncompiled = torch.compiler.disable(self._call, recursive=True)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the model."""
        if torch.compiler.is_compiling():
            return self._uncompiled(args, kwargs)
        return self._call(args, kwargs)

    def _call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        passes, capture = self._passes, self._passes.capture
        # False for calls other than model(...), and for recomputation in a backward pass.
        called = capture.inputs is not None and torch._C._current_graph_task_id() == -1
        if self._disabled or not called or not capture.recording or capture.rerunning or not capture.rows:
            return self.forward(*args, **kwargs)
        if capture.replay is not None or capture.choice is not None or type(passes.mode) is not BookKeeping:
            self._probed = None if capture.replay is None else capture.replay.reached
            return self.forward(*args, **kwargs)
        with TRACE_LOCK:
            compiled = self._compiled_pass(args, kwargs, capture.rows)
            if compiled is None:
                return self.forward(*args, **kwargs)
            outputs = CompiledPassFunction.apply(capture.anchor, compiled)
        return compiled.graphs.layout.unflatten(outputs)

    def _compiled_pass(self, args: Any, kwargs: Any, samples: int) -> CompiledPass | None:
        """Returns the compiled pass over a batch; None if the batch must use the hooks."""
        probed, self._probed = self._probed, None
        if probed is not None and len(probed) > 1:
            self._disabled = True
            self._notice("the model is called more than once before a backward pass.")
            return None
        if samples > self._padded_size:
            self._larger += 1
            if self._larger == _MAX_LARGER_BATCHES and not self._count:
                self._notice(
                    f"batches have more than {self._padded_size} samples. Pass physical_batch_size={self._padded_size}."
                )
            return None
        key = None
        try:
            call = _Call.of(args, kwargs, samples)
            settings = self._select_graphs()
            key = call.key
            graphs = self._graphs.get(key, _UNKNOWN)
            if graphs is _UNKNOWN or (graphs is not None and not graphs.verified):
                graphs = self._verified_graphs(key, call, settings, samples)
        except Exception as error:  # tracing and compilation may raise any error
            if key is not None:
                self._graphs[key] = None
            self._notice(" ".join((str(error) or type(error).__name__).split())[:_MAX_REASON_LENGTH])
            return None
        if graphs is None or not graphs.verified:
            return None
        batch = [padded(t, self._padded_size) if b else t for t, b in zip(call.tensors, call.batched, strict=True)]
        return CompiledPass(graphs, settings.state, batch, call.batched, samples, self._on_backward)

    def _on_backward(self, compiled: CompiledPass) -> None:
        if self._passes.pending:
            raise called_twice()
        self._passes.capture.streams.note(compiled.sq_norms_PK)
        self._passes.replace_mode(compiled)

    def _notice(self, reason: str) -> None:
        notice("DPE029", f"Steps run without compilation: {reason}", key=reason, of=self.module)

    def _select_graphs(self) -> ModelSettings:
        """Selects the graphs for the settings of the model and the groups of its parameters."""
        grouping, settings = self._passes.grouping(), self._settings
        if settings is None or grouping is not self._grouping or not settings.unchanged():
            settings, self._settings = ModelSettings(self._passes.capture), None
            number = {tensor: i for i, tensor in enumerate(settings.state)}
            groups = tuple((number[parameter], group) for parameter, group in grouping.group_of.items())
            self._graphs = self._all_graphs.setdefault((settings.key, groups), {})
            self._settings, self._grouping = settings, grouping
        settings.check_no_hooks()
        return settings

    def _verified_graphs(self, key: object, call: _Call, settings: ModelSettings, samples: int) -> Graphs:
        """Returns the graphs for a call, and compares them with the hooks. ``verified`` is set if they are equal."""
        size, device = self._padded_size, call.tensors[0].device
        batch = [padded(t, size).clone() if b else t.clone() for t, b in zip(call.tensors, call.batched, strict=True)]
        grouping = self._passes.grouping()
        eager_pass = TensorPass(
            self._passes.capture,
            partial(call.run, self.forward),
            settings.state,
            grouping.group_of,
            grouping.count,
            size,
        )
        state = [tensor.detach() for tensor in settings.state]
        with torch.no_grad(), fixed_random_numbers(device), _restored(self.module):
            initial = ForwardState.now([*batch, *state])
            layout, outputs = eager_pass.layout(state, batch)
            draws = initial.has_drawn()
            if initial.host_has_drawn():
                raise UnsupportedLayerError("the model draws random numbers of Python or NumPy.")
            if any(output.dim() == 0 or len(output) != size for output in outputs) or not any(layout.differentiable):
                raise UnsupportedLayerError("an output of the model does not have the batch on axis 0.")
            differentiable = [o for o, has_grad in zip(outputs, layout.differentiable, strict=True) if has_grad]
            grads = [torch.randn_like(o, memory_format=torch.contiguous_format) for o in differentiable]
            for grad in grads:
                grad[min(samples, max(size - 1, 1)) :] = 0  # so that gradients of a wrong sample are detected
            weights_PK = torch.rand(size, grouping.count, dtype=torch.float64, device=device)
            inputs = PassInputs(state, batch, grads, weights_PK)
            if key not in self._graphs:
                self._graphs[key] = self._new_graphs(eager_pass, inputs, layout, draws)
            graphs = self._graphs[key]
            assert graphs is not None
            self._verify(graphs, eager_pass, inputs, call, samples)
        return graphs

    def _new_graphs(self, eager_pass: TensorPass, inputs: PassInputs, layout: OutputLayout, draws: bool) -> Graphs:
        if self._count == _MAX_GRAPHS:
            self._disabled = True
            raise UnsupportedLayerError(
                f"more than {_MAX_GRAPHS} graphs would be needed: a setting of the model, a non-tensor argument or a "
                "shape changes repeatedly. Pass changing values as tensors, and pad all batches to one length."
            )
        self._count += 1
        return traced_graphs(eager_pass, inputs, layout, draws=draws, compile=self._compile)

    def _verify(self, graphs: Graphs, eager_pass: TensorPass, inputs: PassInputs, call: _Call, samples: int) -> None:
        """Compares a compiled pass with the hooks. Raises UnsupportedLayerError if they differ."""
        device = inputs.batch[0].device
        with fixed_random_numbers(device):
            expected = eager_pass.run(inputs)
        with fixed_random_numbers(device):
            compiled = graphs.run(inputs)
        half = any(tensor.dtype in {torch.float16, torch.bfloat16} for tensor in [*inputs.values, *inputs.batch])
        half = half or torch.is_autocast_enabled(device.type)
        if not check_equal_results(expected, compiled, half=half):
            return
        fewer = samples if samples < self._padded_size else samples // 2
        if fewer:
            smaller = [t[:fewer].clone() if b else t for t, b in zip(call.tensors, call.batched, strict=True)]
            layout, outputs = replace(eager_pass, num_samples=fewer).layout(inputs.values, smaller)
            if (layout.spec, layout.leaves) != (graphs.layout.spec, graphs.layout.leaves):
                raise UnsupportedLayerError("the structure of the model's output depends on the number of samples.")
            check_equal_outputs(outputs, [out[:fewer] for out in compiled.outputs], half=half, drawn=graphs.draws)
        graphs.verified = True


@contextlib.contextmanager
def _restored(model: nn.Module) -> Iterator[None]:
    """Restores the state of a model on exit. Disables the user's hooks on tensors saved for backward."""
    state = ModelState.of(model)
    try:
        with torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor):
            yield
    finally:
        state.restore()


def padded_size_for(sampling: Any, physical_batch_size: int | None, accumulation_steps: int) -> int:
    """Returns the number of samples to which batches are padded, which fits nearly all batches of a scheme."""
    expected = sampling.expected_batch_size
    margin = 0.0 if sampling.name in _FIXED_SIZES else _DEVIATIONS * math.sqrt(expected)
    size = math.ceil((expected + margin) / accumulation_steps)
    return max(1, size if physical_batch_size is None else min(size, physical_batch_size))


def compiler_for(backend: Any) -> Compile:
    """Returns the function that compiles graphs, for the value of ``make_private(compile=...)``."""
    if backend is True or backend == "inductor":
        return _inductor
    return lambda graph, _: torch.compile(graph, backend=backend, fullgraph=True, dynamic=False)


def _inductor(graph: torch.fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
    patches: dict[str, Any] = {"fallback_random": True}  # makes dropout comparable with the hooks
    if all(tensor.device.type == "cpu" for tensor in inputs):
        patches["cpp_wrapper"] = True  # calling kernels from C++ takes half as long as from Python
    try:
        from torch._inductor import standalone_compile  # the import takes a second
    except ImportError:  # before torch 2.8
        return torch.compile(graph, fullgraph=True, dynamic=False, options=patches)
    options = {"config_patches": patches}
    return standalone_compile(graph, list(inputs), dynamic_shapes="from_example_inputs", options=options)
