"""Compiled pass: the autograd function of the model, and the grad mode with its gradients.

Axes: B samples, P samples after padding, K groups of parameters that are clipped together.
"""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from dpengine.capture.forward_state import ForwardState
from dpengine.capture.record import LayerCall, Use
from dpengine.capture.tap import repeated_backward
from dpengine.errors import UnsupportedLayerError
from dpengine.grad_modes.flat_buffer import FlatBuffer, Sums
from dpengine.grad_modes.strategy import AbstractGradients
from dpengine.layers.not_twice_differentiable import not_twice_differentiable

from .graphs import Graphs

_version = operator.attrgetter("_version")
_REMEDY = "Leave out compile= in make_private"


def called_twice() -> UnsupportedLayerError:
    """Returns the error for several calls of a model before one backward pass."""
    return UnsupportedLayerError(
        "The model was called more than once before one backward pass. Each compiled call computes its own norms, so "
        "the gradients of the calls cannot be clipped together.",
        fix=f"{_REMEDY}, or call the model once, on all samples.",
    )


class CompiledPassFunction(torch.autograd.Function):
    """Runs the graph of the outputs in the forward pass, and the graph of the norms in the backward pass."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, compiled: CompiledPass) -> tuple[Tensor, ...]:  # type: ignore[override]
        ctx.compiled = compiled
        outputs = compiled.forward()
        pairs = zip(outputs, compiled.graphs.layout.differentiable, strict=True)
        ctx.mark_non_differentiable(*(output for output, differentiable in pairs if not differentiable))
        return tuple(outputs)

    @staticmethod
    @not_twice_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, None]:
        compiled, ctx.compiled = ctx.compiled, None
        if compiled is None:
            raise repeated_backward("the model")
        compiled.backward(grads)
        return None, None


class CompiledPass(AbstractGradients):
    """Grad mode of one compiled pass.

    Args:
        graphs: The compiled functions.
        state: Parameters and buffers of the model.
        batch: Tensor arguments of the model. Those that have the batch on axis 0 are padded.
        padded: Whether each of these tensors is padded.
        num_samples: Number of samples without padding.
        on_backward: Called with this object in the backward pass.
    """

    def __init__(
        self,
        graphs: Graphs,
        state: Sequence[Tensor],
        batch: Sequence[Tensor],
        padded: Sequence[bool],
        num_samples: int,
        on_backward: Callable[[CompiledPass], None],
    ):
        self.graphs = graphs
        self._batch = batch
        self._padded = padded
        self._num_samples = num_samples
        self._on_backward = on_backward
        # To draw the same random numbers in a second run.
        self._forward_state = ForwardState.now(batch) if graphs.draws else None
        self._state = state
        self._tensors = [*state, *batch]
        self._grads: list[Tensor] = []
        self._empty = False

    def forward(self) -> list[Tensor]:
        """Returns the outputs of the model, without padding."""
        graphs, begin = self.graphs, len(self._tensors)
        self._tensors += graphs.outputs(self._tensors)
        self._read = [self._tensors[i] for i in graphs.norms.argument_indices if i < len(self._tensors)]
        self._versions = list(map(_version, self._read))
        outputs = self._tensors[begin : begin + len(graphs.layout.differentiable)]
        if self._num_samples == graphs.num_samples:
            return outputs
        return [_without_padding(output, self._num_samples) for output in outputs]

    def backward(self, grads: Sequence[Tensor]) -> None:
        """Computes the norms from the gradients of the outputs."""
        if list(map(_version, self._read)) != self._versions:
            raise RuntimeError(
                "A parameter, an input or an output of the model, one of the variables needed for gradient "
                "computation, has been modified by an inplace operation after the forward pass. Use an out-of-place "
                "operation."
            )
        pairs = zip(grads, self.graphs.layout.differentiable, strict=True)
        self._grads = [
            _with_zero_padding(grad, self.graphs.num_samples) for grad, differentiable in pairs if differentiable
        ]
        self._compute_norms()
        self._on_backward(self)

    def _compute_norms(self) -> None:
        self._tensors += self._grads
        results = self.graphs.norms(self._tensors)
        self._tensors += results
        self.sq_norms_PK = results[0]

    def receive(self, call: LayerCall, uses: Mapping[str, Use], rule: Any) -> None:
        raise called_twice()

    def receive_rows(self, use: Use, grad: Tensor) -> None:
        raise called_twice()

    @property
    def rows(self) -> Mapping[str, int]:
        return {"the model": self._num_samples} if self._tensors else {}

    @property
    def parameters(self) -> Mapping[nn.Parameter, str]:
        return self.graphs.parameters

    def sq_norms(self, groups: Mapping[nn.Parameter, int], num_groups: int, scale: float) -> Tensor:
        return self.sq_norms_PK[: self._num_samples] * scale**2

    def keep(self, parameters: Collection[nn.Parameter]) -> None:
        """Does nothing, because the graphs compute gradients of clipped parameters only."""

    def drop(self, rows_B: Tensor) -> None:
        """Runs the pass again with dropped samples replaced by a copy of a kept one with zero output gradients."""
        if bool((self.sq_norms_PK < 0).any()):
            raise UnsupportedLayerError(
                "The gradient of a sample is at the index of another one: for values that did not occur when the "
                "compiled code was checked, the model changes the positions of samples.",
                fix=f"{_REMEDY}.",
            )
        kept = (~rows_B).nonzero().flatten()
        self._empty = len(kept) == 0
        if self._empty:
            return
        index_P = torch.arange(self.graphs.num_samples, device=rows_B.device) % len(rows_B)
        dropped_P = rows_B[index_P]
        source_P = torch.where(dropped_P, kept[0], index_P)
        batch = [t[source_P.to(t.device)] if padded else t for t, padded in zip(self._batch, self._padded, strict=True)]
        self._tensors = [*self._state, *batch]
        with contextlib.nullcontext() if self._forward_state is None else self._forward_state.random_again():
            self._tensors += self.graphs.outputs(self._tensors)
        self._grads = [_with_zero_gradients(grad, dropped_P) for grad in self._grads]
        self._compute_norms()

    def add_sums(self, groups: Mapping[nn.Parameter, int], weights_BK: Tensor, scale: float, into: Sums) -> None:
        if self._empty:
            return
        weights_PK = weights_BK
        if self._num_samples < self.graphs.num_samples:
            weights_PK = weights_BK.new_zeros(self.sq_norms_PK.shape)
            weights_PK[: self._num_samples] = weights_BK
        assert isinstance(into, FlatBuffer)
        self._tensors.append(weights_PK.to(self.sq_norms_PK.dtype))
        into.add_all(self.graphs.sums(self._tensors), scale)

    def clear(self) -> None:
        self._tensors, self._grads, self._read, self._batch = [], [], [], []


def padded(tensor: Tensor, num_samples: int) -> Tensor:
    """Pads a tensor to ``num_samples`` samples with copies of its samples."""
    if len(tensor) == num_samples:
        return tensor
    return tensor[torch.arange(num_samples, device=tensor.device) % len(tensor)]


def _without_padding(output: Tensor, num_samples: int) -> Tensor:
    """Returns a copy, because autograd forbids in-place operations on views that a function returns."""
    return output[:num_samples].clone()


def _with_zero_padding(grad: Tensor, num_samples: int) -> Tensor:
    if len(grad) == num_samples:
        return grad.contiguous()
    return torch.cat((grad, grad.new_zeros(()).expand(num_samples - len(grad), *grad.shape[1:])))


def _with_zero_gradients(grad: Tensor, dropped_P: Tensor) -> Tensor:
    return grad.masked_fill(dropped_P.to(grad.device).view(-1, *[1] * (grad.dim() - 1)), 0)
