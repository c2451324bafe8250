"""Runs the forward pass of a module on each sample separately, if the module draws random numbers or returns a loss.

Note [random numbers]: a batch draws its random numbers in a different order than samples that run separately. A module
that draws random numbers therefore also runs each sample separately in the forward pass, and the loss is computed from
these outputs. The replay in the backward pass starts from the same state of the random generators. It uses the same
chunks and the same method, so it draws the same numbers.

Note [loss inside]: a model that returns one number for the batch does not return the losses of its samples. If it runs
each sample separately, it returns the loss of each sample. The caller gets their mean, or their sum if the loss
reduction is declared to be a sum.

Note [pullback]: `torch.func.vjp` in `vmap` returns the outputs of the samples, and a function that computes their
gradients from the activations that it stores (a pullback). If a replay gave the same outputs as the batch, the model
uses pullbacks in later steps, so that the backward pass does not run the model again. A pullback contains tensors of
the level of its `vmap`, and is called in another `vmap` of the same level. It uses copies of parameters, buffers and
inputs, so later writes to them do not change the gradients. The first gradients are compared with those of a replay.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.func import vmap
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.modules.module import _has_any_global_hook
from torch.utils import _pytree as pytree

from dpengine.capture.forward_state import ForwardState
from dpengine.capture.model_state import Attributes, ModelState, attributes_kept, attributes_of, preserve_modes
from dpengine.capture.record import ForwardCall
from dpengine.errors import BatchDependentLossError
from dpengine.kernels.library import traced

from .batch_inputs import BatchInputs, batch_size_of, convert_axis_order
from .pullback_module import PullbackModule

CHUNK_BYTES = 256 * 2**20  # maximum size of the per-sample gradients in one vectorized run
TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-3}  # of outputs of samples that run separately
HALF_PRECISION_TOLERANCE = 0.05
_SIMPLE_TYPES = (bool, int, float, str, torch.dtype, torch.device)
_TENSOR = object()
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_MAX_COMPARED_SAMPLES = 4  # samples that are compared with the batch
_MAX_STORED_RUNS = 2  # vectorized runs whose activations are stored


def chunk_size_for(parameters: Iterable[Tensor], batch_size: int) -> int:
    """Returns the number of samples in one vectorized run."""
    bytes_per_sample = sum(p.numel() * p.element_size() for p in parameters)
    return min(batch_size, max(1, CHUNK_BYTES // max(1, bytes_per_sample)))


@dataclass(frozen=True, eq=False)
class PerSampleRun:
    """Record of a forward pass that ran each sample separately.

    Attributes:
        state: State of random generators and autocast before the pass.
        chunk_size: Number of samples in one vectorized run; 0 if the samples ran in a loop.
        scalar_outputs: Indices of the output leaves that are one number per batch, of which the pass returns one per
            sample.
        pullbacks: For each vectorized run, the function that maps gradients of the floating-point leaves of the output
            to gradients of the parameters. Empty if the backward pass must run the samples again. See note [pullback].
    """

    state: ForwardState
    chunk_size: int
    scalar_outputs: tuple[int, ...]
    pullbacks: list[Callable[..., tuple[dict[str, Tensor]]]] = field(default_factory=list)

    def gradients(self, grads: list[Tensor]) -> dict[str, Tensor]:
        """Returns the gradients of the parameters, and frees the activations. May be called once."""
        parts = []
        for chunk in zip(*[grad.unsqueeze(1).split(self.chunk_size) for grad in grads], strict=True):
            pullback = partial(self.pullbacks.pop(0), retain_graph=False, create_graph=False)
            parts.append(vmap(pullback)(list(chunk))[0])
        columns = ((name, [part.pop(name) for part in parts]) for name in list(parts[0]))  # frees each part
        return {name.removeprefix("layer."): torch.cat(gs) if len(gs) > 1 else gs[0] for name, gs in columns}

    def reduce_losses(self, output: Any, *, mean: bool) -> Any:
        """Returns the output with the per-sample losses reduced to one number. See note [loss inside]."""
        leaves, spec = pytree.tree_flatten(output)
        for index in self.scalar_outputs:
            leaves[index] = leaves[index].mean() if mean else leaves[index].sum()
        return pytree.tree_unflatten(leaves, spec) if self.scalar_outputs else output


class PerSampleForward:
    """Runs a module on each sample separately, from the first call in which it draws random numbers or returns a loss.

    A model that can store a pullback also runs each sample separately; see note [pullback].

    Attributes:
        vectorizes: False if vmap cannot run the module.
        layout: `BatchInputs.layout` of the last batch in which separate runs of the samples gave the same outputs; None
            if there is none.
        largest_batch_size: Size of the largest such batch. The model may still mix the samples of larger batches.
        stores_pullbacks: False if the model cannot store a pullback.
        pullback_verified: True if gradients of a pullback were equal to those of a replay.
    """

    def __init__(self) -> None:
        self.vectorizes = True
        self.layout: tuple[Any, list[int]] | None = None
        self.largest_batch_size = 0
        self.stores_pullbacks, self.pullback_verified = True, False
        self._attributes: Attributes = {}  # before the first call
        # Index of an input with a batch axis; None if the module runs on the batch.
        self._batch_index: int | None = None

    def __call__(self, call: ForwardCall) -> tuple[Any, PerSampleRun | None]:
        """Returns the output of a call, and a record of the pass; None if the module ran on the batch."""
        order = {"batch_first": call.batch_first}
        args, kwargs = pytree.tree_map(lambda leaf: convert_axis_order(leaf, **order), (call.args, dict(call.kwargs)))
        leaves = pytree.tree_leaves((args, kwargs))
        state = ForwardState.now([t for t in (*leaves, *call.parameters.values()) if isinstance(t, Tensor)])
        if self.layout is not None and self.stores_pullbacks:
            stored = self._with_pullback(call, args, kwargs, state)
            if stored is not None:
                return stored
        ran_on_batch = self._batch_index is None  # in all earlier calls
        if ran_on_batch:
            self._attributes = self._attributes or attributes_of(call.layer)
            output = call.forward(*call.args, **call.kwargs)
            returns_loss = not call.name and any(map(_is_scalar, pytree.tree_leaves(output)))
            if returns_loss or state.has_drawn():
                self._batch_index = _batched_input_index(leaves, output, call.batch_first)
        if (index := self._batch_index) is None:
            return output, None
        batch_size = batch_size_of(leaves[index]) or 0
        if batch_size == 0:
            return call.forward(*call.args, **call.kwargs), None
        inputs = BatchInputs.of(args, kwargs, batch_size, batch_first=call.batch_first)
        with attributes_kept(call.layer, self._attributes):
            if ran_on_batch:
                self.vectorizes = _can_vectorize(call, inputs, state)
            if ran_on_batch or batch_size > self.largest_batch_size:
                _compare_with_batch(call, inputs, state)
                self.largest_batch_size = batch_size
            if self.vectorizes:
                state.restore_random()
                try:
                    return _run(call, inputs, state, chunk_size_for(call.parameters.values(), batch_size))
                except Exception:  # vmap may raise any error for an unsupported module
                    self.vectorizes = False
            state.restore_random()
            try:
                return _run(call, inputs, state, 0)
            except Exception as error:
                raise PerSampleForwardError(error) from error

    def _with_pullback(self, call: ForwardCall, args: Any, kwargs: Any, state: ForwardState) -> Any:
        """Runs the samples and stores a pullback. Returns None if the call does not support it."""
        assert self.layout is not None
        leaves = pytree.tree_leaves((args, kwargs))
        batch_size = next((batch_size_of(leaves[i]) for i in self.layout[1] if i < len(leaves)), None) or 0
        inputs = BatchInputs.of(args, kwargs, batch_size, batch_first=call.batch_first)
        if not 0 < batch_size <= self.largest_batch_size or inputs.layout != self.layout or state.autocast_enabled:
            return None
        try:
            before = ModelState.of(call.layer)
        except RuntimeError:  # the module stored a tensor of the last replay in a container
            self.stores_pullbacks = False
            return None
        if not _can_store(call, inputs, before):
            return None
        inputs = replace(inputs, leaves=[t.clone() if isinstance(t, Tensor) else t for t in inputs.leaves])
        try:
            chunk_size = chunk_size_for(call.parameters.values(), batch_size)
            stored = _run(call, inputs, state, chunk_size, pullback_module=PullbackModule(call))
            if not ModelState.of(call.layer).changed_since(before):
                return stored
        except Exception:  # vmap may raise any error for an unsupported module
            pass
        before.restore()
        self.stores_pullbacks = False
        return None


def _can_store(call: ForwardCall, inputs: BatchInputs, state: ModelState) -> bool:
    """Returns True if a pullback can copy all tensors of the model, and no hook would get single samples."""
    tensors = [leaf for leaf in inputs.leaves if isinstance(leaf, Tensor)]
    parameters = list(call.layer.parameters())
    attributes = [v for _, saved in state.attributes for v in saved.values()]
    contents = [v for v, _ in state.contents.values()]
    submodules = [module for module in call.layer.modules() if module is not call.layer]
    batch_size = len(inputs.batched[0])
    return (
        batch_size <= _MAX_STORED_RUNS * chunk_size_for(parameters, batch_size)
        and all(type(leaf) is Tensor and not leaf.requires_grad and not traced(leaf) for leaf in tensors)
        and all(isinstance(leaf, Tensor) for leaf in inputs.batched)
        and set(parameters) == set(call.parameters.values())
        and all(p.dtype in TOLERANCE for p in parameters)
        and not any(isinstance(value, Tensor) for value in attributes + contents)
        and not any(getattr(module, hooks) for module in submodules for hooks in _HOOKS)
        and not _has_any_global_hook()
    )


def _batched_input_index(leaves: list[Any], output: Any, batch_first: bool) -> int | None:
    """Returns the index of the first input with the batch size of the first output; None if there is none."""
    outputs = [convert_axis_order(leaf, batch_first=batch_first) for leaf in pytree.tree_leaves(output)]
    batch_size = next((size for leaf in (*outputs, *leaves) if (size := batch_size_of(leaf)) is not None), 0)
    indices = [i for i, leaf in enumerate(leaves) if batch_size_of(leaf) == batch_size]
    return indices[0] if batch_size and indices else None


def is_supported_output(output: Any) -> bool:
    """Returns True if all leaves of an output are tensors or simple values. A per-sample run drops other objects."""
    return all(isinstance(leaf, Tensor) or _simple_value(leaf) is leaf for leaf in pytree.tree_leaves(output))


def _simple_value(leaf: Any) -> Any:
    return leaf if isinstance(leaf, _SIMPLE_TYPES) else None


def _is_scalar(leaf: Any) -> bool:
    """Returns True for a tensor that is one number, such as a loss."""
    return isinstance(leaf, Tensor) and not leaf.dim() and leaf.is_floating_point()


def _is_float(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and leaf.is_floating_point()


class PerSampleForwardError(Exception):
    """Raised if the samples of a batch cannot run separately. The message is the reason."""


def _run(
    call: ForwardCall,
    inputs: BatchInputs,
    state: ForwardState,
    chunk_size: int,
    *,
    strict: bool = True,
    pullback_module: PullbackModule | None = None,
) -> tuple[Any, PerSampleRun]:
    """Runs each sample separately. Returns the outputs of the batch, and a record of the pass.

    Output leaves that are neither tensors nor simple values become None. With ``strict=False``, tensors that do not
    have the batch on axis 0 become empty. With ``pullback_module``, the record has pullbacks.
    """
    non_tensors: list[Any] = []
    scalar_outputs: tuple[int, ...] = ()
    spec: Any = None

    def run_sample(tensors: list[Tensor], forward: Callable[..., Any] = call.forward) -> list[Tensor]:
        nonlocal non_tensors, scalar_outputs, spec
        args, kwargs = inputs.arguments(tensors)
        leaves, spec = pytree.tree_flatten(forward(*args, **kwargs))
        non_tensors = [_TENSOR if isinstance(leaf, Tensor) else _simple_value(leaf) for leaf in leaves]
        scalar_outputs = () if call.name else tuple(i for i, leaf in enumerate(leaves) if _is_scalar(leaf))
        leaves = [leaf.reshape(1) if i in scalar_outputs else leaf for i, leaf in enumerate(leaves)]
        outputs = [convert_axis_order(x, batch_first=call.batch_first) for x in leaves if isinstance(x, Tensor)]
        if strict and any(output.shape[:1] != (1,) for output in outputs):
            raise PerSampleForwardError("it returns a tensor that does not have the batch on axis 0")
        return [output if output.shape[:1] == (1,) else output.new_empty(0) for output in outputs]

    run = run_sample if pullback_module is None else partial(pullback_module.run, run_sample)
    # Fused kernels have no batching rule, and draw different dropout masks if gradients are computed.
    with sdpa_kernel(SDPBackend.MATH):
        if chunk_size:
            vectorized = vmap(run, chunk_size=chunk_size, randomness="different")
            outputs = [o.flatten(0, 1) for o in vectorized([tensor.unsqueeze(1) for tensor in inputs.batched])]
        else:
            per_sample = [run_sample(inputs.sample(index)) for index in range(len(inputs.batched[0]))]
            outputs = [torch.cat(parts) for parts in zip(*per_sample, strict=True)]
    remaining = iter(outputs)
    leaves = [next(remaining) if leaf is _TENSOR else leaf for leaf in non_tensors]
    leaves = [convert_axis_order(leaf, batch_first=call.batch_first) for leaf in leaves]
    pullbacks = [] if pullback_module is None else pullback_module.pullbacks
    return pytree.tree_unflatten(leaves, spec), PerSampleRun(state, chunk_size, scalar_outputs, pullbacks)


def _compare_with_batch(
    call: ForwardCall, inputs: BatchInputs, state: ForwardState, *, selecting_units: bool = False
) -> None:
    """Raises if samples that run separately in eval mode give outputs that differ from those of the batch.

    Returns without a comparison if the module draws random numbers in eval mode, too, or does not run in eval mode.
    While the modules that run each sample separately are selected (``selecting_units``), a module that does not run in
    eval mode also raises, and outputs of the model that do not have the batch on axis 0 are ignored.
    """
    strict = bool(call.name) or not selecting_units
    with preserve_modes(call.layer), state.random_again(), torch.no_grad():
        call.layer.eval()
        try:
            expected = [leaf for leaf in pytree.tree_leaves(call.forward(*call.args, **call.kwargs)) if _is_float(leaf)]
        except Exception as error:  # the module may not support eval mode
            if selecting_units:
                raise PerSampleForwardError(error) from error
            return
        try:
            output = _run(call, inputs, state, 0, strict=strict)[0]
        except Exception as error:
            raise error if isinstance(error, PerSampleForwardError) else PerSampleForwardError(error) from error
        if state.has_drawn():
            return
    actual = [leaf for leaf in pytree.tree_leaves(output) if _is_float(leaf)]
    if len(actual) != len(expected):
        return
    compared = 0
    for batch, samples in zip(expected, actual, strict=True):
        tolerance = tolerance_for(batch.dtype, state)
        if batch.dim() and not strict and not samples.numel() and len(batch) != len(inputs.batched[0]):
            continue
        compared += 1
        if batch.dim():
            batch, samples = (convert_axis_order(leaf, batch_first=call.batch_first) for leaf in (batch, samples))
            if not _samples_close(samples, batch, tolerance):
                raise PerSampleForwardError("the complete batch gives a different output")
        elif not any(_samples_close(x.view(1), batch.view(1), tolerance) for x in (samples.mean(), samples.sum())):
            raise BatchDependentLossError(
                "The loss that the model computes is neither the mean nor the sum of the losses of single samples.",
                fix="Compute the loss outside the model as a mean over samples; for tokens that is "
                "dpengine.losses.per_token_mean(logits, labels), after import dpengine.losses.",
            )
    if not (compared or strict):
        raise PerSampleForwardError("it returns no tensor that has the batch on axis 0")


def check_samples_independent(call: ForwardCall, batch_size: int) -> None:
    """Raises if samples of a finished call depend on each other in eval mode, or if an input may hold state.

    Runs the first samples again, as one batch and separately, and compares the outputs. The error is
    PerSampleForwardError or BatchDependentLossError.
    """
    for leaf in pytree.tree_leaves((call.args, dict(call.kwargs))):
        if not isinstance(leaf, (Tensor, type(None), *_SIMPLE_TYPES)):  # such as a cache, to which each sample appends
            raise PerSampleForwardError(f"it gets a {type(leaf).__name__}, which may store state between the samples")
    order = {"batch_first": call.batch_first}
    args, kwargs = pytree.tree_map(lambda leaf: convert_axis_order(leaf, **order), (call.args, dict(call.kwargs)))
    inputs = BatchInputs.of(args, kwargs, batch_size, **order)
    leaves = _first_samples(inputs, _MAX_COMPARED_SAMPLES)
    leaves = [leaf.detach() if i in inputs.batched_indices else leaf for i, leaf in enumerate(leaves)]
    inputs = replace(inputs, leaves=leaves)
    args, kwargs = inputs.arguments(inputs.batched)
    tensors = [leaf for leaf in (*leaves, *call.parameters.values()) if isinstance(leaf, Tensor)]
    with attributes_kept(call.layer):
        state = ForwardState.now(tensors)
        _compare_with_batch(replace(call, args=args, kwargs=kwargs), inputs, state, selecting_units=True)


def _first_samples(inputs: BatchInputs, count: int) -> list[Any]:
    """Returns the leaves of the inputs with only the first samples of the batch."""
    return [leaf[:count] if i in inputs.batched_indices else leaf for i, leaf in enumerate(inputs.leaves)]


def _can_vectorize(call: ForwardCall, inputs: BatchInputs, state: ForwardState) -> bool:
    """Returns True if vmap can run two samples of a module, forward and backward."""
    try:
        with state.with_autocast():
            two_samples = replace(inputs, leaves=_first_samples(inputs, 2))
            output, run = _run(call, two_samples, state, 2, pullback_module=PullbackModule(call))
            leaves = [leaf for leaf in pytree.tree_leaves(output) if _is_float(leaf)]
            outputs = [convert_axis_order(leaf, batch_first=call.batch_first) for leaf in leaves]
            run.gradients([torch.zeros_like(output) for output in outputs])
    except Exception:  # vmap may raise any error for an unsupported module
        return False
    return True


def tolerance_for(dtype: torch.dtype, state: ForwardState) -> float:
    """Returns the tolerance of outputs in a forward pass that ran in this state."""
    is_half = state.autocast_enabled or dtype not in TOLERANCE
    return HALF_PRECISION_TOLERANCE if is_half else TOLERANCE[dtype]


def outputs_close(actual: list[Tensor], expected: list[Tensor], tolerance: float) -> bool:
    """Returns True if each sample of each tensor differs by at most ``tolerance`` times its largest expected entry."""
    return all(_samples_close(a.detach(), e.detach(), tolerance) for a, e in zip(actual, expected, strict=True))


def _samples_close(actual: Tensor, expected: Tensor, tolerance: float) -> bool:
    """Compares one pair of tensors of `outputs_close`. Ignores entries that are not finite in ``expected``."""
    if actual.shape != expected.shape:
        return False
    if traced(expected):  # traced tensors have no values; an earlier pass compared them
        return True
    if actual.numel() == 0:
        return True
    actual, expected = actual.reshape(len(actual), -1), expected.reshape(len(expected), -1)
    if not expected.abs().amax(dim=1).isfinite().all():
        finite = expected.isfinite()
        actual, expected = torch.where(finite, actual, 0), torch.where(finite, expected, 0)
    scale_B = expected.abs().amax(dim=1)
    scale_B = scale_B + 0.01 * scale_B.median()  # small samples may have larger relative rounding errors
    difference = actual - expected
    difference = difference.abs() if difference.is_complex() else difference.abs_()
    return bool((difference.amax(dim=1) <= tolerance * scale_B).all())
