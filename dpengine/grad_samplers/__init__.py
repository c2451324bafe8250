"""Stage 3: a LayerCall becomes per-sample gradients, norms and weighted sums of one layer."""

from .conv import padding_of, sliding_windows
from .functional import functional_sampler
from .gram import GramNorm, gram_norms, norms
from .machine import operations_per_byte, operations_per_second
from .precision import full_precision
from .sampler import Cost, GradSampler, JointSampler
from .table import BUILTIN, REGISTERED, register_grad_sampler, sampler_for
from .tied import tied_cost, tied_norm

__all__ = [
    "BUILTIN",
    "REGISTERED",
    "Cost",
    "GradSampler",
    "GramNorm",
    "JointSampler",
    "full_precision",
    "functional_sampler",
    "gram_norms",
    "norms",
    "operations_per_byte",
    "operations_per_second",
    "padding_of",
    "register_grad_sampler",
    "sampler_for",
    "sliding_windows",
    "tied_cost",
    "tied_norm",
]
