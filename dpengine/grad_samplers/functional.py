"""Fallback for any module: runs each row again separately, with ``torch.func``.

Note [replay]: the gradient of a row is that of a run with this row as a batch of one, so it cannot depend on other
rows. If the output of the replay is not the recorded one, the gradient would belong to another computation, and the
module is rejected: it keeps state, mixes rows, or has an input whose first axis has the size of the batch by chance. A
module that draws random numbers draws them again, see note [random numbers] of `forward_by_rows`.
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
from dpengine.capture.record import ForwardCall, LayerCall, swap_batch_axis
from dpengine.errors import UnsupportedLayerError

from .batch_inputs import Inputs, in_order
from .copies import run_with
from .embedding import check_embedding
from .forward_by_rows import (
    HALF_PRECISION,
    ROUNDING,
    Drawn,
    ForwardByRows,
    RowsError,
    can_return,
    chunk_of,
    close,
)
from .sampler import JointSampler


def functional_sampler(module: nn.Module) -> JointSampler:
    """Returns the rule that computes the gradients of all trainable parameters of a module by running each row alone.

    Inputs may be positional or keyword, in nested containers. Tensors whose axis 0 has the size of the batch are split
    into rows; rows share all other inputs. The output may be any nesting of tensors. Raises ``UnsupportedLayerError``
    for an embedding with settings that mix rows. ``grads`` raises it, too, if single rows do not give the recorded
    output. The caller must pause its own hooks on the module while ``grads`` runs.
    """
    for name, part in module.named_modules():
        check_embedding(part, name)
    fallback = _Fallback()
    return JointSampler(fallback.grads, needs_output=True, forward=fallback.forward)


class _Fallback:
    """Functions of the rule. Stores whether vmap supports the module, and whether the module draws random numbers."""

    def __init__(self) -> None:
        self.vectorizes = True
        self._replaces_all = False  # True if a replay of the model used none of its own parameters
        self.by_rows = ForwardByRows()

    def forward(self, call: ForwardCall) -> tuple[Any, Drawn | None]:
        try:
            return self.by_rows(call)
        except RowsError as error:
            raise _error(call, f"could not be run on each row alone ({_first_line(error)})") from error

    def grads(self, call: LayerCall) -> dict[str, Tensor]:
        if call.output is None:
            raise ValueError(f"The call of layer '{call.name}' has no output; the functional fallback needs it.")
        rows = _Rows.of(call)
        if rows.count == 0:
            return {name: parameter.new_zeros(0, *parameter.shape) for name, parameter in rows.parameters.items()}
        if not rows.inputs.cut:
            raise UnsupportedLayerError(
                f"{_subject(call)} has no input with the batch on axis 0, so samples cannot be run alone.",
                fix="Pass inputs with the batch on axis 0. For graphs, pass the batch of torch_geometric itself, as in "
                "model(batch), or padded tensors (B, nodes, features).",
                where=call.name,
            )
        grads = self._stored(rows, call)
        if grads is None:
            grads = self._replayed(rows, call)
            # A unit may call a layer outside of it, which records its own calls.
            vectorized = self.vectorizes and (rows.drawn is None or rows.drawn.chunk > 0)
            may_store = vectorized and not call.name and can_return(call.output)
            if rows.drawn is None:
                before = self.by_rows.largest if self.by_rows.layout == rows.inputs.layout else 0
                self.by_rows.largest = max(before, rows.count)
            self.by_rows.layout = rows.inputs.layout if may_store else None
        elif not self.by_rows.compared:
            ends = {0, rows.count - 1}  # of the first and the last vectorized run
            stored = [_flat(grads, row) for row in ends]
            grads.clear()  # before the replay needs the memory
            grads = self._replayed(rows, call)
            self.by_rows.compared = True
            self.by_rows.stores = close(stored, [_flat(grads, row) for row in ends], ROUNDING[stored[0].dtype])
        return {name: grad.to(torch.promote_types(grad.dtype, torch.float32)) for name, grad in grads.items()}

    def _stored(self, rows: _Rows, call: LayerCall) -> dict[str, Tensor] | None:
        """Returns the gradients from activations of the forward pass; None if these were not stored."""
        if rows.drawn is None or not rows.drawn.pullbacks:
            return None
        grads = dict(zip(rows.used, rows.grads, strict=True))
        outputs = enumerate(pytree.tree_leaves(call.output))
        floats = [(i, o) for i, o in outputs if isinstance(o, Tensor) and o.is_floating_point()]
        try:
            return rows.drawn.gradients([grads[i] if i in grads else torch.zeros_like(o) for i, o in floats])
        except Exception:  # vmap may raise any error for an unsupported module
            self.by_rows.stores = False
            return None

    def _replayed(self, rows: _Rows, call: LayerCall) -> dict[str, Tensor]:
        """Returns the gradients of a replay. Raises UnsupportedLayerError if its outputs are not the recorded ones."""
        with attributes_kept(call.layer), rows.as_drawn(), without_checkpoints():
            # A unit may call a layer outside of it, which uses its own parameters and records its own calls.
            if not (call.name or self._replaces_all) and (name := rows.parameter_not_replaced()):
                raise UnsupportedLayerError(
                    f"{_subject(call)} uses its parameter '{name}' by another reference than the attribute of its "
                    "module, such as a list or a variable of a closure. Its per-sample gradients cannot be computed.",
                    fix="Read the parameter from its module in the forward pass, as in self.weight.",
                    where=call.name,
                )
            self._replaces_all = True
        with attributes_kept(call.layer), rows.as_drawn(), without_checkpoints():
            grads, outputs, obstacle = self._run(rows, call)
            if not rows.agree(outputs):
                raise _error(call, "gave another output when each row was run alone") from obstacle
        return grads

    def _run(self, rows: _Rows, call: LayerCall) -> tuple[dict[str, Tensor], list[Tensor], Exception | None]:
        obstacle = None
        try:
            if rows.drawn is not None:
                return *(rows.vectorized() if rows.drawn.chunk else rows.one_by_one()), None
            if self.vectorizes:
                try:
                    return *rows.vectorized(), None
                except Exception as error:  # vmap may raise any error for an unsupported module
                    if "randomness" in str(error):
                        raise
                    obstacle = error
                    self.vectorizes = False
            return *rows.one_by_one(), obstacle
        except Exception as error:
            raise _error(call, f"could not be run on each row alone ({_first_line(error)})") from error


@dataclass(frozen=True, eq=False)
class _Rows:
    """The rows of a call.

    Attributes:
        layer: The module.
        parameters: The trainable parameters, by name.
        frozen: The other parameters, by name.
        buffers: The buffers, by name.
        inputs: The inputs.
        used: Indices of the leaves of the output that have a gradient.
        outputs: The recorded outputs at these indices.
        grads: The gradients of these outputs.
        drawn: Record of the forward pass, if it ran each row alone.
    """

    layer: nn.Module
    parameters: dict[str, Tensor]
    frozen: dict[str, Tensor]
    buffers: dict[str, Tensor]
    inputs: Inputs
    used: list[int]
    outputs: list[Tensor]
    grads: list[Tensor]
    drawn: Drawn | None

    @classmethod
    def of(cls, call: LayerCall) -> _Rows:
        outputs, grads = pytree.tree_leaves(call.output), pytree.tree_leaves(call.grad_output)
        if len(grads) != len(outputs):  # there is one gradient for each tensor in the output
            remaining = iter(grads)
            grads = [next(remaining) if isinstance(leaf, Tensor) else None for leaf in outputs]
        used = [index for index, grad in enumerate(grads) if isinstance(grad, Tensor)]
        count, dtype = grads[used[0]].shape[0], grads[used[0]].dtype
        keep_dtype = call.drawn is not None  # random numbers may depend on the dtype
        widened = (lambda tensor: tensor.detach()) if keep_dtype else partial(_widened, dtype=dtype)
        own = {name: (p.requires_grad, widened(p)) for name, p in call.layer.named_parameters()}
        return cls(
            layer=call.layer,
            parameters={name: p for name, (trainable, p) in own.items() if trainable},
            frozen={name: p for name, (trainable, p) in own.items() if not trainable},
            buffers={name: widened(b) for name, b in call.layer.named_buffers()},
            inputs=Inputs.of(call.inputs, call.kwargs, count, batch_first=call.batch_first),
            used=used,
            outputs=[outputs[index] for index in used],
            grads=[grads[index] for index in used],
            drawn=call.drawn,
        )

    @property
    def count(self) -> int:
        return self.grads[0].shape[0]

    def run(self, parameters: dict[str, Tensor], inputs: list[Tensor]) -> list[Tensor]:
        """Returns the outputs that have a gradient, with the batch on axis 0, for a batch of any size."""
        args, kwargs = self.inputs.arguments(inputs)
        buffers = {name: buffer.clone() for name, buffer in self.buffers.items()}  # forward may write to them
        with contextlib.nullcontext() if self.drawn is None else self.drawn.state.with_autocast():
            output = run_with(self.layer, {**parameters, **self.frozen, **buffers}, args, kwargs)
        leaves = pytree.tree_leaves(output)
        for index in () if self.drawn is None else self.drawn.numbers:
            leaves[index] = leaves[index].reshape(1)
        return [in_order(leaves[index], batch_first=self.inputs.batch_first) for index in self.used]

    def parameter_not_replaced(self) -> str | None:
        """Returns the name of a parameter that `run` uses although it runs with others; None if there is none."""
        names = {p: name for name, p in self.layer.named_parameters() if p.requires_grad}
        try:
            with torch.enable_grad():
                outputs = self.run(self.parameters, self.inputs.row(0))
                roots = [output.sum() for output in outputs if output.requires_grad]
            found = torch.autograd.grad(roots, list(names), allow_unused=True) if roots else ()
        except Exception:  # the run that follows reports what is not supported
            return None
        return next((name for name, grad in zip(names.values(), found, strict=False) if grad is not None), None)

    def vectorized(self) -> tuple[dict[str, Tensor], list[Tensor]]:
        """Returns the gradients and outputs of all rows, computed by vmap."""

        def one(inputs: list[Tensor], grads: list[Tensor]) -> tuple[dict[str, Tensor], list[Tensor]]:
            batches_of_one = [tensor.unsqueeze(0) for tensor in inputs]
            pulled: Any = vjp(lambda parameters: self.run(parameters, batches_of_one), self.parameters)
            outputs, pull = pulled
            return pull([g.unsqueeze(0).to(o.dtype) for o, g in zip(outputs, grads, strict=True)])[0], outputs

        chunk = chunk_of(self.parameters.values(), self.count) if self.drawn is None else self.drawn.chunk
        run = vmap(one, chunk_size=chunk, randomness="error" if self.drawn is None else "different")
        with sdpa_kernel(SDPBackend.MATH):  # fused kernels have no batching rule
            grads, outputs = run(self.inputs.batched, self.grads)
        return grads, [output.flatten(0, 1) for output in outputs]

    def one_by_one(self) -> tuple[dict[str, Tensor], list[Tensor]]:
        """Returns the gradients and outputs of all rows, computed in a loop."""
        grads_of: dict[str, list[Tensor]] = {name: [] for name in self.parameters}
        outputs: list[list[Tensor]] = []
        for row in range(self.count):
            grads, row_outputs = self.alone(row)
            for name, grad in grads.items():
                grads_of[name].append(grad)
            outputs.append(row_outputs)
        stacked = {name: torch.stack(grads).detach() for name, grads in grads_of.items()}
        return stacked, [torch.cat(parts) for parts in zip(*outputs, strict=True)]

    def alone(self, row: int) -> tuple[dict[str, Tensor], list[Tensor]]:
        """Returns the gradients and outputs of one row, computed by autograd."""
        parameters = {name: p.detach().requires_grad_() for name, p in self.parameters.items()}
        with torch.enable_grad():
            outputs = self.run(parameters, self.inputs.row(row))
        pairs = zip(outputs, self.grads, strict=True)
        roots = [(output, grad[row : row + 1].to(output.dtype)) for output, grad in pairs if output.requires_grad]
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
    def as_drawn(self) -> Iterator[None]:
        """Makes the context draw the random numbers of the forward pass again."""
        if self.drawn is None:
            yield
            return
        with self.drawn.state.random_again(), sdpa_kernel(SDPBackend.MATH):
            yield

    def agree(self, outputs: list[Tensor]) -> bool:
        """Returns True if the outputs of the replay are the recorded ones up to rounding."""
        if self.drawn is not None:
            half = self.drawn.state.autocast_enabled or self.grads[0].dtype not in ROUNDING
            return close(outputs, self.outputs, HALF_PRECISION if half else ROUNDING[self.grads[0].dtype])
        if close(outputs, self.outputs, ROUNDING[self.grads[0].dtype]):
            return True
        if not close(outputs, self.outputs, HALF_PRECISION):
            return False
        # Forward may have run in half precision. Then rows must agree with the batch, run in the same precision.
        of_batch = self.run(self.parameters, self.inputs.batched)
        return close(outputs, of_batch, ROUNDING[self.grads[0].dtype])


def _flat(grads: dict[str, Tensor], row: int) -> Tensor:
    """Returns the gradients of a row by all parameters, ``(1, numel)``."""
    return torch.cat([grads[name][row].flatten() for name in sorted(grads)]).unsqueeze(0)


def samples_alone(call: LayerCall, samples: Sequence[int]) -> Iterator[tuple[int, dict[str, Tensor]]]:
    """Yields samples of a call, each with its gradients of the layer's parameters, computed by autograd.

    The call needs no output. Raises RuntimeError if a sample alone and in the batch have different outputs.
    """
    devices = {leaf.device for leaf in pytree.tree_leaves(call.grad_output) if isinstance(leaf, Tensor)}
    with torch.random.fork_rng([d for d in devices if d.type == "cuda"]), attributes_kept(call.layer):
        rows = _Rows.of(call.replace(output=_output_of(call)) if call.output is None else call)
        with torch.no_grad():
            of_batch = rows.run({**rows.parameters}, rows.inputs.batched)
        for sample in samples:
            grads, outputs = rows.alone(sample)
            if not close(outputs, [o[sample : sample + 1] for o in of_batch], ROUNDING[rows.grads[0].dtype]):
                raise RuntimeError("its output for a sample depends on the others or on random numbers")
            yield sample, grads


def _output_of(call: LayerCall) -> Any:
    """Runs a layer on the batch of a call, and returns its output."""
    turn = (
        (lambda leaf: leaf)
        if call.batch_first
        else (lambda leaf: swap_batch_axis(leaf) if isinstance(leaf, Tensor) else leaf)
    )
    args, kwargs = pytree.tree_map(turn, (call.inputs, dict(call.kwargs)))
    dtype = next(leaf.dtype for leaf in pytree.tree_leaves(call.grad_output) if isinstance(leaf, Tensor))
    tensors = [*call.layer.named_parameters(), *call.layer.named_buffers()]
    state = {name: _widened(tensor, dtype).clone() for name, tensor in tensors}
    with torch.no_grad():
        return pytree.tree_map(turn, run_with(call.layer, state, args, kwargs))


def _widened(tensor: Tensor, dtype: torch.dtype) -> Tensor:
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
        "calls, mixes the rows of a batch, has an input whose first axis has the size of the batch by chance, or has "
        "rounding errors of more than 5 % in half precision, which float32 avoids.",
        fix=fix,
        where=call.name,
    )


def _subject(call: LayerCall | ForwardCall) -> str:
    kind = type(call.layer).__name__
    return f"Layer '{call.name}' ({kind})" if call.name else f"The model ({kind})"


def _first_line(error: Exception) -> str:
    return next(iter(str(error).splitlines()), type(error).__name__)
