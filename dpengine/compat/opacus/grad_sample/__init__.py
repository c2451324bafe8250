"""Wrappers that write per-sample gradients to parameters, and grad samplers, with the interface of Opacus."""

from . import functorch, utils
from .conv import compute_conv_grad_sample
from .dp_multihead_attention import compute_sequence_bias_grad_sample
from .dp_rnn import compute_rnn_linear_grad_sample
from .embedding import compute_embedding_grad_sample
from .embedding_norm_sample import compute_embedding_norm_sample
from .grad_sample_module import GradSampleHooks, GradSampleModule, create_or_accumulate_grad_sample
from .grad_sample_module_fast_gradient_clipping import (
    GradSampleHooksFastGradientClipping,
    GradSampleModuleFastGradientClipping,
)
from .grad_sample_module_fast_gradient_clipping_fsdp import (
    GradSampleHooksFastGradientClippingFSDP,
    GradSampleModuleFastGradientClippingFSDP,
)
from .grad_sample_module_fast_gradient_clipping_tp import (
    GradSampleHooksFastGradientClippingTP,
    GradSampleModuleFastGradientClippingTP,
)
from .group_norm import compute_group_norm_grad_sample
from .gsm_base import AbstractGradSampleHooks, AbstractGradSampleModule
from .gsm_exp_weights import GradSampleModuleExpandedWeights
from .gsm_no_op import GradSampleHooksNoOp, GradSampleModuleNoOp
from .instance_norm import compute_instance_norm_grad_sample
from .layer_norm import compute_layer_norm_grad_sample
from .linear import compute_linear_grad_sample
from .prepare import get_gsm_class, prepare_module, wrap_model
from .registries import register_grad_sampler, register_norm_sampler
from .rms_norm import compute_rms_norm_grad_sample

__all__ = [
    "AbstractGradSampleHooks",
    "AbstractGradSampleModule",
    "GradSampleHooks",
    "GradSampleHooksFastGradientClipping",
    "GradSampleHooksFastGradientClippingFSDP",
    "GradSampleHooksFastGradientClippingTP",
    "GradSampleHooksNoOp",
    "GradSampleModule",
    "GradSampleModuleExpandedWeights",
    "GradSampleModuleFastGradientClipping",
    "GradSampleModuleFastGradientClippingFSDP",
    "GradSampleModuleFastGradientClippingTP",
    "GradSampleModuleNoOp",
    "compute_conv_grad_sample",
    "compute_embedding_grad_sample",
    "compute_embedding_norm_sample",
    "compute_group_norm_grad_sample",
    "compute_instance_norm_grad_sample",
    "compute_layer_norm_grad_sample",
    "compute_linear_grad_sample",
    "compute_rms_norm_grad_sample",
    "compute_rnn_linear_grad_sample",
    "compute_sequence_bias_grad_sample",
    "create_or_accumulate_grad_sample",
    "functorch",
    "get_gsm_class",
    "prepare_module",
    "register_grad_sampler",
    "register_norm_sampler",
    "utils",
    "wrap_model",
]
