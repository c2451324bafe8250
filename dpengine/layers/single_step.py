"""Twins of torch's single-step recurrent layers (``nn.LSTMCell`` and its kin). See ``recurrent.py``."""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from .cells import CELLS


class PrivateRNNCell(nn.RNNCell):
    """``nn.RNNCell`` whose rows can be told apart. Takes batched (2-D) input."""

    def forward(self, input: Tensor, hx: Any = None) -> Any:
        """As ``nn.RNNCell.forward``; refuses input without a batch axis (ValueError)."""
        return _step(self, f"RNN_{self.nonlinearity.upper()}", input, hx, None)[0]


class PrivateGRUCell(nn.GRUCell):
    """``nn.GRUCell`` whose rows can be told apart. Takes batched (2-D) input."""

    def forward(self, input: Tensor, hx: Any = None) -> Any:
        """As ``nn.GRUCell.forward``; refuses input without a batch axis (ValueError)."""
        return _step(self, "GRU", input, hx, None)[0]


class PrivateLSTMCell(nn.LSTMCell):
    """``nn.LSTMCell`` whose rows can be told apart. Takes batched (2-D) input."""

    def forward(self, input: Tensor, hx: Any = None) -> Any:
        """As ``nn.LSTMCell.forward``; refuses input without a batch axis (ValueError)."""
        h0, c0 = (None, None) if hx is None else hx
        return _step(self, "LSTM", input, h0, c0)


def _step(
    module: nn.RNNCellBase, mode: str, inputs_BF: Tensor, h0_BH: Tensor | None, c0_BH: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    for tensor in (inputs_BF, h0_BH, c0_BH):
        if tensor is not None and tensor.dim() != 2:
            raise ValueError(
                f"{type(module).__name__} needs batched input of 2 dimensions, since it tells the rows of a batch "
                f"apart; got {tensor.dim()}. Add the batch axis: input.unsqueeze(0)."
            )
    gates_BG = F.linear(inputs_BF, module.weight_ih, module.bias_ih)
    zeros_BH = inputs_BF.new_zeros(inputs_BF.shape[0], module.hidden_size)
    state, memory = (zeros_BH if given is None else given for given in (h0_BH, c0_BH))
    return CELLS[mode].step(gates_BG, F.linear(state, module.weight_hh, module.bias_hh), state, memory)
