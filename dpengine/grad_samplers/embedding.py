"""Grad samplers of embeddings.

A use of an entry is one index in the input. The gradient of an entry is the sum of the output gradients of its uses.

Axes: B samples, N uses of entries in the batch, M distinct pairs of sample and entry, V entries, D features.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from dpengine.capture.record import LayerCall
from dpengine.errors import UnsupportedLayerError
from dpengine.kernels.library import traced
from dpengine.kernels.products import Entries, norms

from .devices import fast_in_float64, launches_kernels
from .gram import rounding_scale_of
from .linear import tokens
from .sampler import GradSampler, argument

_MAX_PAIR_PRODUCTS_CPU, _MAX_PAIR_PRODUCTS_GPU = 2**16, 2**31  # multiplications for the products of all pairs of uses
_FIX = "Run before creating the optimizer: model, changes = dpengine.fix(model)."


def check_embedding(layer: nn.Module, name: str = "") -> None:
    """Raises UnsupportedLayerError for settings that mix the samples of a batch or write to the weight in forward."""
    if not isinstance(layer, (nn.Embedding, nn.EmbeddingBag)):
        return
    where = f"Layer '{name}' ({type(layer).__name__})" if name else str(layer)
    if layer.scale_grad_by_freq:
        raise UnsupportedLayerError(
            f"{where} has scale_grad_by_freq=True, which divides a sample's gradient by counts over the whole batch, "
            "so one sample changes the gradients of others.",
            fix=_FIX,
        )
    if layer.max_norm is not None:
        raise UnsupportedLayerError(
            f"{where} has max_norm={layer.max_norm}, which rescales the entries that a batch uses in the forward pass, "
            "without noise.",
            fix=_FIX,
        )


@dataclass(frozen=True, eq=False)
class Uses:
    """Uses of entries in a batch.

    Attributes:
        sample_N: Sample of each use.
        entry_N: Entry of each use.
        batch_size: Number of samples.
    """

    sample_N: Tensor
    entry_N: Tensor
    batch_size: int


def _uses(call: LayerCall) -> tuple[Uses, Tensor]:
    """Returns the uses without padding, and their gradients ``(N, D)``."""
    entries_BT = argument(call, 0, "input")
    batch_size = entries_BT.shape[0]
    entry_N = entries_BT.reshape(-1)
    sample_N = torch.arange(batch_size, device=entry_N.device).repeat_interleave(entries_BT[:1].numel())
    grad_ND = call.grad_output.reshape(-1, call.grad_output.shape[-1])
    padding = call.layer.padding_idx
    if padding is not None:
        not_padding_N = entry_N != padding
        if traced(grad_ND) or launches_kernels(grad_ND.device):  # shapes must not depend on values
            return Uses(sample_N, entry_N, batch_size), grad_ND.where(not_padding_N.unsqueeze(1), 0)
        sample_N, entry_N, grad_ND = sample_N[not_padding_N], entry_N[not_padding_N], grad_ND[not_padding_N]
    return Uses(sample_N, entry_N, batch_size), grad_ND


def merge_uses(uses: Uses, value_N: Tensor, size: int) -> tuple[Uses, Tensor]:
    """Returns the distinct pairs of sample and entry, and the sum of the values of each pair.

    On an accelerator, the result has as many pairs as the input: the last pair is repeated with the value 0. A shorter
    result would synchronize with the device.
    """
    # In float64, so that a long sum whose terms cancel is as exact as the values. MPS has no float64.
    wide_N = value_N if value_N.device.type == "mps" else value_N.double()
    pair_N = uses.sample_N * size + uses.entry_N
    pair_M, index_N = _unique_padded(pair_N) if launches_kernels(pair_N.device) else _unique(pair_N)
    value_M = wide_N.new_zeros(len(pair_M), *value_N.shape[1:]).index_add_(0, index_N, wide_N)
    return Uses(pair_M // size, pair_M % size, uses.batch_size), value_M


def _unique(pair_N: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the distinct pairs, and for each given pair its index among the distinct pairs."""
    return torch.unique(pair_N, return_inverse=True)  # type: ignore[return-value]


def _unique_padded(pair_N: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the result of `_unique`, with the last pair repeated up to the length of the input."""
    sorted_N, order_N = pair_N.sort()
    is_new_N = torch.cat([sorted_N.new_zeros(min(1, len(sorted_N))), (sorted_N.diff() != 0).to(sorted_N.dtype)])
    index_N = is_new_N.cumsum(0)
    pair_M = sorted_N[-1:].expand(len(sorted_N)).clone().scatter_(0, index_N, sorted_N)
    return pair_M, torch.empty_like(index_N).scatter_(0, order_N, index_N)


def sum_per_sample(uses: Uses, value_N: Tensor) -> Tensor:
    """Returns the sum of the values of each sample, ``(B,)``."""
    return value_N.new_zeros(uses.batch_size).index_add_(0, uses.sample_N, value_N)


def dense_grads(pairs: Uses, grad_MD: Tensor, weight: Tensor) -> Tensor:
    """Returns the per-sample gradients ``(B, V, D)`` of merged uses."""
    size, features = weight.shape
    flat = torch.zeros(pairs.batch_size * size, features, dtype=grad_dtype(weight), device=grad_MD.device)
    index_M, value_MD = pairs.sample_N * size + pairs.entry_N, grad_MD.to(flat.dtype)
    if launches_kernels(flat.device):  # pairs may be repeated, see `merge_uses`
        flat.index_add_(0, index_M, value_MD)
    else:
        flat[index_M] = value_MD
    return flat.view(pairs.batch_size, size, features)


def sum_weighted(pairs: Uses, grad_MD: Tensor, factor_B: Tensor, weight: Tensor) -> Tensor:
    """Returns the sum ``(V, D)`` of the gradients of merged uses, each multiplied by the factor of its sample."""
    weighted_MD = grad_MD * factor_B.to(grad_MD.dtype)[pairs.sample_N].unsqueeze(1)
    total_VD = torch.zeros(weight.shape, dtype=grad_dtype(weight), device=grad_MD.device)
    return total_VD.index_add_(0, pairs.entry_N, weighted_MD.to(total_VD.dtype))


def grad_dtype(weight: Tensor) -> torch.dtype:
    """Returns the dtype of a weight's gradients, which is at least float32."""
    return torch.promote_types(weight.dtype, torch.float32)


def weight_of(call: LayerCall) -> Tensor:
    """Returns the weight of the layer, ``(V, D)``."""
    weight: Any = call.layer.weight
    return weight


def _grad(call: LayerCall) -> Tensor:
    return dense_grads(*_pairs(call), weight_of(call))


def _grad_by_product(call: LayerCall) -> Tensor:
    """Computes gradients ``(B, V, D)`` as one product with one-hot vectors. Fast for tables with few entries."""
    weight, grad_BTD = weight_of(call), tokens(call.grad_output)
    entry_BT1 = argument(call, 0, "input").reshape(*grad_BTD.shape[:2], 1)
    padding = call.layer.padding_idx
    if padding is not None:  # its gradients may be infinite, and zero times infinity is NaN
        grad_BTD = grad_BTD.masked_fill(entry_BT1 == padding, 0)
    one_hot_BTV = (entry_BT1 == torch.arange(weight.shape[0], device=entry_BT1.device)).to(grad_BTD.dtype)
    return torch.bmm(one_hot_BTV.transpose(1, 2), grad_BTD)


def _pairs(call: LayerCall) -> tuple[Uses, Tensor]:
    return merge_uses(*_uses(call), weight_of(call).shape[0])


def _sq_norm(call: LayerCall) -> Tensor:
    """Sums the squared norms of uses. Merges repeated uses of an entry in a sample first; most texts have few."""
    if traced(call.grad_output) or _few_pair_products(call):
        return _sq_norm_by_pairs(call)
    if launches_kernels(call.grad_output.device):
        pairs, grad_MD = _pairs(call)
        return sum_per_sample(pairs, grad_MD.square().sum(dim=1))
    uses, grad_ND = _uses(call)
    _, index_N, count_M = torch.unique(
        uses.sample_N * weight_of(call).shape[0] + uses.entry_N, return_inverse=True, return_counts=True
    )
    sq_norm_N = norms(grad_ND, 1).square()
    repeated_N = count_M[index_N] > 1
    if not repeated_N.any():
        return sum_per_sample(uses, sq_norm_N)
    repeated = Uses(uses.sample_N[repeated_N], uses.entry_N[repeated_N], uses.batch_size)
    pairs, grad_MD = merge_uses(repeated, grad_ND[repeated_N], weight_of(call).shape[0])
    single_B = sum_per_sample(uses, sq_norm_N.masked_fill(repeated_N, 0))
    return single_B + sum_per_sample(pairs, grad_MD.square().sum(dim=1))


def _few_pair_products(call: LayerCall) -> bool:
    """Returns True if the products of all pairs of uses in a sample take less time than a search for equal entries.

    On an accelerator, the search synchronizes with the device, because its shapes depend on values.
    """
    grad = call.grad_output
    products = grad.numel() * (grad.shape[1:-1].numel())
    if grad.device.type == "cpu":
        return products <= _MAX_PAIR_PRODUCTS_CPU
    return fast_in_float64(grad.device) and products <= _MAX_PAIR_PRODUCTS_GPU


def _sq_norm_by_pairs(call: LayerCall) -> Tensor:
    """Computes squared norms from products of all pairs of uses in a sample. No shape depends on values."""
    grad_BTD = tokens(call.grad_output).double()
    entry_BT = argument(call, 0, "input").reshape(grad_BTD.shape[:2])
    same_BTT = entry_BT.unsqueeze(1) == entry_BT.unsqueeze(2)
    if call.layer.padding_idx is not None:
        same_BTT &= (entry_BT != call.layer.padding_idx).unsqueeze(1)
    products_BTT = torch.bmm(grad_BTD, grad_BTD.transpose(1, 2))
    return products_BTT.where(same_BTT, 0).sum(dim=(1, 2)).clamp(min=0)


def _weighted_sum(call: LayerCall, factor_B: Tensor) -> Tensor:
    weight = weight_of(call)
    out = torch.empty(weight.shape, dtype=grad_dtype(weight), device=call.grad_output.device)
    _add_weighted_sum(call, factor_B, 1.0, 0.0, out)
    return out


def _add_weighted_sum(call: LayerCall, factor_B: Tensor, scale: float, keep: float, out: Tensor) -> None:
    uses, grad_ND = _uses(call)
    weighted_ND = grad_ND * (factor_B.to(out.dtype) * scale)[uses.sample_N].unsqueeze(1)
    if not keep:
        out.zero_()
    out.index_add_(0, uses.entry_N, weighted_ND.to(out.dtype))


def _rounding_scale(call: LayerCall) -> Tensor:
    # By Cauchy-Schwarz, the sum of the norms of n uses is at most sqrt(n) times their norm.
    entries_BT, grad = argument(call, 0, "input"), call.grad_output
    uses_per_sample = entries_BT[:1].numel()
    if call.layer.padding_idx is not None:  # its gradients are not added, and may be large
        grad = grad.masked_fill((entries_BT == call.layer.padding_idx).unsqueeze(-1), 0)
    return rounding_scale_of(uses_per_sample, grad) * math.sqrt(uses_per_sample)


def _concat(calls: Any) -> LayerCall:
    indices = [argument(call, 0, "input") for call in calls]
    entries = torch.cat([tensor.reshape(len(tensor), math.prod(tensor.shape[1:])) for tensor in indices], dim=1)
    grads = torch.cat([tokens(call.grad_output) for call in calls], dim=1)
    return calls[0].replace(inputs=(entries,), kwargs={}, grad_output=grads)


def _job(call: LayerCall) -> Entries:
    layer: Any = call.layer
    grad_BTD = tokens(call.grad_output)
    entry_BT = call.inputs[0].reshape(grad_BTD.shape[:2])
    return Entries(entry_BT, grad_BTD, layer.num_embeddings, layer.padding_idx)


SAMPLERS = {
    "weight": GradSampler(
        _grad,
        _sq_norm,
        _weighted_sum,
        add_weighted_sum=_add_weighted_sum,
        concat=_concat,
        rounding_scale=_rounding_scale,
        more_grads={"product": _grad_by_product},
        settings=("num_embeddings", "padding_idx"),
        job=_job,
        stacked_name="product",
    )
}
