"""Per-sample gradient norms of a weight tied between an embedding and a linear layer, as in language models.

The gradient is the sum of both uses, so the squared norm has cross terms. With input ``a_s`` and output gradient
``g_s`` of the linear layer at position s, and gradient ``e_t`` of the embedding of token ``id_t`` at position t::

    |sum_s g_s (outer) a_s + sum_t [id_t] (outer) e_t|^2 = linear^2 + embedding^2 + 2 sum_{s, t} <a_s, e_t> g_s[id_t]

Axes: B samples, S positions of the linear layer, T of the embedding, V vocabulary size, D features.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from dpengine.capture.record import LayerCall

from . import embedding, linear
from .devices import fast_in_float64, memory_for
from .gram import WORKSPACE_BYTES, GramNorm, gram_norms
from .linear import tokens
from .sampler import Cost, GradSampler, argument

Calls = Sequence[tuple[LayerCall, GradSampler]]


def _linear_and_embedding(calls: Calls) -> tuple[LayerCall, LayerCall] | None:
    """Returns the call of the linear layer and that of the embedding; None for other calls."""
    by_sampler = {id(sampler): call for call, sampler in calls}
    head = by_sampler.get(id(linear.SAMPLERS["weight"]))
    words = by_sampler.get(id(embedding.SAMPLERS["weight"]))
    return None if head is None or words is None or len(calls) != 2 else (head, words)


def tied_cost(calls: Calls) -> Cost | None:
    """Returns the cost of each function for the norm.

    Returns None unless the calls are one linear and one embedding, on a device with fast float64.
    """
    pair = _linear_and_embedding(calls)
    if pair is None or not fast_in_float64(pair[0].grad_output.device):
        return None
    head, words = pair
    cost = linear.gram_cost((tokens(head.grad_output), tokens(argument(head, 0, "input"))))
    features = words.grad_output.shape[-1]
    pairs = tokens(words.grad_output).shape[1] * tokens(head.grad_output).shape[1]
    cross = pairs * (4.0 * features + 16)
    return Cost(cost.grads, {name: norm + cross for name, norm in cost.sq_norms.items()}, cost.weighted_sum)


def tied_norm(calls: Calls) -> GramNorm:
    """Returns squared norms and rounding scales ``(B,)`` of calls that ``tied_cost`` supports."""
    pair = _linear_and_embedding(calls)
    assert pair is not None
    head, words = pair
    grads_BSV, acts_BSD = tokens(head.grad_output), tokens(argument(head, 0, "input"))
    (head_norm,) = gram_norms([(grads_BSV, acts_BSD)])
    sampler = embedding.SAMPLERS["weight"]
    assert sampler.sq_norm is not None and sampler.rounding_scale is not None
    sq_norm_B = head_norm.sq_norm_B.double() + sampler.sq_norm(words).double()
    sq_norm_B += 2 * _cross(grads_BSV, acts_BSD, words)
    head_scale_B = head_norm.rounding_scale_B
    if head_scale_B is None:
        head_scale_B = head_norm.sq_norm_B.double().sqrt()
    rounding_scale_B = sampler.rounding_scale(words).double() + head_scale_B.double()
    if grads_BSV.dtype is torch.float64:  # no wider dtype to accumulate in, so add the bound of note [guard] in gram.py
        terms = acts_BSD.shape[2] + acts_BSD.shape[1] + math.prod(words.grad_output.shape[1:-1]) + 16
        sq_norm_B += terms * torch.finfo(torch.float64).eps / 2 * rounding_scale_B.square()
    return GramNorm(sq_norm_B.clamp(min=0), rounding_scale_B)


def _cross(grads_BSV: Tensor, acts_BSD: Tensor, words: LayerCall) -> Tensor:
    batch_size = len(grads_BSV)
    entries = argument(words, 0, "input")
    entries_BT = entries.reshape(batch_size, math.prod(entries.shape[1:]))  # -1 is ambiguous for an empty batch
    grads_BTD = words.grad_output.reshape(*entries_BT.shape, words.grad_output.shape[-1])
    padding = words.layer.padding_idx
    if padding is not None:
        grads_BTD = grads_BTD.masked_fill((entries_BT == padding).unsqueeze(2), 0)
    pairs = max(1, acts_BSD.shape[1] * entries_BT.shape[1])
    step = max(1, memory_for(acts_BSD.device, WORKSPACE_BYTES) // (16 * pairs))
    parts = [acts_BSD.new_zeros(0, dtype=torch.float64)]
    for i in range(0, batch_size, step):
        chunk = slice(i, i + step)
        products_BST = torch.bmm(acts_BSD[chunk].double(), grads_BTD[chunk].double().transpose(1, 2))
        index_BST = entries_BT[chunk].unsqueeze(1).expand(-1, acts_BSD.shape[1], -1)
        parts.append((products_BST * grads_BSV[chunk].gather(2, index_BST)).sum(dim=(1, 2)))
    return torch.cat(parts)
