"""Rules for gradients and norms that users register, as functions of a layer and its call."""

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
from dpengine.errors import MissingGradientError, UnsupportedLayerError, suggests_names

from .rule_check import RuleCheck
from .sampler import JointSampler, Rows

GradFunction = Callable[[Any, "list[Any]", Any], Mapping[nn.Parameter, Tensor]]
NormFunction = GradFunction


@dataclass(frozen=True, eq=False)
class RegisteredGrads:
    """A rule for gradients.

    Attributes:
        function: As it was registered.
        sampler: What the engine makes of it.
    """

    function: GradFunction
    sampler: JointSampler


@dataclass(frozen=True, eq=False)
class RegisteredNorms:
    """A rule for norms.

    Attributes:
        function: As it was registered.
        sq_norm: What the engine makes of it: for the name of a parameter, its squared norms ``(B,)``.
    """

    function: NormFunction
    sq_norm: Callable[[str], Rows]


REGISTERED: dict[type[nn.Module], RegisteredGrads | None] = {}
"""Rules of ``register_grad_sampler``, which replace those of ``BUILTIN``. None selects the functional fallback."""

REGISTERED_NORMS: dict[type[nn.Module], RegisteredNorms | None] = {}
"""What ``register_norm_sampler`` added; it goes before the engine's own ways to norms."""


@suggests_names
def register_grad_sampler(
    layer_class: type[nn.Module] | Sequence[type[nn.Module]], *, own_loss: bool = False
) -> Callable[[GradFunction], GradFunction]:
    """Makes a function the rule for the per-sample gradients of a layer class.

    The function takes ``(layer, activations, backprops)``: the module, the list of its inputs in the order of its
    ``forward``, and the gradient of its output, all with the batch on axis 0 and not scaled. It returns, for each
    trainable parameter of the layer, the gradients of all rows, ``{parameter: (B, *parameter.shape)}``. Only exactly
    this class is matched, not its subclasses. A later registration replaces an earlier one, and wins over the built-in
    rule. Models that are attached already keep the rules that they have. In the first batches of each layer, results
    are compared with those of a loop over samples; if they differ, ``ExtensionError`` is raised.

    Args:
        layer_class: The class, or several.
        own_loss: Whether ``backprops`` and the returned gradients are those of each sample's own loss. If the loss is a
            mean over samples, ``backprops`` is then multiplied by the number of samples.

    Returns:
        A decorator that returns the function unchanged.

    Raises:
        TypeError: If something other than a subclass of ``nn.Module`` is given, or the decorated rule is no function.
    """  # noqa: DOC502 - what is called raises on our behalf
    classes = _classes("register_grad_sampler", layer_class)

    def register(function: GradFunction) -> GradFunction:
        _check_callable("register_grad_sampler", "grad sampler", classes, function)
        rule = RegisteredGrads(function, _joint(function, own_loss))
        REGISTERED.update(dict.fromkeys(classes, rule))
        return function

    return register


@suggests_names
def register_norm_sampler(
    layer_class: type[nn.Module] | Sequence[type[nn.Module]], *, own_loss: bool = False
) -> Callable[[NormFunction], NormFunction]:
    """Makes a function the rule for the per-sample gradient norms of a layer class.

    The function takes what a grad sampler takes. It returns, for each trainable parameter of the layer itself, the norm
    of every row's gradient, ``{parameter: (B,)}``, and clipping is only as sound as these norms: where one is too
    small, a row counts for more than the noise was calibrated for. With ``grad_sample_mode="auto"`` and ``"ghost"``
    rows are clipped by them, while sums come from the registered grad sampler, else from the built-in rule, else from
    ``torch.func``. Other modes form gradients, and take their norms. So do these two for a parameter that is used more
    than once in a pass, since norms of parts do not add, where several rows are clipped as one, in a compiled pass,
    and where the model is spread over processes.

    Only exactly this class is matched, not its subclasses. A later registration replaces an earlier one. Models that
    are attached already keep the rules that they have. In the first batches of each layer, norms are compared with
    those of a loop over samples; if they differ, ``ExtensionError`` is raised.

    Args:
        layer_class: The class, or several.
        own_loss: As for ``register_grad_sampler``.

    Returns:
        A decorator that returns the function unchanged.

    Raises:
        TypeError: If something other than a subclass of ``nn.Module`` is given, or the decorated rule is no function.
    """  # noqa: DOC502 - what is called raises on our behalf
    classes = _classes("register_norm_sampler", layer_class)

    def register(function: NormFunction) -> NormFunction:
        _check_callable("register_norm_sampler", "norm sampler", classes, function)
        rule = RegisteredNorms(function, _sq_norms(function, own_loss))
        REGISTERED_NORMS.update(dict.fromkeys(classes, rule))
        return function

    return register


def _classes(caller: str, given: Any) -> list[type[nn.Module]]:
    classes = list(given) if isinstance(given, Sequence) else [given]
    for cls in classes or [given]:  # an empty list is no class either
        if not (isinstance(cls, type) and issubclass(cls, nn.Module)):
            raise TypeError(
                f"{caller} takes a subclass of torch.nn.Module, or a list of them; got {cls!r}. Write "
                f"@{caller}(MyLayer) above the function."
            )
    return classes


def _check_callable(caller: str, what: str, classes: Sequence[type[nn.Module]], function: Any) -> None:
    if not callable(function):
        raise TypeError(
            f"The {what} for {', '.join(cls.__name__ for cls in classes)} is {function!r}, which cannot be called. "
            f"Write @{caller}(MyLayer) above a function."
        )


def _joint(function: GradFunction, own_loss: bool) -> JointSampler:
    check = RuleCheck("grad")

    def grads(call: LayerCall) -> dict[str, Tensor]:
        parameters = dict(call.layer.named_parameters())
        if call.batch_size == 0:
            return {n: p.new_zeros(0, *p.shape) for n, p in parameters.items() if p.requires_grad}
        names = {parameter: name for name, parameter in parameters.items()}
        found = _asked("grad", function, own_loss, call)
        if call.layer not in check.settled:
            check.compare(call, found)
        return {names[parameter]: grad for parameter, grad in found.items()}

    return JointSampler(grads)


def _sq_norms(function: NormFunction, own_loss: bool) -> Callable[[str], Rows]:
    check = RuleCheck("norm")
    answers: weakref.WeakKeyDictionary[LayerCall, dict[nn.Parameter, Any]] = weakref.WeakKeyDictionary()

    def sq_norm_of(name: str) -> Rows:
        def sq_norm(call: LayerCall) -> Tensor:
            parameter = call.layer.get_parameter(name)
            if call.batch_size == 0:
                return parameter.new_zeros(0)
            if call not in answers:  # one answer for all parameters of a call
                answers[call] = _asked("norm", function, own_loss, call)
                if call.layer not in check.settled:
                    check.compare(call, answers[call])
            norm_B = _checked(call, name, answers[call].get(parameter))
            return norm_B.to(torch.promote_types(norm_B.dtype, torch.float32)).square()

        return sq_norm

    return sq_norm_of


def _checked(call: LayerCall, name: str, norm_B: Any) -> Tensor:
    """Returns the norms that a rule gave for a parameter; MissingGradientError unless there is one for each row."""
    where = f"The norm sampler of '{call.name}' ({type(call.layer).__name__})"
    parameter = f"'{call.name}.{name}'" if call.name else repr(name)
    fix = "Return {parameter: norm of every row's gradient} for every trainable parameter of the layer."
    if norm_B is None:
        raise MissingGradientError(f"{where} gave no norms for parameter {parameter}.", fix=fix)
    if not (isinstance(norm_B, Tensor) and norm_B.is_floating_point()):
        raise MissingGradientError(
            f"{where} gave {torch.typename(norm_B)} for parameter {parameter}; expected a tensor of floating point "
            "numbers.",
            fix=fix,
        )
    if tuple(norm_B.shape) != (call.batch_size,):
        raise MissingGradientError(
            f"{where} gave shape {tuple(norm_B.shape)} for parameter {parameter}; expected {(call.batch_size,)}.",
            fix=fix,
        )
    return norm_B


def _asked(what: str, function: GradFunction, own_loss: bool, call: LayerCall) -> dict[nn.Parameter, Any]:
    """Returns the result of a rule for a call, per unit of the gradients of the call."""
    kind = type(call.layer).__name__
    scale = call.batch_size if own_loss and call.mean_loss else 1
    backprops = call.grad_output
    if scale != 1:
        backprops = pytree.tree_map(lambda leaf: leaf * scale if isinstance(leaf, Tensor) else leaf, backprops)
    found = function(call.layer, _activations(call), backprops)
    fix = "Return {layer.weight: ..., layer.bias: ...}, with the parameter objects as keys."
    if not isinstance(found, Mapping):
        raise MissingGradientError(
            f"The {what} sampler registered for {kind} returned {torch.typename(found)} for layer '{call.name}'; "
            "expected a mapping.",
            fix=fix,
        )
    if not found.keys() <= set(call.layer.parameters()):
        raise UnsupportedLayerError(
            f"The {what} sampler registered for {kind} returned a key that is not a parameter of layer '{call.name}'.",
            fix=fix,
        )
    return {parameter: _divided(value, scale) for parameter, value in found.items()}


def _divided(value: Any, scale: int) -> Any:
    """Divides tensors of floating point numbers; other values are returned unchanged, and rejected later."""
    floating = isinstance(value, Tensor) and value.is_floating_point()
    return value / scale if scale != 1 and floating else value


def _activations(call: LayerCall) -> list[Any]:
    """All inputs in the order of ``forward``'s signature, keyword inputs included."""
    if not call.kwargs:
        return list(call.inputs)
    bound = inspect.signature(call.layer.forward).bind(*call.inputs, **call.kwargs)
    bound.apply_defaults()
    return [*bound.args, *bound.kwargs.values()]
