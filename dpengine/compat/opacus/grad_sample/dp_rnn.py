"""Rule for ``RNNLinear``."""

from .rules import compute_rnn_linear_grad_sample as compute_rnn_linear_grad_sample
