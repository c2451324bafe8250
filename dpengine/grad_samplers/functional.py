"""Fallback for any module: runs each sample again separately, with ``torch.func``.

Note [replay]: the gradient of a sample is that of a run of the module on a batch of this sample alone (a replay), so it
cannot depend on other samples. If the output of the replay differs from that of the forward pass, the gradient would be
wrong, and the module is rejected. Possible reasons are that the module keeps state, mixes samples, or has an input
whose first axis has the size of the batch by chance. A module that draws random numbers draws the same numbers in the
replay, see note [random numbers] of `per_sample_forward`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import vjp, vmap
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils import _pytree as pytree

from dpengine.capture.checkpoints import without_checkpoints
from dpengine.capture.model_state import attributes_kept
from dpengine.capture.record import ForwardCall, LayerCall
from dpengine.errors import UnsupportedLayerError

from .batch_inputs import BatchInputs, convert_axis_order
from .embedding import check_embedding
from .per_sample_forward import (
    HALF_PRECISION_TOLERANCE,
    TOLERANCE,
    PerSampleForward,
    PerSampleForwardError,
    PerSampleRun,
    chunk_size_for,
    is_supported_output,
    outputs_close,
    tolerance_for,
)
from .pullback_module import call_with_tensors
from .sampler import JointSampler


def functional_sampler(module: nn.Module) -> JointSampler:
    """Returns the rule that computes the gradients of all trainable parameters of a module by per-sample replays.

    Inputs may be positional or keyword, in nested containers. Tensors whose axis 0 has the size of the batch are split
    into samples, which share all other inputs. The output may be any nesting of tensors. The caller must pause its own
    hooks on the module while ``grads`` runs.

    Raises ``UnsupportedLayerError`` for an embedding with settings that mix samples. ``grads`` raises it, too, if a
    replay does not give the recorded output.
    """
    for name, submodule in module.named_modules():
        check_embedding(submodule, name)
    fallback = _Fallback()
    return JointSampler(fallback.grads, needs_output=True, forward=fallback.forward)


class _Fallback:
    """Functions of the rule. Stores whether vmap supports the module, and whether the module draws random numbers."""

    def __init__(self) -> None:
        self.vectorizes = True
        self._replaces_all = False  # True if a replay of the model used none of its own parameters
        self.per_sample_forward = PerSampleForward()

    def forward(self, call: ForwardCall) -> tuple[Any, PerSampleRun | None]:
        try:
            return self.per_sample_forward(call)
        except PerSampleForwardError as error:
            raise _error(call, f"could not be run on each sample alone ({_first_line(error)})") from error

    def grads(self, call: LayerCall) -> dict[str, Tensor]:
        if call.output is None:
            raise ValueError(f"The call of layer '{call.name}' has no output; the functional fallback needs it.")
        replay = _Replay.of(call)
        if replay.batch_size == 0:
            return {name: parameter.new_zeros(0, *parameter.shape) for name, parameter in replay.parameters.items()}
        if not replay.inputs.batched_indices:
            raise UnsupportedLayerError(
                f"{_subject(call)} has no input with the batch on axis 0, so samples cannot be run alone.",
                fix="Pass inputs with the batch on axis 0. For graphs, pass the batch of torch_geometric itself, as in "
                "model(batch), or padded tensors (B, nodes, features).",
                where=call.name,
            )
        grads = self._grads_from_pullback(replay, call)
        if grads is None:
            grads = self._replayed(replay, call)
            # A unit may call a layer outside of it, which records its own calls.
            vectorized = self.vectorizes and (replay.per_sample_run is None or replay.per_sample_run.chunk_size > 0)
            may_store = vectorized and not call.name and is_supported_output(call.output)
            forward = self.per_sample_forward
            if replay.per_sample_run is None:
                before = forward.largest_batch_size if forward.layout == replay.inputs.layout else 0
                forward.largest_batch_size = max(before, replay.batch_size)
            forward.layout = replay.inputs.layout if may_store else None
        elif not self.per_sample_forward.pullback_verified:
            ends = {0, replay.batch_size - 1}  # samples of the first and the last vectorized run
            from_pullback = [_flat(grads, index) for index in ends]
            grads.clear()  # before the replay needs the memory
            grads = self._replayed(replay, call)
            from_replay = [_flat(grads, index) for index in ends]
            equal = outputs_close(from_pullback, from_replay, TOLERANCE[from_pullback[0].dtype])
            self.per_sample_forward.pullback_verified = True
            self.per_sample_forward.stores_pullbacks = equal
        return {name: grad.to(torch.promote_types(grad.dtype, torch.float32)) for name, grad in grads.items()}

    def _grads_from_pullback(self, replay: _Replay, call: LayerCall) -> dict[str, Tensor] | None:
        """Returns the gradients from activations of the forward pass; None if these were not stored."""
        if replay.per_sample_run is None or not replay.per_sample_run.pullbacks:
            return None
        grads = dict(zip(replay.grad_indices, replay.grads, strict=True))
        outputs = enumerate(pytree.tree_leaves(call.output))
        floats = [(i, o) for i, o in outputs if isinstance(o, Tensor) and o.is_floating_point()]
        try:
            return replay.per_sample_run.gradients([grads[i] if i in grads else torch.zeros_like(o) for i, o in floats])
        except Exception:  # vmap may raise any error for an unsupported module
            self.per_sample_forward.stores_pullbacks = False
            return None

    def _replayed(self, replay: _Replay, call: LayerCall) -> dict[str, Tensor]:
        """Returns the gradients of a replay. Raises UnsupportedLayerError if its outputs are not the recorded ones."""
        with attributes_kept(call.layer), replay.same_random_numbers(), without_checkpoints():
            # A unit may call a layer outside of it, which uses its own parameters and records its own calls.
            if not (call.name or self._replaces_all) and (name := replay.unreplaced_parameter()):
                raise UnsupportedLayerError(
                    f"{_subject(call)} uses its parameter '{name}' by a reference other than the attribute of its "
                    "module, such as a list or a variable of a closure. Its per-sample gradients cannot be computed.",
                    fix="Read the parameter from its module in the forward pass, as in self.weight.",
                    where=call.name,
                )
            self._replaces_all = True
        with attributes_kept(call.layer), replay.same_random_numbers(), without_checkpoints():
            grads, outputs, vmap_error = self._run(replay, call)
            if not replay.outputs_match(outputs):
                raise _error(call, "gave a different output when each sample was run alone") from vmap_error
        return grads

    def _run(self, replay: _Replay, call: LayerCall) -> tuple[dict[str, Tensor], list[Tensor], Exception | None]:
        vmap_error = None
        try:
            if replay.per_sample_run is not None:
                return *(replay.run_vectorized() if replay.per_sample_run.chunk_size else replay.run_in_loop()), None
            if self.vectorizes:
                try:
                    return *replay.run_vectorized(), None
                except Exception as error:  # vmap may raise any error for an unsupported module
                    if "randomness" in str(error):
                        raise
                    vmap_error = error
                    self.vectorizes = False
            return *replay.run_in_loop(), vmap_error
        except Exception as error:
            raise _error(call, f"could not be run on each sample alone ({_first_line(error)})") from error


@dataclass(frozen=True, eq=False)
class _Replay:
    """Runs the samples of a call again, and computes their gradients.

    Attributes:
        layer: The module.
        parameters: The trainable parameters, by name.
        frozen: The other parameters, by name.
        buffers: The buffers, by name.
        inputs: The inputs.
        grad_indices: Indices of the leaves of the output that have a gradient.
        outputs: The recorded outputs at these indices.
        grads: The gradients of these outputs.
        per_sample_run: Record of the forward pass, if it ran each sample separately; else None.
    """

    layer: nn.Module
    parameters: dict[str, Tensor]
    frozen: dict[str, Tensor]
    buffers: dict[str, Tensor]
    inputs: BatchInputs
    grad_indices: list[int]
    outputs: list[Tensor]
    grads: list[Tensor]
    per_sample_run: PerSampleRun | None

    @classmethod
    def of(cls, call: LayerCall) -> _Replay:
        outputs, grads = pytree.tree_leaves(call.output), pytree.tree_leaves(call.grad_output)
        if len(grads) != len(outputs):  # there is one gradient for each tensor in the output
            remaining = iter(grads)
            grads = [next(remaining) if isinstance(leaf, Tensor) else None for leaf in outputs]
        grad_indices = [index for index, grad in enumerate(grads) if isinstance(grad, Tensor)]
        batch_size, dtype = grads[grad_indices[0]].shape[0], grads[grad_indices[0]].dtype
        keep_dtype = call.per_sample_run is not None  # random numbers may depend on the dtype
        converted = (lambda tensor: tensor.detach()) if keep_dtype else partial(_at_least, dtype=dtype)
        parameters = {name: (p.requires_grad, converted(p)) for name, p in call.layer.named_parameters()}
        return cls(
            layer=call.layer,
            parameters={name: p for name, (trainable, p) in parameters.items() if trainable},
            frozen={name: p for name, (trainable, p) in parameters.items() if not trainable},
            buffers={name: converted(b) for name, b in call.layer.named_buffers()},
            inputs=BatchInputs.of(call.inputs, call.kwargs, batch_size, batch_first=call.batch_first),
            grad_indices=grad_indices,
            outputs=[outputs[index] for index in grad_indices],
            grads=[grads[index] for index in grad_indices],
            per_sample_run=call.per_sample_run,
        )

    @property
    def batch_size(self) -> int:
        return self.grads[0].shape[0]

    def run(self, parameters: dict[str, Tensor], inputs: list[Tensor]) -> list[Tensor]:
        """Returns the outputs that have a gradient, with the batch on axis 0, for a batch of any size."""
        args, kwargs = self.inputs.arguments(inputs)
        buffers = {name: buffer.clone() for name, buffer in self.buffers.items()}  # forward may write to them
        with contextlib.nullcontext() if self.per_sample_run is None else self.per_sample_run.state.with_autocast():
            output = call_with_tensors(self.layer, {**parameters, **self.frozen, **buffers}, args, kwargs)
        leaves = pytree.tree_leaves(output)
        for index in () if self.per_sample_run is None else self.per_sample_run.scalar_outputs:
            leaves[index] = leaves[index].reshape(1)
        return [convert_axis_order(leaves[index], batch_first=self.inputs.batch_first) for index in self.grad_indices]

    def unreplaced_parameter(self) -> str | None:
        """Returns the name of a parameter of the module that `run` uses instead of the given one; None without one."""
        names = {p: name for name, p in self.layer.named_parameters() if p.requires_grad}
        try:
            with torch.enable_grad():
                outputs = self.run(self.parameters, self.inputs.sample(0))
                roots = [output.sum() for output in outputs if output.requires_grad]
            grads = torch.autograd.grad(roots, list(names), allow_unused=True) if roots else ()
        except Exception:  # the run that follows reports what is not supported
            return None
        return next((name for name, grad in zip(names.values(), grads, strict=False) if grad is not None), None)

    def run_vectorized(self) -> tuple[dict[str, Tensor], list[Tensor]]:
        """Returns the gradients and outputs of all samples, computed by vmap."""

        def run_sample(inputs: list[Tensor], grads: list[Tensor]) -> tuple[dict[str, Tensor], list[Tensor]]:
            batches_of_one = [tensor.unsqueeze(0) for tensor in inputs]
            vjp_result: Any = vjp(lambda parameters: self.run(parameters, batches_of_one), self.parameters)
            outputs, pullback = vjp_result
            return pullback([g.unsqueeze(0).to(o.dtype) for o, g in zip(outputs, grads, strict=True)])[0], outputs

        if self.per_sample_run is None:
            chunk_size, randomness = chunk_size_for(self.parameters.values(), self.batch_size), "error"
        else:
            chunk_size, randomness = self.per_sample_run.chunk_size, "different"
        run = vmap(run_sample, chunk_size=chunk_size, randomness=randomness)
        with sdpa_kernel(SDPBackend.MATH):  # fused kernels have no batching rule
            grads, outputs = run(self.inputs.batched, self.grads)
        return grads, [output.flatten(0, 1) for output in outputs]

    def run_in_loop(self) -> tuple[dict[str, Tensor], list[Tensor]]:
        """Returns the gradients and outputs of all samples, computed in a loop."""
        grads_of: dict[str, list[Tensor]] = {name: [] for name in self.parameters}
        outputs: list[list[Tensor]] = []
        for index in range(self.batch_size):
            grads, sample_outputs = self.run_sample(index)
            for name, grad in grads.items():
                grads_of[name].append(grad)
            outputs.append(sample_outputs)
        stacked = {name: torch.stack(grads).detach() for name, grads in grads_of.items()}
        return stacked, [torch.cat(parts) for parts in zip(*outputs, strict=True)]

    def run_sample(self, index: int) -> tuple[dict[str, Tensor], list[Tensor]]:
        """Returns the gradients and outputs of one sample, computed by autograd."""
        parameters = {name: p.detach().requires_grad_() for name, p in self.parameters.items()}
        with torch.enable_grad():
            outputs = self.run(parameters, self.inputs.sample(index))
        pairs = zip(outputs, self.grads, strict=True)
        roots = [(output, grad[index : index + 1].to(output.dtype)) for output, grad in pairs if output.requires_grad]
        grads: Any = [None] * len(parameters)
        if roots:
            tensors, cotangents = zip(*roots, strict=True)
            grads = torch.autograd.grad(tensors, list(parameters.values()), cotangents, allow_unused=True)
        by_name = {
            name: torch.zeros_like(parameter) if grad is None else grad.to_dense()
            for (name, parameter), grad in zip(parameters.items(), grads, strict=True)
        }
        return by_name, [output.detach() for output in outputs]

    @contextlib.contextmanager
    def same_random_numbers(self) -> Iterator[None]:
        """Draws the random numbers of the forward pass again in the context."""
        if self.per_sample_run is None:
            yield
            return
        with self.per_sample_run.state.random_again(), sdpa_kernel(SDPBackend.MATH):
            yield

    def outputs_match(self, outputs: list[Tensor]) -> bool:
        """Returns True if the outputs of the replay equal the recorded ones up to rounding."""
        if self.per_sample_run is not None:
            return outputs_close(outputs, self.outputs, tolerance_for(self.grads[0].dtype, self.per_sample_run.state))
        if outputs_close(outputs, self.outputs, TOLERANCE[self.grads[0].dtype]):
            return True
        if not outputs_close(outputs, self.outputs, HALF_PRECISION_TOLERANCE):
            return False
        # Forward may have run in half precision. Then the replay is compared with a run of the batch in its precision.
        batch_outputs = self.run(self.parameters, self.inputs.batched)
        return outputs_close(outputs, batch_outputs, TOLERANCE[self.grads[0].dtype])


def _flat(grads: dict[str, Tensor], index: int) -> Tensor:
    """Returns the gradients of one sample with respect to all parameters, ``(1, numel)``."""
    return torch.cat([grads[name][index].flatten() for name in sorted(grads)]).unsqueeze(0)


def single_sample_grads(call: LayerCall, samples: Sequence[int]) -> Iterator[tuple[int, dict[str, Tensor]]]:
    """Yields the index and the gradients of samples of a call, computed by autograd on each sample alone.

    The call needs no output. Raises RuntimeError if the output of a sample alone differs from its output in the batch.
    """
    devices = {leaf.device for leaf in pytree.tree_leaves(call.grad_output) if isinstance(leaf, Tensor)}
    with torch.random.fork_rng([d for d in devices if d.type == "cuda"]), attributes_kept(call.layer):
        replay = _Replay.of(call.replace(output=_output_of(call)) if call.output is None else call)
        with torch.no_grad():
            batch_outputs = replay.run({**replay.parameters}, replay.inputs.batched)
        for index in samples:
            grads, outputs = replay.run_sample(index)
            expected = [output[index : index + 1] for output in batch_outputs]
            if not outputs_close(outputs, expected, TOLERANCE[replay.grads[0].dtype]):
                raise RuntimeError("its output for a sample depends on the others or on random numbers")
            yield index, grads


def _output_of(call: LayerCall) -> Any:
    """Runs a layer on the batch of a call, and returns its output."""
    convert = partial(convert_axis_order, batch_first=call.batch_first)
    args, kwargs = pytree.tree_map(convert, (call.inputs, dict(call.kwargs)))
    dtype = next(leaf.dtype for leaf in pytree.tree_leaves(call.grad_output) if isinstance(leaf, Tensor))
    tensors = [*call.layer.named_parameters(), *call.layer.named_buffers()]
    state = {name: _at_least(tensor, dtype).clone() for name, tensor in tensors}
    with torch.no_grad():
        return pytree.tree_map(convert, call_with_tensors(call.layer, state, args, kwargs))


def _at_least(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Detaches a tensor, and converts it to a floating-point dtype that is not narrower than ``dtype``."""
    wide = torch.promote_types(tensor.dtype, dtype) if tensor.is_floating_point() else tensor.dtype
    return tensor.detach().to(wide)


def _error(call: LayerCall | ForwardCall, problem: str) -> UnsupportedLayerError:
    kind = type(call.layer).__name__
    fix = (
        "If all samples share an input and the model is not sharded, pass grad_sample_mode='auto' or 'whole_model'. "
        "If the layer keeps samples independent, register its rule with "
        f"@register_grad_sampler({kind}), or freeze the layer."
    )
    if not call.name:
        fix = (
            "Give inputs that all samples share an axis of length 1, as in positions[None]. If some layers draw random "
            "numbers or keep state, pass grad_sample_mode='auto', which runs only some layers again. If you call a "
            "single layer, put dropout into eval mode."
        )
    return UnsupportedLayerError(
        f"{_subject(call)} {problem}: it draws random numbers that a second run does not repeat, keeps state between "
        "calls, mixes the samples of a batch, has an input whose first axis has the size of the batch by chance, or "
        "has rounding errors of more than 5 % in half precision, which float32 avoids.",
        fix=fix,
        where=call.name,
    )


def _subject(call: LayerCall | ForwardCall) -> str:
    kind = type(call.layer).__name__
    return f"Layer '{call.name}' ({kind})" if call.name else f"The model ({kind})"


def _first_line(error: Exception) -> str:
    return next(iter(str(error).splitlines()), type(error).__name__)
