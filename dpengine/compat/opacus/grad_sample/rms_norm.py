"""Grad sampler of ``nn.RMSNorm``."""

from .rules import compute_rms_norm_grad_sample as compute_rms_norm_grad_sample
