"""A learnt element at the end of every sequence, as attention with ``add_bias_kv`` has it."""

from __future__ import annotations

import torch
from torch import Tensor, nn


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
