"""The fallback for any module: each row is run again alone, through ``torch.func``.

Note [replay]: the gradient of a row is that of a run with this row as a batch of one, so that whatever the module does,
the gradient belongs to the row alone. Where the replayed output is not the recorded one, it would be the gradient of
another computation, and the module is refused: it is random, keeps state, mixes rows, or has an input that only looks
batched.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, vjp, vmap
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils import _pytree as pytree

from dpengine.capture.record import LayerCall, turned
from dpengine.errors import UnsupportedLayerError
from dpengine.kernels.library import traced

from .embedding import refuse_unsafe_embedding
from .sampler import JointSampler

CHUNK_BYTES = 256 * 2**20  # of per-sample gradients in one vectorised run


def functional_sampler(module: nn.Module) -> JointSampler:
    """Per-sample gradients of all trainable parameters in a module and below it, by running each row alone.

    Inputs may be positional or keyword, in nested containers. A tensor whose axis 0 has the size of the batch is cut
    into rows; all else is shared by the rows. The output may be any nesting of tensors. A module that holds an
    embedding whose settings mix the rows raises ``UnsupportedLayerError``, and so does ``grads`` if rows run alone do
    not give the recorded output. Hooks of the caller's own on the module must be paused while ``grads`` runs.
    """
    for name, part in module.named_modules():
        refuse_unsafe_embedding(part, name)
    return JointSampler(_Fallback().grads, needs_output=True)


class _Fallback:
    """Remembers whether the module can be vectorised, which is tried once."""

    def __init__(self) -> None:
        self.vectorises = True

    def grads(self, call: LayerCall) -> dict[str, Tensor]:
        if call.output is None:
            raise ValueError(f"The call of layer '{call.name}' carries no output; the functional fallback needs it.")
        rows = _Rows.of(call)
        if rows.count == 0:
            return {name: parameter.new_zeros(0, *parameter.shape) for name, parameter in rows.parameters.items()}
        with _attributes_kept(call.layer):
            grads, outputs, obstacle = self._run(rows, call)
            if not rows.agree(outputs):
                raise _refusal(call, "gave another output when each row was run alone") from obstacle
        return grads

    def _run(self, rows: _Rows, call: LayerCall) -> tuple[dict[str, Tensor], list[Tensor], Exception | None]:
        obstacle = None
        try:
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
        leaves: Inputs, of all containers.
        spec: How the leaves make ``(args, kwargs)``.
        cut: Places of the leaves that carry the batch.
        used: Places, among the leaves of the output, that have a gradient.
        outputs: Recorded outputs at these places.
        grads: Their gradients.
        batch_first: Whether the module's own order has the batch on axis 0.
    """

    layer: nn.Module
    parameters: dict[str, Tensor]
    frozen: dict[str, Tensor]
    buffers: dict[str, Tensor]
    leaves: list[Any]
    spec: Any
    cut: list[int]
    used: list[int]
    outputs: list[Tensor]
    grads: list[Tensor]
    batch_first: bool

    @classmethod
    def of(cls, call: LayerCall) -> _Rows:
        outputs, grads = pytree.tree_leaves(call.output), pytree.tree_leaves(call.grad_output)
        if len(grads) != len(outputs):  # one gradient for each tensor among them
            given = iter(grads)
            grads = [next(given) if isinstance(leaf, Tensor) else None for leaf in outputs]
        used = [place for place, grad in enumerate(grads) if isinstance(grad, Tensor)]
        count, dtype = grads[used[0]].shape[0], grads[used[0]].dtype
        own = {name: (p.requires_grad, _widened(p, dtype)) for name, p in call.layer.named_parameters()}
        leaves, spec = pytree.tree_flatten((call.inputs, dict(call.kwargs)))
        return cls(
            layer=call.layer,
            parameters={name: p for name, (trainable, p) in own.items() if trainable},
            frozen={name: p for name, (trainable, p) in own.items() if not trainable},
            buffers={name: _widened(b, dtype) for name, b in call.layer.named_buffers()},
            leaves=leaves,
            spec=spec,
            cut=[i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor) and leaf.shape[:1] == (count,)],
            used=used,
            outputs=[outputs[place] for place in used],
            grads=[grads[place] for place in used],
            batch_first=call.batch_first,
        )

    @property
    def count(self) -> int:
        return self.grads[0].shape[0]

    def run(self, parameters: dict[str, Tensor], inputs: list[Tensor]) -> list[Tensor]:
        """The outputs that have a gradient, for a batch of any size; batch first, whatever the module's order."""
        leaves = list(self.leaves)
        for place, tensor in zip(self.cut, inputs, strict=True):
            leaves[place] = tensor
        if not self.batch_first:
            leaves = [turned(leaf) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        args, kwargs = pytree.tree_unflatten(leaves, self.spec)
        buffers = {name: buffer.clone() for name, buffer in self.buffers.items()}  # forward may write into them
        output = functional_call(self.layer, {**parameters, **self.frozen, **buffers}, args, kwargs)
        output_leaves = pytree.tree_leaves(output)
        used = [output_leaves[place] for place in self.used]
        return used if self.batch_first else [turned(one) for one in used]

    def vectorised(self) -> tuple[dict[str, Tensor], list[Tensor]]:
        """Gradients and outputs of all rows, by vmap."""

        def one(inputs: list[Tensor], grads: list[Tensor]) -> tuple[dict[str, Tensor], list[Tensor]]:
            batches_of_one = [tensor.unsqueeze(0) for tensor in inputs]
            pulled: Any = vjp(lambda parameters: self.run(parameters, batches_of_one), self.parameters)
            outputs, pull = pulled
            return pull([g.unsqueeze(0).to(o.dtype) for o, g in zip(outputs, grads, strict=True)])[0], outputs

        row_bytes = sum(p.numel() * p.element_size() for p in self.parameters.values())
        chunk = min(self.count, max(1, CHUNK_BYTES // max(1, row_bytes)))
        with sdpa_kernel(SDPBackend.MATH):  # the fused ones have no batching rule
            grads, outputs = vmap(one, chunk_size=chunk)([self.leaves[place] for place in self.cut], self.grads)
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
        # In order, since torch 2.13 dies in the backward of group_norm on a channels_last input.
        inputs = [self.leaves[place][row : row + 1].contiguous() for place in self.cut]
        with torch.enable_grad():
            one = self.run(parameters, inputs)
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

    def agree(self, outputs: list[Tensor]) -> bool:
        """Returns True if the replay gave the recorded values, up to rounding."""
        if _close(outputs, self.outputs, _ROUNDING[self.grads[0].dtype]):
            return True
        if not _close(outputs, self.outputs, _HALF_PRECISION):
            return False
        # Perhaps forward ran in half precision. Then the whole batch, run in the rows' precision, agrees with them.
        whole = self.run(self.parameters, [self.leaves[place] for place in self.cut])
        return _close(outputs, whole, _ROUNDING[self.grads[0].dtype])


def samples_alone(call: LayerCall, samples: Sequence[int]) -> Iterator[tuple[int, dict[str, Tensor]]]:
    """Yields samples of a call, each with the gradients of the layer's parameters by autograd.

    The call needs no output. Raises RuntimeError if the output of a sample alone is not that of the batch.
    """
    devices = {leaf.device for leaf in pytree.tree_leaves(call.grad_output) if isinstance(leaf, Tensor)}
    with torch.random.fork_rng([d for d in devices if d.type == "cuda"]), _attributes_kept(call.layer):
        rows = _Rows.of(call.replace(output=_output_of(call)) if call.output is None else call)
        with torch.no_grad():
            whole = rows.run({**rows.parameters}, [rows.leaves[place] for place in rows.cut])
        for sample in samples:
            grads, outputs = rows.alone(sample)
            if not _close(outputs, [o[sample : sample + 1] for o in whole], _ROUNDING[rows.grads[0].dtype]):
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
        return pytree.tree_map(turn, functional_call(call.layer, state, args, kwargs))


_ROUNDING = {torch.float64: 1e-9, torch.float32: 1e-3}
_HALF_PRECISION = 0.05


def _widened(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    return tensor.detach().to(dtype) if tensor.is_floating_point() else tensor.detach()


def _close(now: list[Tensor], then: list[Tensor], tolerance: float) -> bool:
    return all(_rows_close(n.detach(), t.detach(), tolerance) for n, t in zip(now, then, strict=True))


def _rows_close(now: Tensor, then: Tensor, tolerance: float) -> bool:
    """Returns True if the rows agree within a fraction of their largest entry, wherever ``then`` is finite."""
    if now.shape != then.shape:
        return False
    if traced(then):  # no numbers to look at; a pass before looked
        return True
    if now.numel() == 0:
        return True
    now, then = now.reshape(len(now), -1), then.reshape(len(then), -1)
    finite = then.isfinite()
    scale_B = torch.where(finite, then.abs(), 0).amax(dim=1)
    scale_B = scale_B + 0.01 * scale_B.median()  # a row near zero may have lost digits on its way there
    return bool(((now - then).abs() <= tolerance * scale_B.unsqueeze(1)).logical_or(~finite).all())


@contextlib.contextmanager
def _attributes_kept(module: nn.Module) -> Iterator[None]:
    """Puts back what forward stores on its modules: in a replay those are tensors of a finished transform."""
    before = [(vars(part), dict(vars(part))) for part in module.modules()]
    try:
        yield
    finally:
        for now, then in before:
            for name in now.keys() - then.keys():
                del now[name]
            now.update(then)


def _refusal(call: LayerCall, what: str) -> UnsupportedLayerError:
    kind = type(call.layer).__name__
    fix = (
        f"Give its rule with @register_grad_sampler({kind}), move dropout into an nn.Dropout outside it, or freeze it."
    )
    if not call.name:
        fix = (
            "Set the probability of dropout to 0, or move dropout out of it. Keep the batch on axis 0 of all inputs. "
            f"In modes 'auto', 'hooks' and 'ghost', @register_grad_sampler({kind}) gives its rule."
        )
    place = f"Layer '{call.name}'" if call.name else "The model"
    return UnsupportedLayerError(
        f"{place} ({kind}) {what}: it draws random numbers in forward, keeps state between calls, mixes the rows of a "
        "batch, or has an input whose first axis only looks like the batch.",
        fix=fix,
    )


def _first_line(error: Exception) -> str:
    return next(iter(str(error).splitlines()), type(error).__name__)
