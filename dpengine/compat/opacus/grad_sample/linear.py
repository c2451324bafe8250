"""Rules for ``nn.Linear``."""

from .rules import compute_linear_grad_sample as compute_linear_grad_sample
from .rules import compute_linear_norm_sample as compute_linear_norm_sample
