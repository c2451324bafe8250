"""Replacement of ``nn.MultiheadAttention`` that uses each weight in ``F.linear``, which capture supports.

Axes: B samples, L queries, S keys, E embedding, N heads, D = E / N.
"""

from __future__ import annotations

import contextlib
import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel


class SequenceBias(nn.Module):
    """Appends one learned element to each sequence.

    Attributes:
        bias: The learned element, ``(embed_dim,)``, initialized from a normal distribution.

    Args:
        embed_dim: Size of an element.
        batch_first: Whether sequences are ``(batch, length, embed_dim)``; else ``(length, batch, embed_dim)``.
    """

    def __init__(self, embed_dim: int, batch_first: bool = False):
        super().__init__()
        self.batch_first = batch_first
        self.bias = nn.Parameter(torch.empty(embed_dim))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initializes the element."""
        nn.init.normal_(self.bias)

    def forward(self, x: Tensor) -> Tensor:
        """Returns the extended sequences. Raises ValueError unless the input has three dimensions."""
        if x.dim() != 3:
            raise ValueError(f"SequenceBias needs input with 3 dimensions, got {x.dim()}.")
        batch_first = x if self.batch_first else x.transpose(0, 1)
        last = self.bias.view(1, 1, -1).expand(len(batch_first), 1, -1)
        longer = torch.cat([batch_first, last], dim=1)
        return longer if self.batch_first else longer.transpose(0, 1)

    def extra_repr(self) -> str:
        """Returns the settings."""
        return f"{len(self.bias)}, batch_first={self.batch_first}"


class PrivateMultiheadAttention(nn.MultiheadAttention):
    """``nn.MultiheadAttention`` with per-sample gradients. Takes batched (3-D) input.

    The class has no additional state, so ``module.__class__ = PrivateMultiheadAttention`` converts the original in
    place, and ``module.__class__ = nn.MultiheadAttention`` converts it back. Outputs and gradients equal those of
    the original.
    """

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """See ``nn.MultiheadAttention.forward``. Raises ValueError for input without a batch axis."""
        batch_first = _batch_first(self, query, key, value)
        (batch_size, queries), keys = batch_first[0].shape[:2], batch_first[1].shape[1]
        padding_BS = _additive("key_padding_mask", key_padding_mask, query.dtype, [(batch_size, keys)])
        shapes = [(queries, keys), (batch_size * self.num_heads, queries, keys)]
        mask = _additive("attn_mask", attn_mask, query.dtype, shapes)
        if is_causal and mask is None:
            raise ValueError("is_causal is a hint about attn_mask, which is missing. Pass attn_mask as well.")
        # The mask itself is needed if there is a padding mask, or if the weights are returned.
        causal = is_causal and padding_BS is None and not need_weights
        q, k, v = _projected(self, *batch_first)
        k, v, num_added = _with_added_positions(self, k, v)
        mask = None if causal else _merged(mask, padding_BS, num_added, self.num_heads)
        q, k, v = (x.unflatten(-1, (self.num_heads, self.head_dim)).transpose(1, 2) for x in (q, k, v))
        dropout = self.dropout if self.training else 0.0
        if need_weights:
            heads_BNLD, weights_BNLS = _attend_with_weights(q, k, v, mask, dropout)
            weights = weights_BNLS.mean(dim=1) if average_attn_weights else weights_BNLS
        else:
            heads_BNLD, weights = _attend(q, k, v, mask, dropout, causal), None
        output_BLE = self.out_proj(heads_BNLD.transpose(1, 2).flatten(2))
        return output_BLE if self.batch_first else output_BLE.transpose(0, 1), weights


def _batch_first(module: nn.MultiheadAttention, *inputs: Tensor) -> list[Tensor]:
    names, batch = ("query", "key", "value"), 0 if module.batch_first else 1
    for name, tensor, size in zip(names, inputs, (module.embed_dim, module.kdim, module.vdim), strict=True):
        if tensor.dim() != 3:
            raise ValueError(
                f"{type(module).__name__} needs batched input with 3 dimensions for per-sample gradients, and "
                f"{name} has {tensor.dim()}. Add the batch axis: {name}.unsqueeze({batch})."
            )
        if tensor.shape[-1] != size:
            raise ValueError(f"{name} must have {size} features, got {tensor.shape[-1]}.")
    query, key, value = inputs
    if key.shape[:2] != value.shape[:2] or query.shape[batch] != key.shape[batch]:
        raise ValueError(
            "query, key and value must have the same batch size, and key and value the same length; got "
            f"{tuple(query.shape)}, {tuple(key.shape)} and {tuple(value.shape)}."
        )
    if module.batch_first:
        return list(inputs)
    # If inputs are the same tensor, their transposes must also be the same tensor.
    transposed = {id(tensor): tensor.transpose(0, 1) for tensor in inputs}
    return [transposed[id(tensor)] for tensor in inputs]


def _projected(module: nn.MultiheadAttention, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, ...]:
    size = module.embed_dim
    if module.in_proj_weight is None:
        weights = ("q_proj_weight", "k_proj_weight", "v_proj_weight")
        biases = (_slice(module, "in_proj_bias", i, i + 1) for i in range(3))
        triples = zip((query, key, value), weights, biases, strict=True)
        return tuple(F.linear(x, getattr(module, name), bias) for x, name, bias in triples)
    if query is key and key is value:
        return F.linear(query, module.in_proj_weight, module.in_proj_bias).split(size, dim=-1)
    # Adjacent projections of the same input are computed by one product.
    groups = [(query, 0, 1), (key, 1, 3)] if key is value else [(query, 0, 1), (key, 1, 2), (value, 2, 3)]
    projected: list[Tensor] = []
    for x, first, last in groups:
        weight, bias = (_slice(module, name, first, last) for name in ("in_proj_weight", "in_proj_bias"))
        projected += F.linear(x, weight, bias).split(size, dim=-1)
    return tuple(projected)


def _slice(module: nn.MultiheadAttention, name: str, first: int, last: int) -> Any:
    """Returns the part of a packed parameter for the projections ``first`` to ``last`` (query, key, value)."""
    parameter = getattr(module, name)
    return None if parameter is None else parameter[first * module.embed_dim : last * module.embed_dim]


def _with_added_positions(module: nn.MultiheadAttention, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, int]:
    """Appends the learned and the zero position to keys and values. Returns both, and the number of positions added."""
    batch_size, num_added = key.shape[0], 0
    if module.bias_k is not None and module.bias_v is not None:
        key = torch.cat([key, module.bias_k.expand(batch_size, -1, -1)], dim=1)
        value = torch.cat([value, module.bias_v.expand(batch_size, -1, -1)], dim=1)
        num_added += 1
    if module.add_zero_attn:
        key, value = F.pad(key, (0, 0, 0, 1)), F.pad(value, (0, 0, 0, 1))
        num_added += 1
    return key, value, num_added


def _additive(name: str, mask: Tensor | None, dtype: torch.dtype, shapes: list[tuple[int, ...]]) -> Tensor | None:
    """Converts a mask to numbers that are added to the scores. True in a bool mask forbids attention."""
    if mask is None:
        return None
    if tuple(mask.shape) not in shapes:
        raise ValueError(f"{name} must have shape {' or '.join(map(str, shapes))}, got {tuple(mask.shape)}.")
    if mask.is_floating_point():
        return mask
    if mask.dtype != torch.bool:
        raise ValueError(f"{name} must be bool or floating, got {mask.dtype}.")
    return torch.zeros_like(mask, dtype=dtype).masked_fill_(mask, -math.inf)


def _merged(mask: Tensor | None, padding_BS: Tensor | None, num_added: int, heads: int) -> Tensor | None:
    """Merges both masks to one that broadcasts to (B, N, L, S) and does not mask the appended positions."""
    if mask is not None:
        mask = F.pad(mask, (0, num_added))
        mask = mask if mask.dim() == 2 else mask.reshape(mask.shape[0] // heads, heads, *mask.shape[1:])
    if padding_BS is None:
        return mask
    padding = F.pad(padding_BS, (0, num_added))[:, None, None]
    return padding if mask is None else mask + padding


def _attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, dropout: float, causal: bool) -> Tensor:
    # The fused kernels have no batching rule, so torch.func would run them in a loop over samples, with a warning.
    transformed = torch._C._are_functorch_transforms_active()
    with sdpa_kernel(SDPBackend.MATH) if transformed else contextlib.nullcontext():
        return F.scaled_dot_product_attention(q, k, v, mask, dropout, causal)


def _attend_with_weights(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, dropout: float) -> tuple[Tensor, Tensor]:
    """Computes attention. Returns the output of each head (B, N, L, D) and the attention weights (B, N, L, S)."""
    scores = (q * math.sqrt(1.0 / q.shape[-1])) @ k.transpose(-2, -1)
    weights = (scores if mask is None else scores + mask).softmax(dim=-1)
    weights = F.dropout(weights, dropout) if dropout > 0 else weights
    return weights @ v, weights
