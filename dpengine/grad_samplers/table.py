"""Which layers are known: the built-in table, and what users register beside it."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear

from dpengine.capture import LayerCall
from dpengine.distributed import layer_type
from dpengine.errors import MissingGradientError, UnsupportedLayerError
from dpengine.names import suggests_names

from . import bilinear, conv, embedding, embedding_bag, group_norm, instance_norm, layer_norm, linear, prelu, rms_norm
from .sampler import GradSampler, JointSampler

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
    nn.LayerNorm: layer_norm.SAMPLERS,
    nn.GroupNorm: group_norm.SAMPLERS,
    nn.InstanceNorm1d: instance_norm.SAMPLERS,
    nn.InstanceNorm2d: instance_norm.SAMPLERS,
    nn.InstanceNorm3d: instance_norm.SAMPLERS,
    nn.RMSNorm: rms_norm.SAMPLERS,
    nn.PReLU: prelu.SAMPLERS,
}

REGISTERED: dict[type[nn.Module], JointSampler] = {}
"""What ``register_grad_sampler`` added; it goes before ``BUILTIN``."""

GradFunction = Callable[[Any, "list[Any]", Any], Mapping[nn.Parameter, Tensor]]


@suggests_names
def register_grad_sampler(
    layer_class: type[nn.Module] | Sequence[type[nn.Module]],
) -> Callable[[GradFunction], GradFunction]:
    """Makes a function the rule for the per-sample gradients of a layer class.

    The function takes ``(layer, activations, backprops)``: the module, the list of its inputs in the order of its
    ``forward``, and the gradient of its output, all with the batch on axis 0 and not scaled. It returns, for each
    trainable parameter of the layer, the gradients of all rows, ``{parameter: (B, *parameter.shape)}``. Only exactly
    this class is matched, not its subclasses. A later registration replaces an earlier one, and wins over the built-in
    rule.

    Args:
        layer_class: The class, or several.

    Returns:
        A decorator that returns the function unchanged.

    Raises:
        TypeError: If something other than a subclass of ``nn.Module`` is given, or the decorated rule is no function.
    """
    classes: list[Any] = list(layer_class) if isinstance(layer_class, Sequence) else [layer_class]
    for cls in classes or [layer_class]:  # an empty list is no class either
        if not (isinstance(cls, type) and issubclass(cls, nn.Module)):
            raise TypeError(
                f"register_grad_sampler takes a subclass of torch.nn.Module, or a list of them; got {cls!r}. Write "
                "@register_grad_sampler(MyLayer) above the function."
            )

    def register(function: GradFunction) -> GradFunction:
        if not callable(function):
            raise TypeError(
                f"The grad sampler for {', '.join(cls.__name__ for cls in classes)} is {function!r}, which cannot be "
                "called. Write @register_grad_sampler(MyLayer) above a function."
            )
        REGISTERED.update(dict.fromkeys(classes, _joint(function)))
        return function

    return register


def sampler_for(module: nn.Module, *, name: str = "") -> Mapping[str, GradSampler] | JointSampler | None:
    """The rule for exactly this module, or None where only the functional fallback fits.

    An embedding whose settings mix the rows of a batch raises ``UnsupportedLayerError``.

    Args:
        module: The layer.
        name: Its dotted name, for the message.

    Returns:
        One sampler for each parameter, or a joint one; None if the type is not known, if this instance computes
        something else than its class (a ``forward`` of its own; a parametrization makes a class of its own), or if it
        holds parameters that the rule does not know (old weight norm, pruning).
    """
    if "forward" in vars(module):
        return None
    kind = layer_type(module)
    if kind in REGISTERED:
        return REGISTERED[kind]
    samplers = BUILTIN.get(kind)
    if samplers is None:
        return None
    embedding.refuse_unsafe_embedding(module, name)
    own = {parameter for parameter, _ in module.named_parameters(recurse=False)}  # frozen ones too: they may be thawed
    return samplers if own <= samplers.keys() else None


def _joint(function: GradFunction) -> JointSampler:
    def grads(call: LayerCall) -> dict[str, Tensor]:
        parameters = dict(call.layer.named_parameters())
        if call.batch_size == 0:
            return {n: p.new_zeros(0, *p.shape) for n, p in parameters.items() if p.requires_grad}
        names = {parameter: name for name, parameter in parameters.items()}
        found = function(call.layer, _activations(call), call.grad_output)
        if not isinstance(found, Mapping):
            raise MissingGradientError(
                f"The grad sampler registered for {type(call.layer).__name__} returned {torch.typename(found)} for "
                f"layer '{call.name}'; expected a mapping.",
                fix="Return {layer.weight: ..., layer.bias: ...}, with the parameter objects as keys.",
            )
        if not found.keys() <= names.keys():
            raise UnsupportedLayerError(
                f"The grad sampler registered for {type(call.layer).__name__} returned a key that is not a parameter "
                f"of layer '{call.name}'.",
                fix="Return {layer.weight: ..., layer.bias: ...}, with the parameter objects as keys.",
            )
        return {names[parameter]: grad for parameter, grad in found.items()}

    return JointSampler(grads)


def _activations(call: LayerCall) -> list[Any]:
    """All inputs in the order of ``forward``'s signature, keyword inputs included."""
    if not call.kwargs:
        return list(call.inputs)
    bound = inspect.signature(call.layer.forward).bind(*call.inputs, **call.kwargs)
    bound.apply_defaults()
    return [*bound.args, *bound.kwargs.values()]
