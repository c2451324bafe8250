"""Rules of built-in layers, and lookup of the rule of a module."""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear

from dpengine.capture.on_modules import has_own_forward
from dpengine.distributed.layer_parts import layer_type

from . import bilinear, conv, embedding, embedding_bag, linear, normalization, prelu
from .functional import functional_sampler
from .registered import REGISTERED, REGISTERED_NORMS
from .sampler import GradSampler, JointSampler, NormedRule

BUILTIN: Mapping[type[nn.Module], Mapping[str, GradSampler]] = {
    nn.Linear: linear.SAMPLERS,
    NonDynamicallyQuantizableLinear: linear.SAMPLERS,
    nn.Bilinear: bilinear.SAMPLERS,
    nn.Conv1d: conv.SAMPLERS,
    nn.Conv2d: conv.SAMPLERS,
    nn.Conv3d: conv.SAMPLERS,
    nn.ConvTranspose1d: conv.SAMPLERS,
    nn.ConvTranspose2d: conv.SAMPLERS,
    nn.ConvTranspose3d: conv.SAMPLERS,
    nn.Embedding: embedding.SAMPLERS,
    nn.EmbeddingBag: embedding_bag.SAMPLERS,
    nn.LayerNorm: normalization.LAYER_NORM,
    nn.GroupNorm: normalization.GROUP_NORM,
    nn.InstanceNorm1d: normalization.INSTANCE_NORM,
    nn.InstanceNorm2d: normalization.INSTANCE_NORM,
    nn.InstanceNorm3d: normalization.INSTANCE_NORM,
    nn.RMSNorm: normalization.RMS_NORM,
    nn.PReLU: prelu.SAMPLERS,
}

_OF_LIBRARIES: Mapping[str, Mapping[str, GradSampler]] = {  # by qualified name; the library may not be installed
    "transformers.pytorch_utils.Conv1D": linear.TRANSPOSED,
}


def sampler_for(module: nn.Module) -> Mapping[str, GradSampler] | JointSampler | None:
    """Returns the rule for a module by its exact class; None if only the functional fallback supports it.

    Raises ``UnsupportedLayerError`` for an embedding with settings that mix the samples of a batch.
    """
    if has_own_forward(module):
        return None
    kind = layer_type(module)
    if kind in REGISTERED:
        registered = REGISTERED[kind]
        return None if registered is None else registered.sampler
    samplers = BUILTIN.get(kind) or _OF_LIBRARIES.get(f"{kind.__module__}.{kind.__qualname__}")
    if samplers is None:
        return None
    embedding.check_embedding(module)
    names = {name for name, _ in module.named_parameters(recurse=False)}  # frozen parameters may be unfrozen later
    return samplers if names <= samplers.keys() else None  # weight_norm and pruning of torch.nn.utils add parameters


def rule_for(module: nn.Module) -> Mapping[str, GradSampler] | JointSampler | NormedRule | None:
    """Returns the rule of ``sampler_for``, combined with the registered norm function of the module's exact class."""
    sampler, kind = sampler_for(module), layer_type(module)
    norms = REGISTERED_NORMS.get(kind)
    is_builtin = kind in BUILTIN and kind not in REGISTERED
    if norms is None or has_own_forward(module) or (sampler is None and is_builtin):
        return sampler
    return NormedRule(functional_sampler(module) if sampler is None else sampler, norms.sq_norm)
