"""Registration of user-defined rules for per-sample gradients and norms."""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from dpengine.capture.record import LayerCall
from dpengine.errors import MissingGradientError, UnsupportedLayerError, keyword_hints

from .rule_check import RuleCheck
from .sampler import JointSampler, PerSample

GradFunction = Callable[[Any, "list[Any]", Any], Mapping[nn.Parameter, Tensor]]
NormFunction = GradFunction


@dataclass(frozen=True, eq=False)
class RegisteredGrads:
    """Registered rule for gradients.

    Attributes:
        function: The registered function.
        sampler: The engine's rule, which calls the function.
    """

    function: GradFunction
    sampler: JointSampler


@dataclass(frozen=True, eq=False)
class RegisteredNorms:
    """Registered rule for norms.

    Attributes:
        function: The registered function.
        sq_norm: Maps the name of a parameter to the function of its squared norms ``(B,)``.
    """

    function: NormFunction
    sq_norm: Callable[[str], PerSample]


REGISTERED: dict[type[nn.Module], RegisteredGrads | None] = {}
"""Rules of ``register_grad_sampler``, which replace those of ``BUILTIN``. None selects the functional fallback."""

REGISTERED_NORMS: dict[type[nn.Module], RegisteredNorms | None] = {}
"""Rules of ``register_norm_sampler``, which replace the norm functions of the engine."""


@keyword_hints
def register_grad_sampler(
    layer_class: type[nn.Module] | Sequence[type[nn.Module]], *, own_loss: bool = False
) -> Callable[[GradFunction], GradFunction]:
    """Registers a function as the rule for the per-sample gradients of a layer class.

    The function takes ``(layer, activations, backprops)``: the module, the list of its inputs in the order of its
    ``forward``, and the gradient of its output, all with the batch on axis 0. It returns the per-sample gradients of
    each trainable parameter of the layer, ``{parameter: (B, *parameter.shape)}``. The rule applies only to exactly this
    class, not to subclasses. It replaces an earlier registration and the built-in rule. Models with attached hooks keep
    their rules. In the first batches of each layer, the results are compared with those of a loop over samples.
    ``ExtensionError`` is raised if they differ.

    Args:
        layer_class: The class, or a list of classes.
        own_loss: Whether ``backprops`` and the returned gradients refer to the losses of single samples. If the loss is
            a mean over samples, ``backprops`` is then multiplied by the number of samples.

    Returns:
        A decorator that returns the function unchanged.

    Raises:
        TypeError: If ``layer_class`` is not a subclass of ``nn.Module``, or the decorated object is not callable.
    """  # noqa: DOC502 - the checks raise
    classes = _classes("register_grad_sampler", layer_class)

    def register(function: GradFunction) -> GradFunction:
        _check_callable("register_grad_sampler", "grad sampler", classes, function)
        rule = RegisteredGrads(function, _joint(function, own_loss))
        REGISTERED.update(dict.fromkeys(classes, rule))
        return function

    return register


@keyword_hints
def register_norm_sampler(
    layer_class: type[nn.Module] | Sequence[type[nn.Module]], *, own_loss: bool = False
) -> Callable[[NormFunction], NormFunction]:
    """Registers a function as the rule for the per-sample gradient norms of a layer class.

    The function takes ``(layer, activations, backprops)``, as a grad sampler does. It returns the norms of the
    per-sample gradients of each trainable parameter of the layer itself, ``{parameter: (B,)}``. With
    ``grad_sample_mode="auto"`` and ``"ghost"``, samples are clipped by these norms. Sums are computed by the registered
    grad sampler, else by the built-in rule, else by ``torch.func``. Other modes form gradients and compute their norms.
    ``"auto"`` and ``"ghost"`` also do so if several samples are clipped together, if the pass is compiled, if the model
    is distributed over processes, and if a parameter is used more than once in a pass: norms of uses cannot be added.

    Privacy: the guarantee holds only if the norms are correct. If a norm is too small, the contribution of a sample
    exceeds the sensitivity for which the noise was calibrated.

    The rule applies only to exactly this class, not to subclasses. It replaces an earlier registration. Models with
    attached hooks keep their rules. In the first batches of each layer, the norms are compared with those of a loop
    over samples. ``ExtensionError`` is raised if they differ.

    Args:
        layer_class: The class, or a list of classes.
        own_loss: Whether ``backprops`` and the returned norms refer to the losses of single samples, see
            ``register_grad_sampler``.

    Returns:
        A decorator that returns the function unchanged.

    Raises:
        TypeError: If ``layer_class`` is not a subclass of ``nn.Module``, or the decorated object is not callable.
    """  # noqa: DOC502 - the checks raise
    classes = _classes("register_norm_sampler", layer_class)

    def register(function: NormFunction) -> NormFunction:
        _check_callable("register_norm_sampler", "norm sampler", classes, function)
        rule = RegisteredNorms(function, _sq_norms(function, own_loss))
        REGISTERED_NORMS.update(dict.fromkeys(classes, rule))
        return function

    return register


def _classes(caller: str, layer_class: Any) -> list[type[nn.Module]]:
    classes = list(layer_class) if isinstance(layer_class, Sequence) else [layer_class]
    for cls in classes or [layer_class]:  # an empty list is rejected, too
        if not (isinstance(cls, type) and issubclass(cls, nn.Module)):
            raise TypeError(
                f"{caller} takes a subclass of torch.nn.Module, or a list of them; got {cls!r}. Write "
                f"@{caller}(MyLayer) above the function."
            )
    return classes


def _check_callable(caller: str, kind: str, classes: Sequence[type[nn.Module]], function: Any) -> None:
    if not callable(function):
        raise TypeError(
            f"The {kind} for {', '.join(cls.__name__ for cls in classes)} is {function!r}, which cannot be called. "
            f"Write @{caller}(MyLayer) above a function."
        )


def _joint(function: GradFunction, own_loss: bool) -> JointSampler:
    check = RuleCheck("grad")

    def grads(call: LayerCall) -> dict[str, Tensor]:
        parameters = dict(call.layer.named_parameters())
        if call.batch_size == 0:
            return {n: p.new_zeros(0, *p.shape) for n, p in parameters.items() if p.requires_grad}
        names = {parameter: name for name, parameter in parameters.items()}
        results = _results("grad", function, own_loss, call)
        if call.layer not in check.settled:
            check.compare(call, results)
        return {names[parameter]: grad for parameter, grad in results.items()}

    return JointSampler(grads)


def _sq_norms(function: NormFunction, own_loss: bool) -> Callable[[str], PerSample]:
    check = RuleCheck("norm")
    results: weakref.WeakKeyDictionary[LayerCall, dict[nn.Parameter, Any]] = weakref.WeakKeyDictionary()

    def sq_norm_of(name: str) -> PerSample:
        def sq_norm(call: LayerCall) -> Tensor:
            parameter = call.layer.get_parameter(name)
            if call.batch_size == 0:
                return parameter.new_zeros(0)
            if call not in results:  # the function is called once for all parameters of a call
                results[call] = _results("norm", function, own_loss, call)
                if call.layer not in check.settled:
                    check.compare(call, results[call])
            norm_B = _checked(call, name, results[call].get(parameter))
            return norm_B.to(torch.promote_types(norm_B.dtype, torch.float32)).square()

        return sq_norm

    return sq_norm_of


def _checked(call: LayerCall, name: str, norm_B: Any) -> Tensor:
    """Returns the norms of a rule for a parameter. Raises MissingGradientError unless there is one for each sample."""
    where = f"The norm sampler of '{call.name}' ({type(call.layer).__name__})"
    parameter = f"'{call.name}.{name}'" if call.name else repr(name)
    fix = "Return {parameter: norms of the per-sample gradients} for every trainable parameter of the layer."
    if norm_B is None:
        raise MissingGradientError(f"{where} returned no norms for parameter {parameter}.", fix=fix)
    if not (isinstance(norm_B, Tensor) and norm_B.is_floating_point()):
        raise MissingGradientError(
            f"{where} returned {torch.typename(norm_B)} for parameter {parameter}; expected a tensor of floating point "
            "numbers.",
            fix=fix,
        )
    if tuple(norm_B.shape) != (call.batch_size,):
        raise MissingGradientError(
            f"{where} returned shape {tuple(norm_B.shape)} for parameter {parameter}; expected {(call.batch_size,)}.",
            fix=fix,
        )
    return norm_B


def _results(rule_kind: str, function: GradFunction, own_loss: bool, call: LayerCall) -> dict[nn.Parameter, Any]:
    """Returns the results of a rule for a call, in the scale of the gradients of the call."""
    kind = type(call.layer).__name__
    scale = call.batch_size if own_loss and call.mean_loss else 1
    backprops = call.grad_output
    if scale != 1:
        backprops = pytree.tree_map(lambda leaf: leaf * scale if isinstance(leaf, Tensor) else leaf, backprops)
    results = function(call.layer, _activations(call), backprops)
    sampler = f"The {rule_kind} sampler registered for {kind}"
    fix = "Return {layer.weight: ..., layer.bias: ...}, with the parameter objects as keys."
    if not isinstance(results, Mapping):
        raise MissingGradientError(
            f"{sampler} returned {torch.typename(results)} for layer '{call.name}'; expected a mapping.", fix=fix
        )
    if not results.keys() <= set(call.layer.parameters()):
        raise UnsupportedLayerError(
            f"{sampler} returned a key that is not a parameter of layer '{call.name}'.", fix=fix
        )
    return {parameter: _divided(value, scale) for parameter, value in results.items()}


def _divided(value: Any, scale: int) -> Any:
    """Divides floating-point tensors. Returns other values unchanged; they are rejected later."""
    floating = isinstance(value, Tensor) and value.is_floating_point()
    return value / scale if scale != 1 and floating else value


def _activations(call: LayerCall) -> list[Any]:
    """Returns all inputs, including keyword inputs, in the order of the signature of ``forward``."""
    if not call.kwargs:
        return list(call.inputs)
    bound = inspect.signature(call.layer.forward).bind(*call.inputs, **call.kwargs)
    bound.apply_defaults()
    return [*bound.args, *bound.kwargs.values()]
