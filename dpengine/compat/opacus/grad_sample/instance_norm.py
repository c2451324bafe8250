"""Grad sampler of ``nn.InstanceNorm1d``, ``2d`` and ``3d``."""

from .rules import compute_instance_norm_grad_sample as compute_instance_norm_grad_sample
