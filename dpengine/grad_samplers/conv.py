"""Grad samplers of convolutions and transposed convolutions of one to three dimensions.

The weight gradient of a convolution is the correlation of its padded input with its output gradient. That of a
transposed convolution is the correlation of its padded output gradient with its input. One class represents both:
windows slide over ``wide``, and ``narrow`` holds the weight of each window.

Axes: B samples, G groups, N = B * G, T positions of ``narrow``, C channels of ``narrow`` in a group, F elements of a
window of ``wide`` over all channels of a group.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from dpengine.capture.record import LayerCall
from dpengine.kernels import products as native

from .bfloat16 import add_product, product
from .devices import fast_in_float64, memory_for, operations_per_byte, operations_per_second
from .gram import WORKSPACE_BYTES, gram_operations, gram_sq_norm, rounding_scale_of
from .sampler import Cost, GradSampler, argument

_SECONDS_PER_CALL = 2e-5  # overhead of one call from Python


def sliding_windows(
    wide: Tensor,
    kernel: Sequence[int],
    stride: Sequence[int],
    dilation: Sequence[int],
    sides: Sequence[tuple[int, int]],
) -> Tensor:
    """Returns a view of the windows of a padded tensor: leading axes, axes of the kernel, positions along each axis."""
    wide = F.pad(wide, _reversed(sides)) if any(map(any, sides)) else wide  # F.pad would copy without padding
    leading = wide.dim() - len(kernel)
    for axis, (size, step, spacing) in enumerate(zip(kernel, stride, dilation, strict=True), leading):
        wide = wide.unfold(axis, spacing * (size - 1) + 1, step)[..., ::spacing]
    position_axes = range(leading, leading + len(kernel))
    return wide.permute(*range(leading), *range(position_axes.stop, wide.dim()), *position_axes)


def padding_of(padding: str | Sequence[int], kernel: Sequence[int], dilation: Sequence[int]) -> list[tuple[int, int]]:
    """Returns the padding before and after each axis, from the ``padding`` argument of a convolution."""
    if padding == "valid":
        return [(0, 0)] * len(kernel)
    if padding == "same":  # if the total is odd, the end gets one more
        totals = [d * (k - 1) for d, k in zip(dilation, kernel, strict=True)]
        return [(total // 2, total - total // 2) for total in totals]
    return [(p, p) for p in padding]  # type: ignore[misc]


@dataclass(frozen=True, eq=False)
class _Correlation:
    """The weight gradient ``weight[c, f] = sum_t narrow[c, t] * window_t(wide)[f]`` of each sample and group."""

    wide: Tensor
    narrow: Tensor
    kernel: tuple[int, ...]
    stride: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int
    padding: tuple[int, ...]  # zeros to add on both sides of ``wide``

    @property
    def weight_shape(self) -> tuple[int, ...]:
        return (self.narrow.shape[1], self.wide.shape[1] // self.groups, *self.kernel)

    @property
    def positions(self) -> int:
        return math.prod(self.narrow.shape[2:])

    @property
    def features(self) -> tuple[int, int]:
        """The sizes C and F."""
        channels, *window = self.weight_shape
        return channels // self.groups, math.prod(window)

    def narrow_NCT(self) -> Tensor:
        return self.narrow.reshape(-1, self.features[0], self.positions)

    def windows_NFT(self) -> Tensor:
        sides = [(p, p) for p in self.padding]
        windows = sliding_windows(self.wide, self.kernel, self.stride, self.dilation, sides)
        return windows.reshape(-1, self.features[1], self.positions)

    def chunks(self) -> Iterator[_Correlation]:
        """Splits the batch so that the windows of a chunk fit into the workspace."""
        window_bytes = self.groups * self.features[1] * self.positions * self.wide.element_size()
        step = max(1, memory_for(self.wide.device, WORKSPACE_BYTES) // max(1, window_bytes))
        for wide, narrow in zip(self.wide.split(step), self.narrow.split(step), strict=True):
            yield replace(self, wide=wide, narrow=narrow)


def _acts_and_grads(call: LayerCall) -> tuple[Tensor, Tensor]:
    acts, grads = argument(call, 0, "input"), call.grad_output
    return acts.to(grads.dtype) if grads.dtype is torch.bfloat16 else acts, grads  # as the layer did under autocast


def _at_least_float32(tensor: Tensor) -> torch.dtype:
    return torch.promote_types(tensor.dtype, torch.float32)


def _correlation(call: LayerCall) -> _Correlation:
    layer: Any = call.layer
    wide, narrow = _acts_and_grads(call)
    sides = padding_of(layer.padding, layer.kernel_size, layer.dilation)
    if layer.transposed:
        wide, narrow = narrow, wide
        # Output positions outside all windows belong to ``output_padding``. Negative padding removes them.
        axes = zip(narrow.shape[2:], layer.stride, layer.dilation, layer.kernel_size, strict=True)
        covered = [(n - 1) * stride + dilation * (size - 1) + 1 for n, stride, dilation, size in axes]
        sides = [(p, length - p - size) for (p, _), length, size in zip(sides, covered, wide.shape[2:], strict=True)]
    padding = tuple(left for left, _ in sides)
    if layer.padding_mode != "zeros" or any(left != right for left, right in sides):
        wide = F.pad(wide, _reversed(sides), mode=_PAD_MODE[layer.padding_mode])
        padding = (0,) * len(sides)
    return _Correlation(wide, narrow, layer.kernel_size, layer.stride, layer.dilation, layer.groups, padding)


_PAD_MODE = {"zeros": "constant", "reflect": "reflect", "replicate": "replicate", "circular": "circular"}


def _weight_shape(call: LayerCall) -> tuple[int, ...]:
    weight: Any = call.layer.weight
    return tuple(weight.shape)


def _reversed(sides: Sequence[tuple[int, int]]) -> list[int]:
    return [size for side in reversed(sides) for size in side]


def _correlate(c: _Correlation, weight_shape: Sequence[int], groups: int) -> Tensor:
    """Computes the weight gradient of the batch by the backward kernel of torch, at least in float32."""
    wide, narrow = (tensor.to(_at_least_float32(tensor)) for tensor in (c.wide, c.narrow))
    shape_only = wide.new_zeros(1).expand(weight_shape)  # the kernel reads only its shape
    zeros = [0] * len(c.kernel)
    args = (c.stride, c.padding, c.dilation, False, zeros, groups, [False, True, False])
    return torch.ops.aten.convolution_backward(narrow, wide, shape_only, None, *args)[1]


def _grouped_grad(call: LayerCall) -> Tensor:
    """Converts samples to groups, so that one call of the backward kernel computes all gradients."""
    batch_size, shape = call.batch_size, _weight_shape(call)
    if batch_size == 0:
        return call.grad_output.new_zeros(0, *shape, dtype=_at_least_float32(call.grad_output))
    c = _correlation(call)
    # Flattened first, because the strides of axes of size 1 may make the kernel assume channels_last.
    wide, narrow = (t.reshape(-1).view(1, -1, *t.shape[2:]) for t in (c.wide, c.narrow))
    folded = replace(c, wide=wide, narrow=narrow)
    return _correlate(folded, (batch_size * shape[0], *shape[1:]), batch_size * c.groups).reshape(batch_size, *shape)


def _new_grads(call: LayerCall) -> Tensor:
    return call.grad_output.new_empty(call.batch_size, *_weight_shape(call), dtype=_at_least_float32(call.grad_output))


def _looped_grad(call: LayerCall) -> Tensor:
    """Calls the backward kernel for each sample."""
    grads = _new_grads(call)
    _write_looped_grad(call, grads)
    return grads


def _write_looped_grad(call: LayerCall, out: Tensor) -> None:
    c = _correlation(call)
    for i, grad in enumerate(out):
        sample = replace(c, wide=c.wide[i : i + 1], narrow=c.narrow[i : i + 1])
        grad.copy_(_correlate(sample, c.weight_shape, c.groups))


def _unfolded_grad(call: LayerCall) -> Tensor:
    """Computes gradients as matrix products of copies of all windows."""
    grads = _new_grads(call)
    _write_unfolded_grad(call, grads)
    return grads


def _write_unfolded_grad(call: LayerCall, out: Tensor) -> None:
    c = _correlation(call)
    by_group = out.view(call.batch_size * c.groups, *c.features)
    done = 0
    for chunk in c.chunks():
        narrow = chunk.narrow_NCT()
        product(narrow, chunk.windows_NFT().transpose(1, 2), by_group[done : done + len(narrow)])
        done += len(narrow)


def _windows(call: LayerCall) -> native.Windows:
    c = _correlation(call)
    wide = F.pad(c.wide, _reversed([(p, p) for p in c.padding])) if any(c.padding) else c.wide
    return native.Windows(wide, c.narrow, c.groups, c.kernel, c.stride, c.dilation)


def _compiled_grad(call: LayerCall) -> Tensor:
    """Computes gradients by compiled code, which copies a few windows at a time."""
    grads = _new_grads(call)
    _write_compiled_grad(call, grads)
    return grads


def _write_compiled_grad(call: LayerCall, out: Tensor) -> Tensor | None:
    windows = _windows(call)
    if windows.is_supported():
        return native.window_grads(windows, out)
    _write_unfolded_grad(call, out)
    return None


def _compiled_sq_norm(call: LayerCall) -> Tensor:
    windows = _windows(call)
    return native.window_grads(windows) if windows.is_supported() else _gram_sq_norm(call)


def _gram_sq_norm(call: LayerCall) -> Tensor:
    """Computes squared norms from the Gram matrix of copies of all windows."""
    if call.batch_size == 0:
        return call.grad_output.new_zeros(0, dtype=_at_least_float32(call.grad_output))
    c = _correlation(call)
    parts = [gram_sq_norm(p.narrow_NCT().transpose(1, 2), p.windows_NFT().transpose(1, 2)) for p in c.chunks()]
    return torch.cat(parts).view(-1, c.groups).sum(dim=1)


def _shifted_sq_norm(call: LayerCall) -> Tensor:
    """Computes squared norms from the Gram matrix of the padded tensor itself, in float64.

    The product of two windows is ``sum_k <wide[t + k], wide[s + k]>`` over the positions k of the kernel. It is a sum
    of shifted parts of this Gram matrix, so no window is copied and no product is computed twice.
    """
    if call.batch_size == 0:
        return call.grad_output.new_zeros(0, dtype=_at_least_float32(call.grad_output))
    c = _correlation(call)
    wide = F.pad(c.wide, _reversed([(p, p) for p in c.padding])).double()
    wide = wide.reshape(-1, wide.shape[1] // c.groups, *wide.shape[2:])
    narrow_NCT = c.narrow_NCT().double()
    shape, size = wide.shape[2:], math.prod(wide.shape[2:])
    step = max(1, memory_for(wide.device, WORKSPACE_BYTES) // (8 * (size**2 + 2 * c.positions**2)))
    sq_norms = []
    for wide_N, narrow_N in zip(wide.flatten(2).split(step), narrow_NCT.split(step), strict=True):
        gram = torch.bmm(wide_N.transpose(1, 2), wide_N).view(-1, *shape, *shape)
        first, *others = (gram[(slice(None), *shift, *shift)] for shift in _shifts(c))
        windows = first.clone()
        for other in others:
            windows += other
        windows = windows.view(-1, c.positions**2)
        narrow = torch.bmm(narrow_N.transpose(1, 2), narrow_N).view(-1, c.positions**2)
        sq_norms.append(torch.bmm(windows.unsqueeze(1), narrow.unsqueeze(2)).flatten())
    return torch.cat(sq_norms).clamp(min=0).view(-1, c.groups).sum(dim=1)


def _shifts(c: _Correlation) -> Iterator[tuple[slice, ...]]:
    """Yields the positions of ``wide`` that each position of the kernel is multiplied with, as slices of the axes."""
    axes = zip(c.kernel, c.stride, c.dilation, c.narrow.shape[2:], strict=True)
    starts = [
        [slice(k * dilation, k * dilation + (n - 1) * stride + 1, stride) for k in range(size)]
        for size, stride, dilation, n in axes
    ]
    yield from itertools.product(*starts)


def _weight_cost(call: LayerCall) -> Cost:
    if call.batch_size == 0:
        return Cost({"grouped": 0.0}, {}, 0.0)
    c = _correlation(call)
    (channels, window), length, device = c.features, c.positions, c.wide.device
    product = 2.0 * length * channels * window * c.groups
    traffic = 3.0 * c.wide.itemsize * length * window * c.groups * operations_per_byte(device)
    one_call = _SECONDS_PER_CALL * operations_per_second(device)
    # The grouped kernel is slow for few channels, and for many channels with few positions.
    slow = c.wide.shape[1] // c.groups <= 4 < channels or length * (channels + window) < channels * window
    grads = {"grouped": product * (4 if slow else 1), "unfold": product + traffic, "loop": 2 * product + one_call}
    if c.wide.dtype is torch.bfloat16:  # discarded gradients are recomputed, and kernels differ in the order of sums
        grads = {"unfold": grads["unfold"]}
    gram = gram_operations(length, (channels, window), c.wide.dtype, device)
    sq_norms = {} if gram is None else {"gram": gram * c.groups + traffic}
    if native.Windows(c.wide, c.narrow, c.groups, c.kernel, c.stride, c.dilation).is_supported():
        grads["compiled"] = sq_norms["compiled"] = 1.5 * product + one_call / call.batch_size
    if fast_in_float64(device) and c.wide.dtype is not torch.float64:
        padded_length = math.prod(n + 2 * p for n, p in zip(c.wide.shape[2:], c.padding, strict=True))
        shifts = math.prod(c.kernel) * 16 * operations_per_byte(device)
        operations = 4 * padded_length**2 * c.wide.shape[1] + length**2 * (4 * channels + shifts) * c.groups
        if 8 * (padded_length**2 + 2 * length**2) <= memory_for(device, WORKSPACE_BYTES):  # memory of one sample
            sq_norms["shifted gram"] = float(operations)
    return Cost(grads, sq_norms, product)


def _weight_sum(call: LayerCall, factor_B: Tensor) -> Tensor:
    if call.batch_size == 0:
        return call.grad_output.new_zeros(_weight_shape(call), dtype=_at_least_float32(call.grad_output))
    layer: Any = call.layer
    if call.grad_output.dtype is torch.bfloat16 and layer.groups == 1:
        return _unfolded_sum(call, factor_B)
    acts, grads = (tensor.to(_at_least_float32(tensor)) for tensor in _acts_and_grads(call))
    if acts.numel() < grads.numel():
        acts = acts * _broadcast(factor_B, acts)
    else:
        grads = grads * _broadcast(factor_B, grads)
    c = _correlation(call.replace(inputs=(acts,), grad_output=grads))
    return _correlate(c, c.weight_shape, c.groups)


def _unfolded_sum(call: LayerCall, factor_B: Tensor) -> Tensor:
    """Computes the sum as products of bfloat16 matrices: copies of all windows, and three terms of the weighted tensor.

    The sum of the three terms is the weighted tensor in float32.
    """
    c = _correlation(call)
    total_CF = call.grad_output.new_zeros(c.features, dtype=torch.float32)
    narrow = c.narrow.float()
    weighted = narrow * _broadcast(factor_B, narrow)
    for chunk in replace(c, narrow=weighted).chunks():
        windows_MF = chunk.windows_NFT().transpose(1, 2).flatten(0, 1)
        rest_MC = chunk.narrow_NCT().transpose(1, 2).flatten(0, 1)
        for _ in range(3):
            term_MC = rest_MC.bfloat16()
            rest_MC = rest_MC - term_MC
            add_product(total_CF, term_MC.T, windows_MF, 1.0, 1.0)
    return total_CF.view(c.weight_shape)


def _weight_rounding_scale(call: LayerCall) -> Tensor:
    # At most as many windows as the kernel has positions contain an element, and padding repeats it at most `repeats`
    # times.
    layer: Any = call.layer
    sides = padding_of(layer.padding, layer.kernel_size, layer.dilation)
    repeats = 1 if layer.padding_mode == "zeros" else math.prod(1 + left + right for left, right in sides)
    shared = math.sqrt(repeats * math.prod(layer.kernel_size))
    acts, grads = _acts_and_grads(call)
    positions = math.prod((acts if layer.transposed else grads).shape[2:])
    return rounding_scale_of(positions, acts, grads) * shared


def _broadcast(factor_B: Tensor, tensor: Tensor) -> Tensor:
    return factor_B.to(tensor.dtype).view(-1, *[1] * (tensor.dim() - 1))


def _bias_grad(call: LayerCall) -> Tensor:
    return call.grad_output.flatten(2).sum(dim=2, dtype=_at_least_float32(call.grad_output))


def _bias_windows(call: LayerCall) -> native.Windows:
    return native.Windows.of_ones(call.grad_output, features_last=False)


SAMPLERS = {
    "weight": GradSampler(
        grad=_grouped_grad,
        sq_norm=_gram_sq_norm,
        weighted_sum=_weight_sum,
        rounding_scale=_weight_rounding_scale,
        cost=_weight_cost,
        more_grads={"unfold": _unfolded_grad, "loop": _looped_grad, "compiled": _compiled_grad},
        more_sq_norms={"shifted gram": _shifted_sq_norm, "compiled": _compiled_sq_norm},
        write_grads={"unfold": _write_unfolded_grad, "loop": _write_looped_grad, "compiled": _write_compiled_grad},
        grad_name="grouped",
        sq_norm_name="gram",
        settings=("kernel_size", "stride", "padding", "dilation", "groups", "padding_mode", "transposed"),
        job=_windows,
        stacked_name="compiled",
        accepts_bfloat16=True,
    ),
    "bias": GradSampler(_bias_grad, settings=(), job=_bias_windows, accepts_bfloat16=True),
}
