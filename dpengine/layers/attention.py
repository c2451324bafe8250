"""Replacement of torch's attention layer that uses each weight through ``F.linear``, with the batch on axis 0.

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
    """Adds one learnt element behind the last of each sequence.

    Attributes:
        bias: The element, of shape ``(embed_dim,)``; drawn from a normal distribution.

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
        """Draws the element anew."""
        nn.init.normal_(self.bias)

    def forward(self, x: Tensor) -> Tensor:
        """The sequences, each longer by one; refuses input that has not three axes (ValueError)."""
        if x.dim() != 3:
            raise ValueError(f"SequenceBias needs sequences of 3 dimensions, got {x.dim()}.")
        batch_first = x if self.batch_first else x.transpose(0, 1)
        last = self.bias.view(1, 1, -1).expand(len(batch_first), 1, -1)
        longer = torch.cat([batch_first, last], dim=1)
        return longer if self.batch_first else longer.transpose(0, 1)

    def extra_repr(self) -> str:
        """Its settings."""
        return f"{len(self.bias)}, batch_first={self.batch_first}"


class PrivateMultiheadAttention(nn.MultiheadAttention):
    """``nn.MultiheadAttention`` whose rows can be told apart. Takes batched (3-D) input.

    A twin without state of its own: ``module.__class__ = PrivateMultiheadAttention`` turns the original into it, and
    back. Output and gradient are those of the original.
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
        """As ``nn.MultiheadAttention.forward``; refuses input without a batch axis (ValueError)."""
        batch_first = _batch_first(self, query, key, value)
        rows, queries, keys = batch_first[0].shape[0], batch_first[0].shape[1], batch_first[1].shape[1]
        padding_BS = _additive("key_padding_mask", key_padding_mask, query.dtype, [(rows, keys)])
        shapes = [(queries, keys), (rows * self.num_heads, queries, keys)]
        mask = _additive("attn_mask", attn_mask, query.dtype, shapes)
        if is_causal and mask is None:
            raise ValueError("is_causal is a hint about attn_mask, which is absent; pass attn_mask as well.")
        # Only then can the kernel rely on the hint alone.
        causal = is_causal and padding_BS is None and not need_weights
        q, k, v = _projected(self, *batch_first)
        k, v, added = _extended(self, k, v)
        mask = None if causal else _merged(mask, padding_BS, added, self.num_heads)
        q, k, v = (x.unflatten(-1, (self.num_heads, self.head_dim)).transpose(1, 2) for x in (q, k, v))
        dropout = self.dropout if self.training else 0.0
        if need_weights:
            heads_BNLD, weights_BNLS = _attend_by_hand(q, k, v, mask, dropout)
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
                f"{type(module).__name__} needs batched input of 3 dimensions, since it tells the rows of a batch "
                f"apart; {name} has {tensor.dim()}. Add the batch axis: {name}.unsqueeze({batch})."
            )
        if tensor.shape[-1] != size:
            raise ValueError(f"{name} must have {size} features, got {tensor.shape[-1]}.")
    query, key, value = inputs
    if key.shape[:2] != value.shape[:2] or query.shape[batch] != key.shape[batch]:
        raise ValueError(
            f"query, key and value must agree in batch, key and value also in length; got {tuple(query.shape)}, "
            f"{tuple(key.shape)} and {tuple(value.shape)}."
        )
    if module.batch_first:
        return list(inputs)
    # Which of the inputs are one and the same tensor must still show.
    swapped = {id(tensor): tensor.transpose(0, 1) for tensor in inputs}
    return [swapped[id(tensor)] for tensor in inputs]


def _projected(module: nn.MultiheadAttention, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, ...]:
    size = module.embed_dim
    if module.in_proj_weight is None:
        weights = ("q_proj_weight", "k_proj_weight", "v_proj_weight")
        biases = (_slice(module, "in_proj_bias", at, at + 1) for at in range(3))
        triples = zip((query, key, value), weights, biases, strict=True)
        return tuple(F.linear(x, getattr(module, name), bias) for x, name, bias in triples)
    if query is key and key is value:
        return F.linear(query, module.in_proj_weight, module.in_proj_bias).split(size, dim=-1)
    # One product for neighbours with the same input.
    groups = [(query, 0, 1), (key, 1, 3)] if key is value else [(query, 0, 1), (key, 1, 2), (value, 2, 3)]
    projected: list[Tensor] = []
    for x, first, last in groups:
        weight, bias = (_slice(module, name, first, last) for name in ("in_proj_weight", "in_proj_bias"))
        projected += F.linear(x, weight, bias).split(size, dim=-1)
    return tuple(projected)


def _slice(module: nn.MultiheadAttention, name: str, first: int, last: int) -> Any:
    """Of a packed parameter, the part of the projections from ``first`` up to ``last`` (query, key, value)."""
    parameter = getattr(module, name)
    return None if parameter is None else parameter[first * module.embed_dim : last * module.embed_dim]


def _extended(module: nn.MultiheadAttention, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, int]:
    """Keys and values with the learnt and the zero position behind them, and how many those are."""
    rows, added = key.shape[0], 0
    if module.bias_k is not None and module.bias_v is not None:
        key = torch.cat([key, module.bias_k.expand(rows, -1, -1)], dim=1)
        value = torch.cat([value, module.bias_v.expand(rows, -1, -1)], dim=1)
        added += 1
    if module.add_zero_attn:
        key, value = F.pad(key, (0, 0, 0, 1)), F.pad(value, (0, 0, 0, 1))
        added += 1
    return key, value, added


def _additive(name: str, mask: Tensor | None, dtype: torch.dtype, shapes: list[tuple[int, ...]]) -> Tensor | None:
    """The mask as a term of the scores; True forbids."""
    if mask is None:
        return None
    if tuple(mask.shape) not in shapes:
        raise ValueError(f"{name} must have shape {' or '.join(map(str, shapes))}, got {tuple(mask.shape)}.")
    if mask.is_floating_point():
        return mask
    if mask.dtype != torch.bool:
        raise ValueError(f"{name} must be bool or floating, got {mask.dtype}.")
    return torch.zeros_like(mask, dtype=dtype).masked_fill_(mask, -math.inf)


def _merged(mask: Tensor | None, padding_BS: Tensor | None, added: int, heads: int) -> Tensor | None:
    """Both masks as one that broadcasts to (B, N, L, S), open at the positions that were added."""
    if mask is not None:
        mask = F.pad(mask, (0, added))
        mask = mask if mask.dim() == 2 else mask.reshape(mask.shape[0] // heads, heads, *mask.shape[1:])
    if padding_BS is None:
        return mask
    padding = F.pad(padding_BS, (0, added))[:, None, None]
    return padding if mask is None else mask + padding


def _attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, dropout: float, causal: bool) -> Tensor:
    # The fast kernels have no batching rule: a function transform would run them row by row, and warn.
    plain = torch._C._are_functorch_transforms_active()
    with sdpa_kernel(SDPBackend.MATH) if plain else contextlib.nullcontext():
        return F.scaled_dot_product_attention(q, k, v, mask, dropout, causal)


def _attend_by_hand(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, dropout: float) -> tuple[Tensor, Tensor]:
    """Attention that also gives its weights (B, N, L, S)."""
    scores = (q * math.sqrt(1.0 / q.shape[-1])) @ k.transpose(-2, -1)
    weights = (scores if mask is None else scores + mask).softmax(dim=-1)
    weights = F.dropout(weights, dropout) if dropout > 0 else weights
    return weights @ v, weights
