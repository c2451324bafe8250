"""Convolutions and transposed convolutions of one to three dimensions.

The weight gradient of a convolution is the correlation of its padded input with its output gradient. That of a
transposed convolution is the correlation of its padded output gradient with its input. So one record serves both:
``wide`` is slid over, ``narrow`` says by how much each window counts.

Axes: B rows, G groups, N = B * G, T positions of ``narrow``, C channels of ``narrow`` in a group, F values in a window
of ``wide`` over all channels of a group.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from dpengine.capture import LayerCall

from .arguments import argument
from .gram import WORKSPACE_BYTES, gram_pays, gram_sq_norm, spread_of
from .precision import full_precision
from .sampler import GradSampler


@dataclass(frozen=True, eq=False)
class _Correlation:
    """A weight gradient to be: ``weight[c, f] = sum_t narrow[c, t] * window_t(wide)[f]``, for each row and group."""

    wide: Tensor
    narrow: Tensor
    kernel: tuple[int, ...]
    stride: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int
    padding: tuple[int, ...]  # zeros on both sides of ``wide``, on top of what it holds

    @property
    def weight_shape(self) -> tuple[int, ...]:
        return (self.narrow.shape[1], self.wide.shape[1] // self.groups, *self.kernel)

    @property
    def positions(self) -> int:
        return math.prod(self.narrow.shape[2:])

    @property
    def features(self) -> tuple[int, int]:
        """C and F."""
        channels, *window = self.weight_shape
        return channels // self.groups, math.prod(window)

    def narrow_NCT(self) -> Tensor:
        return self.narrow.reshape(-1, self.features[0], self.positions)

    def windows_NFT(self) -> Tensor:
        wide = F.pad(self.wide, _reversed([(p, p) for p in self.padding]))
        for axis, (size, stride, dilation) in enumerate(zip(self.kernel, self.stride, self.dilation, strict=True), 2):
            wide = wide.unfold(axis, dilation * (size - 1) + 1, stride)[..., ::dilation]
        spatial = len(self.kernel)
        wide = wide.permute(0, 1, *range(2 + spatial, 2 + 2 * spatial), *range(2, 2 + spatial))
        return wide.reshape(-1, self.features[1], self.positions)

    def some_rows(self) -> Iterator[_Correlation]:
        """Cuts the batch so that the windows of a part stay small."""
        window_bytes = self.groups * self.features[1] * self.positions * self.wide.element_size()
        step = max(1, WORKSPACE_BYTES // max(1, window_bytes))
        for wide, narrow in zip(self.wide.split(step), self.narrow.split(step), strict=True):
            yield replace(self, wide=wide, narrow=narrow)


def _correlation(call: LayerCall) -> _Correlation:
    layer: Any = call.layer
    wide, narrow = argument(call, 0, "input"), call.grad_output
    sides = _padding(layer)
    if layer.transposed:
        wide, narrow = narrow, wide
        # Output positions that no window reaches belong to ``output_padding``; trim them where padding left them in.
        reach = zip(narrow.shape[2:], layer.stride, layer.dilation, layer.kernel_size, strict=True)
        full = [(n - 1) * stride + dilation * (size - 1) + 1 for n, stride, dilation, size in reach]
        sides = [(p, n - p - have) for (p, _), n, have in zip(sides, full, wide.shape[2:], strict=True)]
    padding = tuple(left for left, _ in sides)
    if layer.padding_mode != "zeros" or any(left != right for left, right in sides):
        wide = F.pad(wide, _reversed(sides), mode=_PAD_MODE[layer.padding_mode])
        padding = (0,) * len(sides)
    return _Correlation(wide, narrow, layer.kernel_size, layer.stride, layer.dilation, layer.groups, padding)


def _padding(layer: Any) -> list[tuple[int, int]]:
    """Padding of the input, left and right of each axis."""
    if layer.padding == "valid":
        return [(0, 0)] * len(layer.kernel_size)
    if layer.padding == "same":  # the odd one goes to the right
        totals = [d * (k - 1) for d, k in zip(layer.dilation, layer.kernel_size, strict=True)]
        return [(total // 2, total - total // 2) for total in totals]
    return [(p, p) for p in layer.padding]


_PAD_MODE = {"zeros": "constant", "reflect": "reflect", "replicate": "replicate", "circular": "circular"}


def _weight_shape(call: LayerCall) -> tuple[int, ...]:
    weight: Any = call.layer.weight
    return tuple(weight.shape)


def _reversed(sides: Sequence[tuple[int, int]]) -> list[int]:
    return [size for side in reversed(sides) for size in side]


def _correlate(c: _Correlation, weight_shape: Sequence[int], groups: int) -> Tensor:
    """One ordinary weight gradient."""
    shape_only = c.wide.new_zeros(1).expand(weight_shape)  # zero strides: only the shape is read
    zeros = [0] * len(c.kernel)
    args = (c.stride, c.padding, c.dilation, False, zeros, groups, [False, True, False])
    return torch.ops.aten.convolution_backward(c.narrow, c.wide, shape_only, None, *args)[1]


@full_precision()
def _weight_grad(call: LayerCall) -> Tensor:
    rows = call.batch_size
    if rows == 0:
        return call.grad_output.new_zeros(0, *_weight_shape(call))
    c = _correlation(call)
    channels, *window = c.weight_shape
    if _windows_pay(c):
        parts = [torch.bmm(part.narrow_NCT(), part.windows_NFT().transpose(1, 2)) for part in c.some_rows()]
        return torch.cat(parts).reshape(rows, channels, *window)
    # Rows become groups, so that one call of the backward kernel gives the gradients of all.
    fold = replace(
        c, wide=c.wide.reshape(1, -1, *c.wide.shape[2:]), narrow=c.narrow.reshape(1, -1, *c.narrow.shape[2:])
    )
    return _correlate(fold, (rows * channels, *window), rows * c.groups).reshape(rows, channels, *window)


def _windows_pay(c: _Correlation) -> bool:
    """Whether copying windows and multiplying beats the grouped kernel, which is slow at both ends of the range."""
    # Measured on CPU: 2 to 4 times faster for few input channels, and for small maps with many channels.
    channels, window = c.features
    return c.wide.shape[1] // c.groups <= 4 < channels or c.positions * (channels + window) < channels * window


@full_precision()
def _weight_sq_norm(call: LayerCall) -> Tensor:
    if call.batch_size == 0:
        return call.grad_output.new_zeros(0)
    c = _correlation(call)
    parts = [gram_sq_norm(p.narrow_NCT().transpose(1, 2), p.windows_NFT().transpose(1, 2)) for p in c.some_rows()]
    return torch.cat(parts).view(-1, c.groups).sum(dim=1)


def _weight_norm_pays(call: LayerCall) -> bool:
    if call.batch_size == 0:
        return True
    layer: Any = call.layer
    narrow = argument(call, 0, "input") if layer.transposed else call.grad_output
    channels, *window = _weight_shape(call)
    features = (channels // layer.groups, math.prod(window))
    return gram_pays(math.prod(narrow.shape[2:]), features, narrow.dtype, narrow.device)


@full_precision()
def _weight_sum(call: LayerCall, factor_B: Tensor) -> Tensor:
    if call.batch_size == 0:
        return call.grad_output.new_zeros(_weight_shape(call))
    acts, grads = argument(call, 0, "input"), call.grad_output
    if acts.numel() < grads.numel():
        acts = acts * _beside(factor_B, acts)
    else:
        grads = grads * _beside(factor_B, grads)
    c = _correlation(call.replace(inputs=(acts,), grad_output=grads))
    return _correlate(c, c.weight_shape, c.groups)


def _weight_spread(call: LayerCall) -> Tensor:
    # No input is in more windows than the kernel has taps, nor repeated more often than padding reaches.
    layer: Any = call.layer
    repeats = 1 if layer.padding_mode == "zeros" else math.prod(1 + left + right for left, right in _padding(layer))
    shared = math.sqrt(repeats * math.prod(layer.kernel_size))
    acts, grads = argument(call, 0, "input"), call.grad_output
    positions = math.prod((acts if layer.transposed else grads).shape[2:])
    return spread_of(positions, acts, grads) * shared


def _beside(factor_B: Tensor, tensor: Tensor) -> Tensor:
    return factor_B.to(tensor.dtype).view(-1, *[1] * (tensor.dim() - 1))


def _bias_grad(call: LayerCall) -> Tensor:
    return call.grad_output.flatten(2).sum(dim=2)


SAMPLERS = {
    "weight": GradSampler(
        grad=_weight_grad,
        sq_norm=_weight_sq_norm,
        weighted_sum=_weight_sum,
        norm_pays=_weight_norm_pays,
        spread=_weight_spread,
    ),
    "bias": GradSampler(_bias_grad),
}
