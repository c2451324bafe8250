"""Registration of grad samplers, and views of the engine's tables, with the interface of Opacus."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from typing import Any

from torch import nn

from dpengine import grad_samplers
from dpengine.errors import keyword_hints
from dpengine.grad_samplers.registered import REGISTERED, REGISTERED_NORMS
from dpengine.layers.attention import SequenceBias
from dpengine.layers.recurrent import RNNLinear

from . import rules
from .rules import Function

Decorator = Callable[[Function], Function]


@keyword_hints
def register_grad_sampler(target_class_or_classes: type[nn.Module] | Sequence[type[nn.Module]]) -> Decorator:
    """Returns a decorator that registers a function as the rule for the per-sample gradients of layer classes.

    The function takes ``(layer, activations, backprops)`` with the batch on axis 0, where ``backprops`` are gradients
    of the per-sample losses: under ``loss_reduction="mean"`` they are multiplied by the batch size. It returns
    ``{parameter: (B, *parameter.shape)}``. The rule applies in all of ``dpengine``; see
    ``dpengine.register_grad_sampler``.

    Args:
        target_class_or_classes: One or several classes. Subclasses are not matched.
    """
    return grad_samplers.register_grad_sampler(target_class_or_classes, own_loss=True)


@keyword_hints
def register_norm_sampler(target_class_or_classes: type[nn.Module] | Sequence[type[nn.Module]]) -> Decorator:
    """Returns a decorator that registers a function as the rule for the per-sample gradient norms of layer classes.

    The function takes the arguments of a grad sampler and returns ``{parameter: (B,)}``; otherwise as
    ``register_grad_sampler``. See ``dpengine.register_norm_sampler``.
    """
    return grad_samplers.register_norm_sampler(target_class_or_classes, own_loss=True)


class Samplers(MutableMapping[type[nn.Module], Function]):
    """Live view of one of the engine's tables of rules, ``{layer class: function}``.

    Assignment registers a rule. A deleted built-in rule is unused until it is assigned again.
    """

    def __init__(
        self,
        builtin: Mapping[type[nn.Module], Function],
        registered: MutableMapping[type[nn.Module], Any],
        register: Callable[[type[nn.Module]], Decorator],
    ):
        self._builtin = builtin
        self._registered = registered
        self._register = register

    def __getitem__(self, layer_class: type[nn.Module]) -> Function:
        if layer_class not in self._registered:
            return self._builtin[layer_class]
        if self._registered[layer_class] is None:
            raise KeyError(layer_class)
        found: Function = self._registered[layer_class].function
        return found

    def __setitem__(self, layer_class: type[nn.Module], function: Function) -> None:
        if self._builtin.get(layer_class) is function:  # the built-in rule is faster than this function
            self._registered.pop(layer_class, None)
        else:
            self._register(layer_class)(function)

    def __delitem__(self, layer_class: type[nn.Module]) -> None:
        self[layer_class]
        self._registered.pop(layer_class, None)
        if layer_class in self._builtin:
            self._registered[layer_class] = None

    def __iter__(self) -> Iterator[type[nn.Module]]:
        return iter([cls for cls in dict.fromkeys([*self._builtin, *self._registered]) if cls in self])

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def __repr__(self) -> str:
        return repr(dict(self))

    def copy(self) -> dict[type[nn.Module], Function]:
        """Returns the current entries of the table as a new dict."""
        return dict(self)


GRAD_SAMPLERS = Samplers(
    {
        nn.Conv1d: rules.compute_conv_grad_sample,
        nn.Conv2d: rules.compute_conv_grad_sample,
        nn.Conv3d: rules.compute_conv_grad_sample,
        nn.Embedding: rules.compute_embedding_grad_sample,
        nn.EmbeddingBag: rules.compute_embeddingbag_gradsampler,
        nn.GroupNorm: rules.compute_group_norm_grad_sample,
        nn.InstanceNorm1d: rules.compute_instance_norm_grad_sample,
        nn.InstanceNorm2d: rules.compute_instance_norm_grad_sample,
        nn.InstanceNorm3d: rules.compute_instance_norm_grad_sample,
        nn.LayerNorm: rules.compute_layer_norm_grad_sample,
        nn.Linear: rules.compute_linear_grad_sample,
        nn.RMSNorm: rules.compute_rms_norm_grad_sample,
        RNNLinear: rules.compute_rnn_linear_grad_sample,
        SequenceBias: rules.compute_sequence_bias_grad_sample,
    },
    REGISTERED,
    register_grad_sampler,
)
"""Rules for per-sample gradients."""

NORM_SAMPLERS = Samplers(
    {nn.Embedding: rules.compute_embedding_norm_sample, nn.Linear: rules.compute_linear_norm_sample},
    REGISTERED_NORMS,
    register_norm_sampler,
)
"""Rules for per-sample gradient norms."""
