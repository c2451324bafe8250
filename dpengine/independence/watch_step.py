"""Records the calls of models in a training step, and replaces its backward pass."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from dpengine.capture.capture import attached_captures
from dpengine.capture.model_state import ModelState
from dpengine.capture.tensors import map_outputs, tensors_in, tensors_in_outputs
from dpengine.errors import BatchStateError

from .random_states import random_states

# Identifies a tensor: "input", "output" or "layer"; number of the call; index of the tensor in the call.
TensorKey = tuple[str, int, int]
ReplaceOutput = Callable[[TensorKey, Tensor], Tensor]

CHECKED_LOOPS: weakref.WeakSet[nn.Module] = weakref.WeakSet()  # models whose last check_loop passed

_HALF = {torch.float16, torch.bfloat16}


class StepTensors(NamedTuple):
    """Tensors of one run of a step, by key.

    Attributes:
        inputs: Inputs of the model calls that the backward pass reached.
        outputs: Model outputs that require a gradient, after replacement.
        original: Model outputs before replacement, with or without gradient. Empty if a model drew random numbers.
        grads: Gradients with respect to `outputs`, and to `layers` if a model computes a loss.
        layers: Outputs of layers that require a gradient.
        drew_random: Whether random numbers were drawn outside the models.
        half: Whether a model returned outputs in half precision.
    """

    inputs: Mapping[TensorKey, Tensor]
    outputs: Mapping[TensorKey, Tensor]
    original: Mapping[TensorKey, Tensor]
    grads: Mapping[TensorKey, Tensor]
    layers: Mapping[TensorKey, Tensor]
    drew_random: bool
    half: bool


class StepWatch:
    """Records the model calls of a step, and computes gradients with respect to model outputs, not parameters.

    A model is an outermost module with trainable parameters. The step receives copies of the model outputs, with the
    values that ``replace`` returns.

    Attributes:
        models: The models that were called, each with its state before its first call.
        differentiated: True if a backward pass was started.
    """

    def __init__(self, replace: ReplaceOutput):
        self.models: dict[nn.Module, ModelState] = {}
        self.differentiated = False
        self._replace = replace
        self._inside: list[nn.Module] = []  # the running model, and the running modules inside it
        self._inputs: list[list[Tensor]] = []
        self._outputs: dict[TensorKey, Tensor] = {}  # outputs of models and layers
        self._grads: dict[TensorKey, Tensor] = {}
        self._original: dict[TensorKey, Tensor] = {}  # outputs of models before they are replaced
        self._half = self._drew = self._model_drew = False
        self._before: list[Tensor] = []  # random states before the running call of a model
        self._random: list[Tensor] = []  # random states after the last call of a model

    def tensors(self) -> StepTensors:
        """Returns the recorded tensors."""
        reached = {key[1] for key in self._grads if key[0] == "output"}
        inputs = {("input", i, k): tensor for i in reached for k, tensor in enumerate(self._inputs[i])}
        values = {key: tensor.detach() for key, tensor in self._outputs.items()}
        outputs, layers = ({p: t for p, t in values.items() if p[0] == kind} for kind in ("output", "layer"))
        original = (
            {} if self._model_drew else {key: tensor for key, tensor in self._original.items() if key[1] in reached}
        )
        return StepTensors(inputs, outputs, original, self._grads, layers, self._drew, self._half)

    @contextmanager
    def active(self) -> Iterator[None]:
        """Context manager: records model calls. Inside, ``optimizer.step()`` raises and privacy engines are paused.

        Restores the models on exit.
        """
        with ExitStack() as stack:
            private = attached_captures()
            for capture in private:
                stack.enter_context(capture.paused())
            states = [ModelState.of(capture.model) for capture in private]  # the step itself may change buffers
            stack.enter_context(torch.enable_grad())
            if "torch._dynamo" in sys.modules:
                stack.enter_context(torch.compiler.set_stance("force_eager"))
            for handle in (
                register_module_forward_pre_hook(self._started),
                register_module_forward_hook(self._ended, with_kwargs=True, always_call=True),
                register_optimizer_step_pre_hook(_reject_step),
            ):
                stack.callback(handle.remove)
            replaced: tuple[tuple[Any, str, Any], ...] = (
                (Tensor, "backward", lambda root, gradient=None, *_, **__: self.backward([root], [gradient])),
                (torch.autograd, "backward", self._autograd_backward),
                (Optimizer, "zero_grad", _no_op),
                (nn.Module, "zero_grad", _no_op),
            )
            for owner, name, function in replaced:
                stack.callback(setattr, owner, name, getattr(owner, name))
                setattr(owner, name, function)
            self._random = random_states()
            try:
                yield
                self._check_random()
            finally:
                for state in (*self.models.values(), *states):
                    state.restore()

    def backward(self, roots: Sequence[Tensor], grads: Sequence[Tensor | None]) -> None:
        """Accumulates gradients with respect to model outputs, and to layer outputs if a model returned a loss."""
        self.differentiated = True
        self._differentiate("output", roots, grads)
        if any(grad.dim() == 0 and bool(grad != 0) for grad in self._grads.values()):
            self._differentiate("layer", roots, grads)

    def _differentiate(self, kind: str, roots: Sequence[Tensor], grads: Sequence[Tensor | None]) -> None:
        outputs = {key: tensor for key, tensor in self._outputs.items() if key[0] == kind}
        if not outputs:
            return
        gradients = torch.autograd.grad(roots, list(outputs.values()), grads, retain_graph=True, allow_unused=True)
        for key, grad in zip(outputs, gradients, strict=True):
            if grad is not None:
                self._grads[key] = self._grads[key] + grad if key in self._grads else grad.detach()

    def _autograd_backward(self, tensors: Any, grad_tensors: Any = None, *_: Any, **__: Any) -> None:
        roots = [tensors] if isinstance(tensors, Tensor) else list(tensors)
        grads = [grad_tensors] if isinstance(grad_tensors, Tensor) else list(grad_tensors or [None] * len(roots))
        self.backward(roots, grads)

    def _started(self, module: nn.Module, args: Any) -> None:
        if self._inside or any(parameter.requires_grad for parameter in module.parameters()):
            if not self._inside:
                self._check_random()
                self._before = random_states()
                self.models.setdefault(module, ModelState.of(module))
            self._inside.append(module)

    def _ended(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
        if not self._inside:
            return None
        self._inside.pop()
        if not self._inside:
            before, self._random = self._before, random_states()
            self._model_drew |= not all(map(torch.equal, before, self._random))
        if output is None:  # after an exception
            return None
        if self._inside:
            if any(parameter.requires_grad for parameter in module._parameters.values() if parameter is not None):
                self._record("layer", len(self._outputs), output)
            return None
        number = len(self._inputs)
        self._inputs.append([tensor.detach().clone() for tensor in tensors_in((args, kwargs))])
        self._record("layer", len(self._outputs), output if module._parameters else ())
        self._original.update({("output", number, k): t.detach() for k, t in enumerate(tensors_in_outputs(output))})
        self._half |= any(t.dtype in _HALF for t in tensors_in_outputs(output))
        index = iter(range(len(tensors_in_outputs(output))))
        replaced = map_outputs(lambda tensor: self._replaced(("output", number, next(index)), tensor), output)
        self._record("output", number, replaced)  # not the originals: one may be computed from another
        return replaced

    def _check_random(self) -> None:
        """Sets `drew` if random numbers were drawn since the last call of a model."""
        self._drew |= not all(map(torch.equal, self._random, random_states()))

    def _record(self, kind: str, number: int, output: Any) -> None:
        for k, tensor in enumerate(tensors_in_outputs(output)):
            if tensor.requires_grad:
                self._outputs[kind, number, k] = tensor

    def _replaced(self, key: TensorKey, output: Tensor) -> Tensor:
        value = self._replace(key, output) if output.requires_grad else output
        return _WithValue.apply(output, value)  # type: ignore[no-any-return]


class _WithValue(torch.autograd.Function):
    """Returns a copy of a tensor with other values, and passes the gradient on to the tensor."""

    @staticmethod
    def forward(output: Tensor, value: Tensor) -> Tensor:
        return value.clone()

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


def _no_op(*_: Any, **__: Any) -> None:
    pass


def _reject_step(optimizer: Optimizer, *_: Any) -> None:
    raise step_inside_check_error(type(optimizer).__name__)


def step_inside_check_error(name: str) -> BatchStateError:
    """Returns the error for an optimizer step inside `check_loop`."""
    return BatchStateError(
        f"{name}.step() was called inside check_loop, which must not change the model.",
        fix="Pass check_loop a function that computes the loss and does not call optimizer.step().",
    )
