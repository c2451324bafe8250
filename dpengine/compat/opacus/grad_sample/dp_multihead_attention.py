"""Rule for ``SequenceBias``."""

from .rules import compute_sequence_bias_grad_sample as compute_sequence_bias_grad_sample
