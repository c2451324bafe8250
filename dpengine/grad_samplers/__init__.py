"""Stage 3: a LayerCall becomes per-sample gradients, norms and weighted sums of one layer."""

from .functional import functional_sampler
from .sampler import GradSampler, JointSampler
from .table import BUILTIN, REGISTERED, register_grad_sampler, sampler_for

__all__ = [
    "BUILTIN",
    "REGISTERED",
    "GradSampler",
    "JointSampler",
    "functional_sampler",
    "register_grad_sampler",
    "sampler_for",
]
