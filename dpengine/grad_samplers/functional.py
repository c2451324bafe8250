"""The fallback for any module: each row is run again alone, through ``torch.func``.

Note [replay]: the gradient of a row is that of a run with this row as a batch of one, so that whatever the module does,
the gradient belongs to the row alone. Where the replayed output is not the recorded one, it would be the gradient of
another computation, and the module is refused: it keeps state, mixes rows, or has an input that only looks batched.
A module that draws random numbers draws them again, see note [random numbers] of `forward_by_rows`.
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
from dpengine.capture.record import ForwardCall, LayerCall, turned
from dpengine.errors import UnsupportedLayerError

from .embedding import check_embedding
from .forward_by_rows import (
    HALF_PRECISION,
    ROUNDING,
    Drawn,
    ForwardByRows,
    Inputs,
    RowsError,
    attributes_kept,
    chunk_of,
    close,
    in_order,
    run_with,
)
from .sampler import JointSampler


def functional_sampler(module: nn.Module) -> JointSampler:
    """Per-sample gradients of all trainable parameters in a module and below it, by running each row alone.

    Inputs may be positional or keyword, in nested containers. A tensor whose axis 0 has the size of the batch is cut
    into rows; all else is shared by the rows. The output may be any nesting of tensors. A module that holds an
    embedding whose settings mix the rows raises ``UnsupportedLayerError``, and so does ``grads`` if rows run alone do
    not give the recorded output. Hooks of the caller's own on the module must be paused while ``grads`` runs.
    """
    for name, part in module.named_modules():
        check_embedding(part, name)
    fallback = _Fallback()
    return JointSampler(fallback.grads, needs_output=True, forward=fallback.forward)


class _Fallback:
    """Remembers whether the module can be vectorised, which is tried once, and whether it draws random numbers."""

    def __init__(self) -> None:
        self.vectorises = True
        self.by_rows = ForwardByRows()

    def forward(self, call: ForwardCall) -> tuple[Any, Drawn | None]:
        try:
            return self.by_rows(call)
        except RowsError as error:
            raise _refusal(call, f"could not be run on each row alone ({_first_line(error)})") from error

    def grads(self, call: LayerCall) -> dict[str, Tensor]:
        if call.output is None:
            raise ValueError(f"The call of layer '{call.name}' carries no output; the functional fallback needs it.")
        rows = _Rows.of(call)
        if rows.count == 0:
            return {name: parameter.new_zeros(0, *parameter.shape) for name, parameter in rows.parameters.items()}
        if not rows.inputs.cut:
            raise UnsupportedLayerError(
                f"{_place(call)} has no input with the samples of its output on axis 0, so that none can be run alone.",
                fix="Give it inputs with the batch on axis 0. Of graphs, give the model the batch of torch_geometric "
                "itself, as in model(batch), or tensors (B, nodes, features) that are padded.",
                where=call.name,
            )
        with attributes_kept(call.layer), rows.as_drawn(), without_checkpoints():
            grads, outputs, obstacle = self._run(rows, call)
            if not rows.agree(outputs):
                raise _refusal(call, "gave another output when each row was run alone") from obstacle
        return {name: grad.to(torch.promote_types(grad.dtype, torch.float32)) for name, grad in grads.items()}

    def _run(self, rows: _Rows, call: LayerCall) -> tuple[dict[str, Tensor], list[Tensor], Exception | None]:
        obstacle = None
        try:
            if rows.drawn is not None:
                return *(rows.vectorised() if rows.drawn.chunk else rows.one_by_one()), None
            if self.vectorises:
                try:
                    return *rows.vectorised(), None
                except Exception as error:  # there is no list of what vmap cannot do
                    if "randomness" in str(error):
                        raise
                    obstacle = error
                    self.vectorises = False
            return *rows.one_by_one(), obstacle
        except Exception as error:
            raise _refusal(call, f"could not be run on each row alone ({_first_line(error)})") from error


@dataclass(frozen=True, eq=False)
class _Rows:
    """A call taken apart: what belongs to the rows, and what they share.

    Attributes:
        layer: The module.
        parameters: What gradients are wanted of, by name.
        frozen: Its other parameters.
        buffers: Its buffers.
        inputs: Its inputs.
        used: Places, among the leaves of the output, that have a gradient.
        outputs: Recorded outputs at these places.
        grads: Their gradients.
        drawn: How the forward pass ran the rows, if it ran them alone.
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
        if len(grads) != len(outputs):  # one gradient for each tensor among them
            given = iter(grads)
            grads = [next(given) if isinstance(leaf, Tensor) else None for leaf in outputs]
        used = [place for place, grad in enumerate(grads) if isinstance(grad, Tensor)]
        count, dtype = grads[used[0]].shape[0], grads[used[0]].dtype
        own_type = call.drawn is not None  # random numbers may depend on it
        widened = (lambda tensor: tensor.detach()) if own_type else partial(_widened, dtype=dtype)
        own = {name: (p.requires_grad, widened(p)) for name, p in call.layer.named_parameters()}
        return cls(
            layer=call.layer,
            parameters={name: p for name, (trainable, p) in own.items() if trainable},
            frozen={name: p for name, (trainable, p) in own.items() if not trainable},
            buffers={name: widened(b) for name, b in call.layer.named_buffers()},
            inputs=Inputs.of(call.inputs, call.kwargs, count, batch_first=call.batch_first),
            used=used,
            outputs=[outputs[place] for place in used],
            grads=[grads[place] for place in used],
            drawn=call.drawn,
        )

    @property
    def count(self) -> int:
        return self.grads[0].shape[0]

    def run(self, parameters: dict[str, Tensor], inputs: list[Tensor]) -> list[Tensor]:
        """The outputs that have a gradient, for a batch of any size; batch first, whatever the module's order."""
        args, kwargs = self.inputs.arguments(inputs)
        buffers = {name: buffer.clone() for name, buffer in self.buffers.items()}  # forward may write into them
        with contextlib.nullcontext() if self.drawn is None else self.drawn.state.with_autocast():
            output = run_with(self.layer, {**parameters, **self.frozen, **buffers}, args, kwargs)
        leaves = pytree.tree_leaves(output)
        for place in () if self.drawn is None else self.drawn.numbers:
            leaves[place] = leaves[place].reshape(1)
        return [in_order(leaves[place], batch_first=self.inputs.batch_first) for place in self.used]

    def vectorised(self) -> tuple[dict[str, Tensor], list[Tensor]]:
        """Gradients and outputs of all rows, by vmap."""

        def one(inputs: list[Tensor], grads: list[Tensor]) -> tuple[dict[str, Tensor], list[Tensor]]:
            batches_of_one = [tensor.unsqueeze(0) for tensor in inputs]
            pulled: Any = vjp(lambda parameters: self.run(parameters, batches_of_one), self.parameters)
            outputs, pull = pulled
            return pull([g.unsqueeze(0).to(o.dtype) for o, g in zip(outputs, grads, strict=True)])[0], outputs

        chunk = chunk_of(self.parameters.values(), self.count) if self.drawn is None else self.drawn.chunk
        run = vmap(one, chunk_size=chunk, randomness="error" if self.drawn is None else "different")
        with sdpa_kernel(SDPBackend.MATH):  # the fused ones have no batching rule
            grads, outputs = run(self.inputs.batched, self.grads)
        return grads, [output.flatten(0, 1) for output in outputs]

    def one_by_one(self) -> tuple[dict[str, Tensor], list[Tensor]]:
        """Gradients and outputs of all rows, by a loop."""
        found: dict[str, list[Tensor]] = {name: [] for name in self.parameters}
        outputs: list[list[Tensor]] = []
        for row in range(self.count):
            grads, one = self.alone(row)
            for name, grad in grads.items():
                found[name].append(grad)
            outputs.append(one)
        stacked = {name: torch.stack(grads).detach() for name, grads in found.items()}
        return stacked, [torch.cat(parts) for parts in zip(*outputs, strict=True)]

    def alone(self, row: int) -> tuple[dict[str, Tensor], list[Tensor]]:
        """Gradients and outputs of one row, by autograd."""
        parameters = {name: p.detach().requires_grad_() for name, p in self.parameters.items()}
        with torch.enable_grad():
            one = self.run(parameters, self.inputs.row(row))
        ends = [(o, g[row : row + 1].to(o.dtype)) for o, g in zip(one, self.grads, strict=True) if o.requires_grad]
        grads: Any = [None] * len(parameters)
        if ends:
            tensors, cotangents = zip(*ends, strict=True)
            grads = torch.autograd.grad(tensors, list(parameters.values()), cotangents, allow_unused=True)
        found = {
            name: torch.zeros_like(parameter) if grad is None else grad.to_dense()
            for (name, parameter), grad in zip(parameters.items(), grads, strict=True)
        }
        return found, [o.detach() for o in one]

    @contextlib.contextmanager
    def as_drawn(self) -> Iterator[None]:
        """Draws the random numbers of the forward pass in the context."""
        if self.drawn is None:
            yield
            return
        with self.drawn.state.random_again(), sdpa_kernel(SDPBackend.MATH):
            yield

    def agree(self, outputs: list[Tensor]) -> bool:
        """Returns True if the replay gave the recorded values, up to rounding."""
        if self.drawn is not None:
            half = self.drawn.state.half or self.grads[0].dtype not in ROUNDING
            return close(outputs, self.outputs, HALF_PRECISION if half else ROUNDING[self.grads[0].dtype])
        if close(outputs, self.outputs, ROUNDING[self.grads[0].dtype]):
            return True
        if not close(outputs, self.outputs, HALF_PRECISION):
            return False
        # Perhaps forward ran in half precision. Then the whole batch, run in the rows' precision, agrees with them.
        whole = self.run(self.parameters, self.inputs.batched)
        return close(outputs, whole, ROUNDING[self.grads[0].dtype])


def samples_alone(call: LayerCall, samples: Sequence[int]) -> Iterator[tuple[int, dict[str, Tensor]]]:
    """Yields samples of a call, each with the gradients of the layer's parameters by autograd.

    The call needs no output. Raises RuntimeError if the output of a sample alone is not that of the batch.
    """
    devices = {leaf.device for leaf in pytree.tree_leaves(call.grad_output) if isinstance(leaf, Tensor)}
    with torch.random.fork_rng([d for d in devices if d.type == "cuda"]), attributes_kept(call.layer):
        rows = _Rows.of(call.replace(output=_output_of(call)) if call.output is None else call)
        with torch.no_grad():
            whole = rows.run({**rows.parameters}, rows.inputs.batched)
        for sample in samples:
            grads, outputs = rows.alone(sample)
            if not close(outputs, [o[sample : sample + 1] for o in whole], ROUNDING[rows.grads[0].dtype]):
                raise RuntimeError("its output for a sample depends on the others or on random numbers")
            yield sample, grads


def _output_of(call: LayerCall) -> Any:
    """Runs a layer on a whole batch."""
    turn = (
        (lambda leaf: leaf) if call.batch_first else (lambda leaf: turned(leaf) if isinstance(leaf, Tensor) else leaf)
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


def _refusal(call: LayerCall | ForwardCall, what: str) -> UnsupportedLayerError:
    kind = type(call.layer).__name__
    fix = (
        "Pass grad_sample_mode='auto' or 'whole_model' if all samples share an input. Freeze it, or give its rule with "
        f"@register_grad_sampler({kind}), if it keeps samples apart."
    )
    if not call.name:
        fix = (
            "Give inputs that all samples share an axis of length 1, as in positions[None]. Pass "
            "grad_sample_mode='auto', which runs only some layers again, if others draw random numbers or keep state. "
            "If you call a single layer, put dropout into eval mode."
        )
    return UnsupportedLayerError(
        f"{_place(call)} {what}: it draws random numbers that a second run does not repeat, keeps state between "
        "calls, mixes the rows of a batch, has an input whose first axis only looks like the batch, or rounds by more "
        "than 5 % in half precision, where float32 helps.",
        fix=fix,
        where=call.name,
    )


def _place(call: LayerCall | ForwardCall) -> str:
    kind = type(call.layer).__name__
    return f"Layer '{call.name}' ({kind})" if call.name else f"The model ({kind})"


def _first_line(error: Exception) -> str:
    return next(iter(str(error).splitlines()), type(error).__name__)
