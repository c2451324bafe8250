"""Multi-head attention under Opacus's name."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from dpengine.layers.attention import PrivateMultiheadAttention, SequenceBias

__all__ = ["DPMultiheadAttention", "SequenceBias"]


class DPMultiheadAttention(PrivateMultiheadAttention):
    """``nn.MultiheadAttention`` with per-sample gradients, for batched (3-D) input.

    Takes the arguments of ``nn.MultiheadAttention`` and has its state dict. It also loads the names that Opacus writes
    for a layer inside a model, such as ``qlinear.weight``.
    """

    def forward(  # type: ignore[override]
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """Works as ``nn.MultiheadAttention``, with averaged weights. Rejects input without a batch axis."""
        return super().forward(
            query, key, value, key_padding_mask, need_weights, attn_mask, average_attn_weights=True, is_causal=is_causal
        )

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *rest: Any) -> None:
        _with_torch_names(state_dict, prefix, packed=self.in_proj_weight is not None)
        super()._load_from_state_dict(state_dict, prefix, *rest)


def _with_torch_names(state: Any, prefix: str, *, packed: bool) -> None:
    """Renames Opacus's entries of three linear layers and two sequence biases to torch's names."""
    for kind in ("weight", "bias"):
        names = [f"{prefix}{letter}linear.{kind}" for letter in "qkv"]
        if not all(name in state for name in names):
            continue
        parts = [state.pop(name) for name in names]
        if packed or kind == "bias":
            state[f"{prefix}in_proj_{kind}"] = torch.cat(parts)
        else:
            state.update({f"{prefix}{letter}_proj_weight": part for letter, part in zip("qkv", parts, strict=True)})
    for letter in "kv":
        if (name := f"{prefix}seq_bias_{letter}.bias") in state:
            state[f"{prefix}bias_{letter}"] = state.pop(name).view(1, 1, -1)
