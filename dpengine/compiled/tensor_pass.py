"""Forward and backward pass with per-sample norms and weighted sums, as a function of tensors.

Axes: B samples, K groups of parameters that are clipped together.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from dpengine.capture.capture import Capture
from dpengine.errors import BufferUpdateError, MissingGradientError, UnsupportedLayerError
from dpengine.grad_modes.bookkeep import BookKeeping
from dpengine.grad_modes.choose_method import MethodTable
from dpengine.grad_modes.flat_buffer import Key, Sums
from dpengine.grad_modes.rows import wide
from dpengine.kernels.precision import without_autocast

from .settings import INTERNAL, VALUE_TYPES, comparable_form


class PassInputs(NamedTuple):
    """Input tensors of a pass.

    Attributes:
        values: Parameters and buffers of the model.
        batch: The tensor arguments of the model.
        grads: Gradients of the outputs that require a gradient.
        weights_BK: Factors of the per-sample gradients in the sums.
    """

    values: Sequence[Tensor]
    batch: Sequence[Tensor]
    grads: Sequence[Tensor]
    weights_BK: Tensor


@dataclass(frozen=True, eq=False)
class Results:
    """Results of a pass.

    Attributes:
        outputs: Tensors in the output of the model, detached and without duplicates.
        sq_norms_BK: Squared norms of per-sample gradients.
        sums: Weighted sums of the per-sample gradients of all parameters, one vector for each device and dtype, in the
            order of the groups.
    """

    outputs: list[Tensor]
    sq_norms_BK: Tensor
    sums: list[Tensor]


@dataclass(eq=False)
class OutputLayout:
    """Structure of the output of a model.

    Attributes:
        spec: Pytree spec of the output.
        leaves: One pair for each leaf: the index of its tensor and None, or None and its value.
        differentiable: Whether each tensor requires a gradient.
    """

    spec: Any
    leaves: list[tuple[int | None, Any]]
    differentiable: list[bool]

    @classmethod
    def of(cls, output: Any) -> tuple[OutputLayout, list[Tensor]]:
        """Returns the layout of an output, and its tensors without duplicates."""
        flat, spec = pytree.tree_flatten(output)
        tensors = list({id(leaf): leaf for leaf in flat if isinstance(leaf, Tensor)}.values())
        number = {id(tensor): i for i, tensor in enumerate(tensors)}
        for leaf in flat:
            if not isinstance(leaf, (Tensor, *VALUE_TYPES)):
                raise UnsupportedLayerError(f"the model returns a {type(leaf).__name__}.")
        leaves = [(number.get(id(leaf)), None if isinstance(leaf, Tensor) else leaf) for leaf in flat]
        return cls(spec, leaves, [tensor.requires_grad for tensor in tensors]), tensors

    def unflatten(self, tensors: Sequence[Tensor]) -> Any:
        """Returns an output with this layout that contains ``tensors``."""
        return pytree.tree_unflatten([leaf if i is None else tensors[i] for i, leaf in self.leaves], self.spec)


@dataclass(frozen=True, eq=False)
class TensorPass:
    """Forward and backward pass of a model with hooks.

    Attributes:
        capture: The capture of the model, whose hooks are redirected while the pass runs.
        forward: Calls the model with the given tensor arguments; other arguments are fixed.
        state: Parameters and buffers of the model, without duplicates.
        groups: Clipping group of each clipped parameter.
        num_groups: Number of groups.
        num_samples: Number of samples.
        included: The parameters that had a gradient in the last pass.
    """

    capture: Capture
    forward: Callable[[Sequence[Tensor]], Any]
    state: Sequence[Tensor]
    groups: Mapping[nn.Parameter, int]
    num_groups: int
    num_samples: int
    included: list[nn.Parameter] = field(default_factory=list)

    def layout(self, values: Sequence[Tensor], batch: Sequence[Tensor]) -> tuple[OutputLayout, list[Tensor]]:
        """Runs only the forward pass. Returns the layout of the output and its tensors."""
        with self._forward(values, batch) as (output, _, _):
            layout, tensors = OutputLayout.of(output)
        memory = [tensor.untyped_storage().data_ptr() for tensor in tensors if tensor.numel()]
        if len(set(memory)) < len(memory):
            raise UnsupportedLayerError("two outputs of the model share memory.")
        return layout, [tensor.detach() for tensor in tensors]

    def run(self, inputs: PassInputs) -> Results:
        """Runs the forward pass, and the backward pass from ``grads`` at the outputs that require a gradient."""
        with self._forward(inputs.values, inputs.batch) as (output, replacements, mode):
            outputs = OutputLayout.of(output)[1]
            trained = [replacement for replacement in replacements.values() if replacement.requires_grad]
            roots = [output for output in outputs if output.requires_grad]
            needed = [self.capture.anchor, *trained]  # other tensors of the user get no gradient
            torch.autograd.backward(roots, inputs.grads, inputs=needed)
        self._check_leaks(replacements)
        groups = {cast(nn.Parameter, replacements[parameter]): group for parameter, group in self.groups.items()}
        with torch.no_grad(), without_autocast():
            if len(mode.parameters) > len(groups):
                mode.keep(groups)
            sq_norms_BK = _negative_if_moved(mode.sq_norms(groups, self.num_groups, 1.0), inputs.grads)
            sums = _AllocatedSums()
            mode.add_sums(groups, inputs.weights_BK, 1.0, sums)
        totals = [(p, sums.totals.get(replacement)) for p, replacement in zip(self.groups, groups, strict=True)]
        self.included[:] = [parameter for parameter, total in totals if total is not None]
        return Results([output.detach() for output in outputs], sq_norms_BK, _flat(totals))

    @contextlib.contextmanager
    def _forward(
        self, values: Sequence[Tensor], batch: Sequence[Tensor]
    ) -> Iterator[tuple[Any, dict[Tensor, Tensor], BookKeeping]]:
        """Runs the forward pass with the given values of parameters and buffers.

        Yields the output, the replacements of parameters and buffers, and the grad mode. The backward pass must run
        inside the context.
        """
        replacements = {
            original: value.detach().requires_grad_(original.requires_grad)
            for original, value in zip(self.state, values, strict=True)
        }
        versions = {value: value._version for value in [*replacements.values(), *batch]}
        mode = BookKeeping(MethodTable(timed=False))  # traced tensors cannot be timed
        with torch.enable_grad(), _replaced_state(self.capture.model, replacements) as changed:
            with self.capture.redirected(mode, self.num_samples):
                output = self.forward([tensor.detach() for tensor in batch])
                self._check_not_written(versions, batch)
                if name := changed():
                    raise UnsupportedLayerError(f"the forward pass changes attribute {name} of a module.")
                yield output, replacements, mode

    def _check_not_written(self, versions: Mapping[Tensor, int], batch: Sequence[Tensor]) -> None:
        if any(tensor._version != versions[tensor] for tensor in batch):
            raise UnsupportedLayerError("the forward pass changes its input in place.")
        for name, buffer in self.capture.model.named_buffers():
            if buffer._version != versions.get(buffer):
                raise BufferUpdateError(f"The forward pass writes into buffer '{name}'.")

    def _check_leaks(self, replacements: Mapping[Tensor, Tensor]) -> None:
        for name, original in self.capture.model.named_parameters():
            if replacements[original].grad is not None:
                raise MissingGradientError(f"Parameter '{name}' is used outside its layer.")


def _negative_if_moved(sq_norms_BK: Tensor, grads: Sequence[Tensor]) -> Tensor:
    """Returns -1 for all norms if one without output gradients is above 0. See note [positions] in graphs.py."""
    no_grad_B = torch.stack([(grad.reshape(len(grad), -1) == 0).all(dim=1) for grad in grads]).all(dim=0)
    moved = ((sq_norms_BK > 0).any(dim=1) & no_grad_B).any()
    return torch.where(moved, -1.0, sq_norms_BK)


class _AllocatedSums(Sums):
    """Sums in newly allocated memory."""

    def __init__(self) -> None:
        self.totals: dict[nn.Parameter, Tensor] = {}

    def add(self, parameter: nn.Parameter, total: Tensor, scale: float = 1.0) -> None:
        total = total.view(parameter.shape).to(wide(parameter.dtype))
        previous = self.totals.get(parameter)
        self.totals[parameter] = total * scale if previous is None else previous + total * scale

    def fill(self, parameter: nn.Parameter, write: Callable[[Tensor, float], None]) -> None:
        previous = self.totals.get(parameter)
        if previous is None:
            previous = torch.empty(parameter.shape, dtype=wide(parameter.dtype), device=parameter.device)
            self.totals[parameter] = previous
            write(previous, 0.0)
        else:
            write(previous, 1.0)

    def complete(self, parameter: nn.Parameter) -> None:
        pass


def _flat(totals: Sequence[tuple[nn.Parameter, Tensor | None]]) -> list[Tensor]:
    """Returns the sums of all parameters as one vector for each device and dtype, as in a `FlatBuffer`."""
    parts: dict[Key, list[Tensor]] = {}
    for p, total in totals:
        dtype = wide(p.dtype)
        part = torch.zeros(p.numel(), dtype=dtype, device=p.device) if total is None else total.reshape(-1)
        parts.setdefault((p.device, dtype), []).append(part)
    return [torch.cat(vectors) for vectors in parts.values()]


def _state_entries(model: nn.Module) -> list[tuple[dict[str, Any], str]]:
    """Returns pairs of a module's table of parameters or buffers and a name in it."""
    tables = [table for module in model.modules() for table in (module._parameters, module._buffers)]
    return [(table, name) for table in tables for name, tensor in table.items() if tensor is not None]


@contextlib.contextmanager
def _replaced_state(model: nn.Module, replacements: Mapping[Tensor, Tensor]) -> Iterator[Callable[[], str | None]]:
    """Replaces the parameters and buffers of the model in the context, and restores all attributes on exit.

    Yields a function that returns the name of an attribute that changed; None if there is none.
    """
    attributes = [(vars(module), dict(vars(module))) for module in model.modules()]
    contents = _contents(attributes)
    tables = [(table, dict(table)) for module in model.modules() for table in (module._parameters, module._buffers)]

    def changed() -> str | None:
        for current, initial in attributes:
            for name in current.keys() | initial.keys():
                if not _same(current.get(name, changed), initial.get(name, changed)):
                    return repr(name)
        for (name, before), (_, after) in zip(contents, _contents(attributes), strict=True):
            if before != after:
                return repr(name)
        return None

    try:
        for table, name in _state_entries(model):
            table[name] = replacements[table[name]]
        yield changed
    finally:
        for current, initial in [*attributes, *tables]:
            for name in current.keys() - initial.keys():
                del current[name]
            current.update(initial)


def _contents(attributes: Sequence[tuple[dict[str, Any], dict[str, Any]]]) -> list[tuple[str, Any]]:
    """Returns the contents of all attributes that are containers or objects."""
    named = [(name, value) for _, initial in attributes for name, value in initial.items() if name not in INTERNAL]
    return [(name, comparable_form(value)) for name, value in named if not isinstance(value, (*VALUE_TYPES, Tensor))]


def _same(a: Any, b: Any) -> bool:
    return a is b or (isinstance(b, (*VALUE_TYPES, tuple)) and type(a) is type(b) and bool(a == b))
