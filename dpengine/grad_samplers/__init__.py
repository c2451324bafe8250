"""Stage 3: a LayerCall becomes per-sample gradients, norms and weighted sums of one layer."""

from .conv import padding_of, sliding_windows
from .embedding import refuse_unsafe_embedding
from .functional import functional_sampler
from .gram import GramNorm, gram_norms, norms
from .machine import operations_per_byte, operations_per_second
from .precision import full_precision
from .registered import (
    REGISTERED,
    REGISTERED_NORMS,
    WITHDRAWN,
    RegisteredGrads,
    RegisteredNorms,
    register_grad_sampler,
    register_norm_sampler,
)
from .sampler import Cost, GradSampler, JointSampler, NormedRule
from .table import BUILTIN, rule_for, sampler_for
from .tied import tied_cost, tied_norm

__all__ = [
    "BUILTIN",
    "REGISTERED",
    "REGISTERED_NORMS",
    "WITHDRAWN",
    "Cost",
    "GradSampler",
    "GramNorm",
    "JointSampler",
    "NormedRule",
    "RegisteredGrads",
    "RegisteredNorms",
    "full_precision",
    "functional_sampler",
    "gram_norms",
    "norms",
    "operations_per_byte",
    "operations_per_second",
    "padding_of",
    "refuse_unsafe_embedding",
    "register_grad_sampler",
    "register_norm_sampler",
    "rule_for",
    "sampler_for",
    "sliding_windows",
    "tied_cost",
    "tied_norm",
]
