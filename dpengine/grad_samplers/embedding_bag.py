"""Grad sampler of embedding bags. Each bag is a sample; its output is the sum, mean or maximum of its entries.

Axes: B bags, N uses of entries in all bags, M distinct pairs of bag and entry, V entries, D features.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from dpengine.capture.record import LayerCall

from .embedding import Uses, dense_grads, merge_uses, sum_per_sample, sum_weighted, weight_of
from .gram import product_of_norms
from .sampler import GradSampler, argument


def _bags(call: LayerCall) -> tuple[Tensor, Tensor]:
    """Returns the bag and the entry of each use, ``(N,)`` each, including padding."""
    layer: Any = call.layer
    entries, offsets = argument(call, 0, "input"), argument(call, 1, "offsets")
    bags = torch.arange(call.batch_size, device=entries.device)
    if entries.dim() == 2:
        return bags.repeat_interleave(entries[:1].numel()), entries.reshape(-1)
    if not layer.include_last_offset:
        offsets = torch.cat([offsets, offsets.new_tensor([len(entries)])])
    bag_N = bags.repeat_interleave(offsets.diff())
    return bag_N, entries[: len(bag_N)]


def _uses(call: LayerCall) -> tuple[Uses, Tensor]:
    """Returns the uses without padding, and the weight of each use in its bag, ``(N,)``."""
    layer: Any = call.layer
    bag_N, entry_N = _bags(call)
    weights = argument(call, 2, "per_sample_weights")
    if weights is None:
        weight_N = torch.ones_like(entry_N, dtype=call.grad_output.dtype)
    else:
        weight_N = weights.reshape(-1)[: len(entry_N)].to(call.grad_output.dtype)
    if layer.padding_idx is not None:
        not_padding_N = entry_N != layer.padding_idx
        bag_N, entry_N, weight_N = bag_N[not_padding_N], entry_N[not_padding_N], weight_N[not_padding_N]
    if layer.mode == "mean":
        weight_N = weight_N / bag_N.bincount(minlength=call.batch_size)[bag_N]
    return Uses(bag_N, entry_N, call.batch_size), weight_N


def _pairs(call: LayerCall) -> tuple[Uses, Tensor]:
    return merge_uses(*_uses(call), weight_of(call).shape[0])


def _grad(call: LayerCall) -> Tensor:
    if call.layer.mode == "max":
        entries_BD, grads_BD = _maxima(call)
        grads_BVD = grads_BD.new_zeros(call.batch_size, *weight_of(call).shape)
        return grads_BVD.scatter_(1, entries_BD.unsqueeze(1), grads_BD.unsqueeze(1))
    pairs, weight_M = _pairs(call)
    return dense_grads(pairs, weight_M.unsqueeze(1) * call.grad_output[pairs.sample_N], weight_of(call))


def _sq_norm(call: LayerCall) -> Tensor:
    if call.layer.mode == "max":
        return product_of_norms(_maxima(call)[1]).square()
    # Each entry of a bag gets the gradient of the bag times its weight, so the norm is a product of norms.
    pairs, weight_M = _pairs(call)
    return sum_per_sample(pairs, weight_M.square()) * product_of_norms(call.grad_output).square()


def _weighted_sum(call: LayerCall, factor_B: Tensor) -> Tensor:
    if call.layer.mode == "max":
        entries_BD, grads_BD = _maxima(call)
        factor_B1 = factor_B.to(grads_BD.dtype).unsqueeze(1)
        return grads_BD.new_zeros(weight_of(call).shape).scatter_add_(0, entries_BD, grads_BD * factor_B1)
    pairs, weight_M = _pairs(call)
    return sum_weighted(pairs, weight_M.unsqueeze(1) * call.grad_output[pairs.sample_N], factor_B, weight_of(call))


def _rounding_scale(call: LayerCall) -> Tensor:
    # The terms of a bag are the products of its gradient and the weights of its uses.
    if call.layer.mode == "max":
        return product_of_norms(call.grad_output)
    uses, weight_N = _uses(call)
    return product_of_norms(call.grad_output) * sum_per_sample(uses, weight_N.abs())


def _maxima(call: LayerCall) -> tuple[Tensor, Tensor]:
    """Returns the entry with the maximum of each bag and feature, and its gradient, ``(B, D)`` each."""
    layer: Any = call.layer
    bag_N, entry_N = _bags(call)
    count_B = bag_N.bincount(minlength=call.batch_size)
    start_B = count_B.cumsum(0) - count_B
    _, _, _, entries_BD = torch.embedding_bag(
        layer.weight.detach(), entry_N, start_B, False, _MAX_MODE, False, None, False, layer.padding_idx
    )
    not_padding_N = entry_N != (_NO_ENTRY if layer.padding_idx is None else layer.padding_idx)
    nonempty_B1 = (bag_N[not_padding_N].bincount(minlength=call.batch_size) > 0).unsqueeze(1)
    return entries_BD.clamp(min=0), torch.where(nonempty_B1, call.grad_output, 0)


_MAX_MODE = 2  # value of the mode argument of torch.embedding_bag
_NO_ENTRY = -1  # not a valid entry

SAMPLERS = {"weight": GradSampler(_grad, _sq_norm, _weighted_sum, rounding_scale=_rounding_scale)}
