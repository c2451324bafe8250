"""Selects, zeroes and widens samples of a layer call, and combines the samples of one privacy unit.

Axes: B samples, U units.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dpengine.capture.record import LayerCall
from dpengine.capture.tensors import map_tensors, tensors_in
from dpengine.grad_samplers.devices import multiplies_bfloat16
from dpengine.grad_samplers.sampler import GradSampler
from dpengine.kernels.library import traced

NARROW = frozenset({torch.float16, torch.bfloat16})


def wide(dtype: torch.dtype) -> torch.dtype:
    """Returns the dtype for norms and sums of gradients with the given dtype."""
    return torch.float64 if dtype is torch.float64 else torch.float32


def widened(call: LayerCall) -> LayerCall:
    """Returns the call with half-precision tensors in float32, the lowest precision of norms and sums.

    A call that is rerun with its random numbers does not change, because they may depend on the dtype.
    """
    if call.per_sample_run is not None:
        return call
    if not any(tensor.dtype in NARROW for tensor in call.tensors()):
        return call
    return call.map(lambda tensor: tensor.float() if tensor.dtype in NARROW else tensor)


def stays_narrow(call: LayerCall, samplers: Iterable[GradSampler]) -> bool:
    """Returns True if the grad samplers accept the bfloat16 tensors of a call. Traced products need float32."""
    grads = call.grad_output
    if not isinstance(grads, Tensor) or grads.dtype is not torch.bfloat16 or traced(grads):
        return False
    return multiplies_bfloat16(grads.device) and all(sampler.accepts_bfloat16 for sampler in samplers)


def without_rows(call: LayerCall, rows_B: Tensor) -> LayerCall:
    """Returns the call with zeros for the samples where ``rows_B`` is True, which also removes NaN."""

    def dropped(leaf: Tensor) -> Tensor:
        return zeroed(leaf, rows_B) if leaf.is_floating_point() else leaf

    if is_batched(call, rows_B.shape[0]):
        return call.map(dropped)
    return call.replace(grad_output=map_tensors(dropped, call.grad_output))


def zeroed(tensor: Tensor, rows_B: Tensor) -> Tensor:
    """Returns the tensor with zeros where ``rows_B``, which may be on another device, is True."""
    return tensor.masked_fill(rows_B.to(tensor.device).view(-1, *[1] * (tensor.dim() - 1)), 0)


def is_batched(call: LayerCall, rows: int) -> bool:
    """Returns True if axis 0 of every input is the batch.

    Returns False for index tensors among several tensors: they may be the flat input of an ``EmbeddingBag``, whose
    length equals the batch size by coincidence.
    """
    tensors = tensors_in((call.inputs, dict(call.kwargs)))
    sized = all(tensor.dim() > 0 and tensor.shape[0] == rows for tensor in tensors)
    return sized and (len(tensors) == 1 or all(tensor.is_floating_point() for tensor in tensors))


def slice_batch(call: LayerCall, start: int, stop: int) -> LayerCall:
    """Returns samples ``start`` to ``stop`` of a call for which ``is_batched`` is True."""
    return call.map(lambda tensor: tensor[start:stop])


def shapes_of(call: LayerCall) -> tuple[Any, ...]:
    """Returns the shape without axis 0, and the dtype, of every tensor of a call. They determine the method."""
    return tuple([(tensor.shape[1:], tensor.dtype) for tensor in call.tensors()])


@dataclass(frozen=True, eq=False)
class Units:
    """Privacy unit of each sample.

    Attributes:
        unit_B: Index of each sample's unit, from 0.
        count: Number of units.
        mean: True if the gradient of a unit is the mean over its samples; False if it is their sum.
    """

    unit_B: Tensor
    count: int
    mean: bool

    def weights(self) -> Tensor:
        """Returns the weight of each sample within its unit, ``(B,)``."""
        if not self.mean:
            return torch.ones(len(self.unit_B))
        return 1 / torch.bincount(self.unit_B, minlength=self.count)[self.unit_B].double()

    def add_rows(self, out: Tensor, grad: Tensor, start: int, stop: int) -> None:
        """Adds gradients of samples ``(stop - start, *param.shape)`` to those of units ``(U, *param.shape)``."""
        weight = self.weights()[start:stop].to(out)
        weighted = grad.to(out.dtype) * weight.view(-1, *[1] * (grad.dim() - 1))
        out.index_add_(0, self.unit_B[start:stop].to(out.device), weighted)
