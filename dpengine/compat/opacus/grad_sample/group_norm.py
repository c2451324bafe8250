"""Grad sampler of ``nn.GroupNorm``."""

from .rules import compute_group_norm_grad_sample as compute_group_norm_grad_sample
