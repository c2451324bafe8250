"""A linear layer that is called once for each time step of a recurrence."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn


class RNNLinear(nn.Linear):
    """``nn.Linear`` for the steps of a recurrence, of which the late ones may have fewer rows than the batch.

    A row of a call belongs to the row of the batch in the same place. Where rows have ended, those that go on must
    come first: then set ``max_batch_len`` to the size of the batch, and the missing rows get no gradient.

    Args:
        in_features: Size of each input row.
        out_features: Size of each output row.
        bias: Whether a bias is added.
    """

    max_batch_len: int | None = None
    """Rows of the batch, where a call may have fewer; None where each call has all of them."""

    def __init__(self, in_features: int, out_features: int, bias: bool = True):
        super().__init__(in_features, out_features, bias)

    def forward(self, input: Tensor) -> Tensor:
        """As ``nn.Linear.forward``; refuses more rows than ``max_batch_len`` (ValueError)."""
        rows, missing = len(input), 0 if self.max_batch_len is None else self.max_batch_len - len(input)
        if missing < 0:
            raise ValueError(
                f"RNNLinear: the input has {rows} rows, and max_batch_len says that the batch has "
                f"{self.max_batch_len}. Set max_batch_len to the size of the batch, or to None."
            )
        if missing == 0:
            return F.linear(input, self.weight, self.bias)
        # The use of the weight must have the rows of the batch, so that each row learns its own gradient.
        whole = F.pad(input, (*[0] * (2 * input.dim() - 1), missing))
        return F.linear(whole, self.weight, self.bias)[:rows]
