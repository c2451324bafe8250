"""Table of the known layers: the built-in ones, and those that users register."""

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


def sampler_for(module: nn.Module) -> Mapping[str, GradSampler] | JointSampler | None:
    """The rule for exactly this module, or None where only the functional fallback fits.

    An embedding whose settings mix the rows of a batch raises ``UnsupportedLayerError``.
    """
    if has_own_forward(module):
        return None
    kind = layer_type(module)
    if kind in REGISTERED:
        registered = REGISTERED[kind]
        return None if registered is None else registered.sampler
    samplers = BUILTIN.get(kind)
    if samplers is None:
        return None
    embedding.check_embedding(module)
    own = {
        parameter for parameter, _ in module.named_parameters(recurse=False)
    }  # frozen ones too, which may be unfrozen
    return samplers if own <= samplers.keys() else None  # old weight norm and pruning add parameters of their own


def rule_for(module: nn.Module) -> Mapping[str, GradSampler] | JointSampler | NormedRule | None:
    """``sampler_for`` with the norms that are registered for exactly this module's class, if any are."""
    sampler, kind = sampler_for(module), layer_type(module)
    norms = REGISTERED_NORMS.get(kind)
    known = kind in BUILTIN and kind not in REGISTERED
    if norms is None or has_own_forward(module) or (sampler is None and known):
        return sampler
    return NormedRule(functional_sampler(module) if sampler is None else sampler, norms.sq_norm)
