"""Grad sampler of ``nn.LayerNorm``."""

from .rules import compute_layer_norm_grad_sample as compute_layer_norm_grad_sample
